"""What a layout costs: passes, roofline, links, memory lifetime, and the calibration of a chip by its own runs.

`estimate` is in the module of its name: `from capibara.parallel.cost.estimate import estimate`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.parallel.cost.calibration import Calibration, Fit, Run, fit
    from capibara.parallel.cost.estimate import Estimate, LinkUse, Memory, Part
    from capibara.parallel.cost.ops import op_seconds

_HOME = {
    "Calibration": "calibration",
    "Estimate": "estimate",
    "Fit": "calibration",
    "LinkUse": "estimate",
    "Memory": "estimate",
    "Part": "estimate",
    "Run": "calibration",
    "fit": "calibration",
    "op_seconds": "ops",
}

__all__ = ["Calibration", "Estimate", "Fit", "LinkUse", "Memory", "Part", "Run", "fit", "op_seconds"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"capibara.parallel.cost.{_HOME[name]}"), name)
    raise AttributeError(f"module 'capibara.parallel.cost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
