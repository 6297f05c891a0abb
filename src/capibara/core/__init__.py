"""The documented core: the kernel object, as far as this version has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara import to_come
from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.core import kernels as kernels

to_come.announce(__name__)

__all__, __getattr__, __dir__ = exports(
    __name__,
    {},
    modules=("kernels",),
    missing=to_come.no_attribute,
)
