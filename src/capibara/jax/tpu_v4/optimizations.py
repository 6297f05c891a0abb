"""The documented optimisations, as far as this version has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara import to_come
from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.dropin.information import get_optimization_status as get_optimization_status
    from capibara.mesh.context import tpu_v4_optimization_context as tpu_v4_optimization_context
    from capibara.observe.profiler.tpu import TpuPerformanceProfiler as TpuPerformanceProfiler
    from capibara.observe.profiler.tpu import TpuProfiler as TpuProfiler
    from capibara.plan.sharding.mesh_sharding import create_mesh_sharding as create_mesh_sharding
    from capibara.plan.sharding.strategy import optimize_sharding_strategy as optimize_sharding_strategy

to_come.announce(__name__)

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "capibara.dropin.information": "get_optimization_status",
        "capibara.mesh.context": "tpu_v4_optimization_context",
        "capibara.observe.profiler.tpu": "TpuPerformanceProfiler TpuProfiler",
        "capibara.plan.sharding.mesh_sharding": "create_mesh_sharding",
        "capibara.plan.sharding.strategy": "optimize_sharding_strategy",
    },
    missing=to_come.no_attribute,
)
