"""Lowering and compiling for TPUs that are not attached; compiled programs on disk, made before they are needed.

`lower_for` works on every machine; `compile_for` and `compile_many` use the real TPU compiler where libtpu
is installed and say so where it is not. Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.compile.aot import compile_for as compile_for
    from capibara.compile.aot import topology_mesh as topology_mesh
    from capibara.compile.availability import TpuCompiler as TpuCompiler
    from capibara.compile.availability import tpu_compiler as tpu_compiler
    from capibara.compile.cache import ExecutableCache as ExecutableCache
    from capibara.compile.dump import describe_dump as describe_dump
    from capibara.compile.lower import LoweringResult as LoweringResult
    from capibara.compile.lower import lower_for as lower_for
    from capibara.compile.pool import CompileJob as CompileJob
    from capibara.compile.pool import compile_many as compile_many
    from capibara.compile.report import CompileReport as CompileReport
    from capibara.compile.report import KernelSchedule as KernelSchedule
    from capibara.compile.schedule import schedule_lengths as schedule_lengths
    from capibara.compile.warmup import WarmupReport as WarmupReport
    from capibara.compile.warmup import warm_up as warm_up

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "aot": "compile_for topology_mesh",
        "availability": "TpuCompiler tpu_compiler",
        "cache": "ExecutableCache",
        "dump": "describe_dump",
        "lower": "LoweringResult lower_for",
        "pool": "CompileJob compile_many",
        "report": "CompileReport KernelSchedule",
        "schedule": "schedule_lengths",
        "warmup": "WarmupReport warm_up",
    },
)
