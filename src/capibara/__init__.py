"""capibara: a JAX toolkit for TPU pods that is written and tested on a GPU or a laptop.

Importing this package imports nothing heavy: rooms load when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara._version import __version__

if TYPE_CHECKING:
    from capibara import compile as compile
    from capibara import errors as errors
    from capibara import fleet as fleet
    from capibara import hardware as hardware
    from capibara import kernels as kernels
    from capibara import parallel as parallel
    from capibara import plan as plan
    from capibara import precision as precision

_ROOMS = (
    "compile",
    "config",
    "core",
    "errors",
    "fleet",
    "hardware",
    "jax",
    "kernels",
    "parallel",
    "plan",
    "precision",
    "vq",
)

__all__ = ["__version__", *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"capibara.{name}")
    raise AttributeError(f"module 'capibara' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS])
