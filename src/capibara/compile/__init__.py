"""Lowering and compiling for TPUs that are not attached.

`lower_for` works on every machine; `compile_for` and `compile_many` use the real TPU compiler where libtpu
is installed and say so where it is not. Importing this package does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "CompileJob",
    "CompileReport",
    "KernelSchedule",
    "LoweringResult",
    "TpuCompiler",
    "compile_for",
    "compile_many",
    "describe_dump",
    "lower_for",
    "schedule_lengths",
    "topology_mesh",
    "tpu_compiler",
]

_HOME = {
    "CompileJob": "pool",
    "CompileReport": "report",
    "KernelSchedule": "report",
    "LoweringResult": "lower",
    "TpuCompiler": "availability",
    "compile_for": "aot",
    "compile_many": "pool",
    "describe_dump": "dump",
    "lower_for": "lower",
    "schedule_lengths": "schedule",
    "topology_mesh": "aot",
    "tpu_compiler": "availability",
}

if TYPE_CHECKING:
    from capibara.compile.aot import compile_for, topology_mesh
    from capibara.compile.availability import TpuCompiler, tpu_compiler
    from capibara.compile.dump import describe_dump
    from capibara.compile.lower import LoweringResult, lower_for
    from capibara.compile.pool import CompileJob, compile_many
    from capibara.compile.report import CompileReport, KernelSchedule
    from capibara.compile.schedule import schedule_lengths


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
