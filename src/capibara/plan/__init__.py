"""Does it fit, how fast, what does it cost: before anything is rented.

The package itself can be called: `capibara.plan(fn, args, on="v4-32")` is `capibara.plan.plan(...)`. Importing it does
not import jax.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.plan.api import plan
    from capibara.plan.compiled import LEVELS, Compiled, compile_layout, partition_layout
    from capibara.plan.measured import calibrate, measurements
    from capibara.plan.preset import Preset, load_preset, preset_names
    from capibara.plan.program import Program
    from capibara.plan.result import Candidate, Plan
    from capibara.plan.target import Recipe, TargetError, load_job

_HOME = {
    "LEVELS": "compiled",
    "Candidate": "result",
    "Compiled": "compiled",
    "Plan": "result",
    "Preset": "preset",
    "Program": "program",
    "Recipe": "target",
    "TargetError": "target",
    "calibrate": "measured",
    "compile_layout": "compiled",
    "load_job": "target",
    "load_preset": "preset",
    "measurements": "measured",
    "partition_layout": "compiled",
    "plan": "api",
    "preset_names": "preset",
}

__all__ = [
    "LEVELS",
    "Candidate",
    "Compiled",
    "Plan",
    "Preset",
    "Program",
    "Recipe",
    "TargetError",
    "calibrate",
    "compile_layout",
    "load_job",
    "load_preset",
    "measurements",
    "partition_layout",
    "plan",
    "preset_names",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"capibara.plan.{_HOME[name]}"), name)
    raise AttributeError(f"module 'capibara.plan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


class _Callable(ModuleType):
    """A submodule's name and a function's are one attribute of the package above; this lets it be both."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        from capibara.plan.api import plan

        return plan(*args, **keywords)


sys.modules[__name__].__class__ = _Callable
