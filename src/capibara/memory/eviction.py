"""Which of the entries that are there goes first: the one used longest ago, the least often, or the oldest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from capibara.memory.limits import checked_choice

__all__ = ["POLICIES", "EvictionOrder"]

K = TypeVar("K", bound=Hashable)

POLICIES = ("lru", "lfu", "fifo")
"""Least recently used; least frequently used, of those the least recently; first in, first out."""


class EvictionOrder(Generic[K]):
    """The entries that are there, and the order in which they would go.

    A use of an entry is counted from when it came to be there.

    >>> for policy in POLICIES:
    ...     order = EvictionOrder(policy)
    ...     for key in "abc":
    ...         order.add(key)
    ...     for key in "aabc" "a":
    ...         order.use(key)
    ...     order.use("b")
    ...     print(policy, "".join(order))
    lru cab
    lfu cba
    fifo abc
    """

    def __init__(self, policy: str) -> None:
        self.policy = checked_choice("cache policy", policy, POLICIES)
        self._clock = 0
        self._came: dict[K, int] = {}
        self._last: dict[K, int] = {}
        self._uses: dict[K, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._came

    def __len__(self) -> int:
        return len(self._came)

    def add(self, key: K) -> None:
        """It came to be there; one that already was, keeps its age."""
        self._clock += 1
        self._came.setdefault(key, self._clock)
        self._last[key] = self._clock
        self._uses.setdefault(key, 0)

    def use(self, key: K) -> None:
        self._clock += 1
        self._last[key] = self._clock
        self._uses[key] += 1

    def remove(self, key: K) -> None:
        for kept in (self._came, self._last, self._uses):
            kept.pop(key, None)

    def __iter__(self) -> Iterator[K]:
        """The entries, what goes first first."""
        rank: dict[str, Callable[[K], tuple[int, ...]]] = {
            "lru": lambda key: (self._last[key],),
            "lfu": lambda key: (self._uses[key], self._last[key]),
            "fifo": lambda key: (self._came[key],),
        }
        return iter(sorted(self._came, key=rank[self.policy]))
