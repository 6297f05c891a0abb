"""The documented core: the kernel object, as far as this version has it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.core import kernels as kernels

__all__ = ["kernels"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "ModularCapibaraModel":
        raise AttributeError(f"{__name__}.{name} is not in this version; it has {', '.join(__all__)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
