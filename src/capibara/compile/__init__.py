"""Compiling: by level and config, ahead of time, for TPUs that are not attached; programs kept on disk; and what was
compiled again, and why.

`lower_for` works on every machine; `compile_for` and `compile_many` use the real TPU compiler where libtpu
is installed and say so where it is not. Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.compile.aot import compile_for as compile_for
    from capibara.compile.aot import topology_mesh as topology_mesh
    from capibara.compile.availability import ChipCompiler as ChipCompiler
    from capibara.compile.availability import chip_compiler as chip_compiler
    from capibara.compile.availability import gpu_compiler as gpu_compiler
    from capibara.compile.availability import tpu_compiler as tpu_compiler
    from capibara.compile.buckets import bucketed as bucketed
    from capibara.compile.buckets import power_of_two_buckets as power_of_two_buckets
    from capibara.compile.cache import ExecutableCache as ExecutableCache
    from capibara.compile.dump import describe_dump as describe_dump
    from capibara.compile.events import count_compilations as count_compilations
    from capibara.compile.executables import load_executable as load_executable
    from capibara.compile.executables import load_or_compile as load_or_compile
    from capibara.compile.executables import save_executable as save_executable
    from capibara.compile.jit import TpuCompilationConfig as TpuCompilationConfig
    from capibara.compile.jit import create_jitted_forward as create_jitted_forward
    from capibara.compile.jit import create_tpu_optimized_jit as create_tpu_optimized_jit
    from capibara.compile.lower import LoweringResult as LoweringResult
    from capibara.compile.lower import lower_for as lower_for
    from capibara.compile.model_warmup import TpuWarmupManager as TpuWarmupManager
    from capibara.compile.options import compiler_options as compiler_options
    from capibara.compile.persistent import persistent_cache as persistent_cache
    from capibara.compile.pool import CompileJob as CompileJob
    from capibara.compile.pool import compile_many as compile_many
    from capibara.compile.recompiles import RecompileDetector as RecompileDetector
    from capibara.compile.recompiles import watch_recompiles as watch_recompiles
    from capibara.compile.report import CompileReport as CompileReport
    from capibara.compile.report import KernelSchedule as KernelSchedule
    from capibara.compile.schedule import schedule_lengths as schedule_lengths
    from capibara.compile.warmup import WarmupReport as WarmupReport
    from capibara.compile.warmup import warm_up as warm_up

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "aot": "compile_for topology_mesh",
        "availability": "ChipCompiler chip_compiler gpu_compiler tpu_compiler",
        "buckets": "bucketed power_of_two_buckets",
        "cache": "ExecutableCache",
        "dump": "describe_dump",
        "events": "count_compilations",
        "executables": "load_executable load_or_compile save_executable",
        "jit": "TpuCompilationConfig create_jitted_forward create_tpu_optimized_jit",
        "lower": "LoweringResult lower_for",
        "model_warmup": "TpuWarmupManager",
        "options": "compiler_options",
        "persistent": "persistent_cache",
        "pool": "CompileJob compile_many",
        "recompiles": "RecompileDetector watch_recompiles",
        "report": "CompileReport KernelSchedule",
        "schedule": "schedule_lengths",
        "warmup": "WarmupReport warm_up",
    },
)
