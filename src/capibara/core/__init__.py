"""The documented core: the kernel object, as far as this version has it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara import to_come

if TYPE_CHECKING:
    from capibara.core import kernels as kernels

__all__ = ["kernels"]

to_come.announce(__name__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise to_come.no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
