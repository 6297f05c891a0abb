"""The kernel families by their documented path: `kernels.linalg` here is `capibara.kernels.ops.linalg`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from capibara.dropin.alias import Same
from capibara.kernels.core.families import FAMILIES

if TYPE_CHECKING:
    from capibara.kernels.ops import attention as attention
    from capibara.kernels.ops import collective as collective
    from capibara.kernels.ops import conv as conv
    from capibara.kernels.ops import fft as fft
    from capibara.kernels.ops import layers as layers
    from capibara.kernels.ops import linalg as linalg
    from capibara.kernels.ops import scan as scan
    from capibara.kernels.ops import vq as vq

__all__ = sorted(FAMILIES)


class _Families(MetaPathFinder):
    """Finds a family, and any module inside one, as the room's own module under a second name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        below = fullname[len(__name__) + 1 :]
        family = below.partition(".")[0]
        return ModuleSpec(fullname, Same(f"capibara.kernels.ops.{below}")) if family in __all__ else None


sys.meta_path.insert(0, _Families())


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
