"""Whether memory is managed now: which contexts, caches and managers of this process are at work."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.memory.cache import ArrayCache
    from capibara.memory.manager import TpuMemoryManager

__all__ = ["add_cache", "add_manager", "caches", "inside", "memory_optimized"]

_LOCK = threading.Lock()
_CACHES: weakref.WeakSet[ArrayCache] = weakref.WeakSet()
_MANAGERS: weakref.WeakSet[TpuMemoryManager] = weakref.WeakSet()
_contexts = 0


def add_cache(cache: ArrayCache) -> None:
    with _LOCK:
        _CACHES.add(cache)


def add_manager(manager: TpuMemoryManager) -> None:
    with _LOCK:
        _MANAGERS.add(manager)


def caches() -> list[ArrayCache]:
    """The caches that are open."""
    with _LOCK:
        return [cache for cache in _CACHES if not cache.closed]


@contextmanager
def inside() -> Iterator[None]:
    """A managed context, for as long as it lasts. The memory is the process's, and so is what is said of it."""
    global _contexts
    with _LOCK:
        _contexts += 1
    try:
        yield
    finally:
        with _LOCK:
            _contexts -= 1


def memory_optimized() -> bool:
    """Whether a managed context is entered, a cache is open, or a tensor is offloaded or compressed, now.

    >>> from capibara.memory import TpuMemoryManager
    >>> manager = TpuMemoryManager(memory_limit_gb=1.0)
    >>> with manager.managed_context():
    ...     memory_optimized()
    True
    """
    with _LOCK:
        managers = list(_MANAGERS)
        entered = _contexts > 0
    return entered or bool(caches()) or any(manager.holds_away() for manager in managers)
