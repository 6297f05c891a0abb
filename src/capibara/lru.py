"""A bounded memory of what was used last, for what a long-lived process keeps by shape or by what callers pass.

A function of few arguments takes `functools.lru_cache(maxsize=...)`; this is for what is looked up by a key.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")

_ABSENT = object()


class LRU(Generic[K, V]):
    """At most `maxsize` entries, of which the `maxsize // 2` used last are always there. Threads may share it.

    A hit is one dictionary read: no lock, and the key is hashed once (hashing a tuple of shapes takes longer than
    looking it up). So entries age in two generations instead of being reordered one by one: a full young generation
    becomes the old one, what was old goes, and an old entry that is read is young again.

    >>> recent = LRU(4)
    >>> for number in range(9):
    ...     recent[number] = number * number
    >>> recent.get(8), recent.get(0), len(recent) <= 4
    (64, None, True)
    """

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._young.keys() | self._old.keys())

    def get(self, key: K, default: D | None = None) -> V | D | None:
        value = self._young.get(key, _ABSENT)
        return self._again(key, default) if value is _ABSENT else value  # type: ignore[return-value]

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            if len(self._young) >= max(self.maxsize // 2, 1) and key not in self._young:
                self._old, self._young = self._young, {}
            self._young[key] = value

    def add(self, key: K, value: V) -> bool:
        """Put it there unless something is; whether it was put. Of several threads one is told so."""
        with self._lock:
            if self.get(key, _ABSENT) is not _ABSENT:
                return False
            self[key] = value
            return True

    def pop(self, key: K) -> None:
        with self._lock:
            self._young.pop(key, None)
            self._old.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._young, self._old = {}, {}

    def _again(self, key: K, default: D | None) -> V | D | None:
        with self._lock:
            value = self._young.get(key, self._old.get(key, _ABSENT))
            if value is _ABSENT:
                return default
            self[key] = value  # type: ignore[assignment]
            return value  # type: ignore[return-value]
