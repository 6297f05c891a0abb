"""Which of the entries that are there goes first: the one used longest ago, the least often, or the oldest."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
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
        # A dictionary keeps the order in which keys came, so that each group below has what goes first in front, and a
        # use moves a key to the back of its group, or to that of the keys used as often ("lfu").
        self._groups: dict[int, dict[K, None]] = {}
        self._group_of: dict[K, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._group_of

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, key: K) -> None:
        """It came to be there; for one that was, nothing changes."""
        if key not in self._group_of:
            self._put(key, 0)

    def use(self, key: K) -> None:
        if self.policy == "fifo":
            return
        group = self._group_of[key]
        self.remove(key)
        self._put(key, group + 1 if self.policy == "lfu" else group)

    def _put(self, key: K, group: int) -> None:
        self._groups.setdefault(group, {})[key] = None
        self._group_of[key] = group

    def remove(self, key: K) -> None:
        group = self._group_of.pop(key, None)
        if group is not None:
            del self._groups[group][key]
            if not self._groups[group]:
                del self._groups[group]

    def __iter__(self) -> Iterator[K]:
        """The entries, what goes first first; none may come or go meanwhile."""
        for group in sorted(self._groups):
            yield from self._groups[group]
