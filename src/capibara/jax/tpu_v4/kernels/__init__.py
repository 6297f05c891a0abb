"""The kernel families by their documented path: `kernels.linalg` here is `capibara.kernels.linalg`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from capibara.jax._alias import _Same
from capibara.kernels.families import FAMILIES

if TYPE_CHECKING:
    from capibara.kernels import attention as attention
    from capibara.kernels import layers as layers
    from capibara.kernels import linalg as linalg
    from capibara.kernels import vq as vq

_EIGHT = ("attention", "collective", "conv", "fft", "layers", "linalg", "scan", "vq")

__all__ = [family for family in _EIGHT if family in FAMILIES]


def _absent(family: str) -> str:
    return f"the kernel family {family!r} is not in this version; it has {', '.join(__all__)}"


class _Families(MetaPathFinder):
    """Finds a family, and any module inside one, as the room's own module under a second name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        below = fullname[len(__name__) + 1 :]
        family = below.partition(".")[0]
        if family in _EIGHT and family not in __all__:
            raise ModuleNotFoundError(_absent(family), name=fullname)
        return ModuleSpec(fullname, _Same(f"capibara.kernels.{below}")) if family in __all__ else None


sys.meta_path.insert(0, _Families())


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _EIGHT:
        raise AttributeError(_absent(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
