"""The devices' memory while a program runs: what lies there, what goes to the host and comes back, why it ran out.

`with capibara.memory.autopsy.autopsy():` says why it ran out. Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.memory.active import memory_optimized as memory_optimized
    from capibara.memory.autopsy import Autopsy as Autopsy
    from capibara.memory.autopsy import autopsy_of as autopsy_of
    from capibara.memory.cache import ArrayCache as ArrayCache
    from capibara.memory.cache import create_optimized_cache as create_optimized_cache
    from capibara.memory.hbm import HBMOptimizer as HBMOptimizer
    from capibara.memory.hbm import StreamPlan as StreamPlan
    from capibara.memory.limits import MemoryLimitError as MemoryLimitError
    from capibara.memory.manager import TpuMemoryManager as TpuMemoryManager
    from capibara.memory.monitor import TpuMemoryMonitor as TpuMemoryMonitor

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "active": "memory_optimized",
        "autopsy": "Autopsy autopsy_of",
        "cache": "ArrayCache create_optimized_cache",
        "hbm": "HBMOptimizer StreamPlan",
        "limits": "MemoryLimitError",
        "manager": "TpuMemoryManager",
        "monitor": "TpuMemoryMonitor",
    },
)
