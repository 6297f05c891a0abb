"""The documented optimisations, as far as this version has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara import to_come
from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.compile.jit import TpuCompilationConfig as TpuCompilationConfig
    from capibara.compile.jit import create_jitted_forward as create_jitted_forward
    from capibara.compile.jit import create_tpu_optimized_jit as create_tpu_optimized_jit
    from capibara.compile.model_warmup import TpuWarmupManager as TpuWarmupManager
    from capibara.dropin.information import get_optimization_status as get_optimization_status
    from capibara.memory.cache import create_optimized_cache as create_optimized_cache
    from capibara.memory.hbm import HBMOptimizer as HBMOptimizer
    from capibara.memory.manager import TpuMemoryManager as TpuMemoryManager
    from capibara.memory.monitor import TpuMemoryMonitor as TpuMemoryMonitor
    from capibara.mesh.context import tpu_v4_optimization_context as tpu_v4_optimization_context
    from capibara.observe.profiler.tpu import TpuPerformanceProfiler as TpuPerformanceProfiler
    from capibara.observe.profiler.tpu import TpuProfiler as TpuProfiler
    from capibara.plan.sharding.mesh_sharding import create_mesh_sharding as create_mesh_sharding
    from capibara.plan.sharding.strategy import optimize_sharding_strategy as optimize_sharding_strategy

to_come.announce(__name__)

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "capibara.compile.jit": "TpuCompilationConfig create_jitted_forward create_tpu_optimized_jit",
        "capibara.compile.model_warmup": "TpuWarmupManager",
        "capibara.dropin.information": "get_optimization_status",
        "capibara.memory.cache": "create_optimized_cache",
        "capibara.memory.hbm": "HBMOptimizer",
        "capibara.memory.manager": "TpuMemoryManager",
        "capibara.memory.monitor": "TpuMemoryMonitor",
        "capibara.mesh.context": "tpu_v4_optimization_context",
        "capibara.observe.profiler.tpu": "TpuPerformanceProfiler TpuProfiler",
        "capibara.plan.sharding.mesh_sharding": "create_mesh_sharding",
        "capibara.plan.sharding.strategy": "optimize_sharding_strategy",
    },
    missing=to_come.no_attribute,
)
