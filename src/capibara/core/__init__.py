"""The documented core: the model, and the kernel object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.core import kernels as kernels
    from capibara.models.modular import ModularCapibaraModel as ModularCapibaraModel

__all__, __getattr__, __dir__ = exports(
    __name__, {"capibara.models.modular": "ModularCapibaraModel"}, modules=("kernels",)
)
