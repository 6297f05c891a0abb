"""The documented optimisations, as far as this version has them."""

from __future__ import annotations

from typing import Any

from capibara.jax._information import get_optimization_status
from capibara.parallel.context import tpu_v4_optimization_context

__all__ = ["get_optimization_status", "tpu_v4_optimization_context"]

_PLANNED = frozenset(
    {
        "HBMOptimizer",
        "TpuCompilationConfig",
        "TpuMemoryManager",
        "TpuMemoryMonitor",
        "TpuPerformanceProfiler",
        "TpuProfiler",
        "TpuWarmupManager",
        "create_jitted_forward",
        "create_mesh_sharding",
        "create_optimized_cache",
        "create_tpu_optimized_jit",
        "optimize_sharding_strategy",
    }
)


def __getattr__(name: str) -> Any:
    if name in _PLANNED:
        raise AttributeError(f"{__name__}.{name} is not implemented yet in this version")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
