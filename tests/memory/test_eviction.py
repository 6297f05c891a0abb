"""The order in which entries would go."""

from __future__ import annotations

import pytest

from capibara.memory.eviction import POLICIES, EvictionOrder


def order_of(policy: str, events: str) -> str:
    """Small letters come or are used; capitals go."""
    order: EvictionOrder[str] = EvictionOrder(policy)
    for key in events:
        if key.isupper():
            order.remove(key.lower())
        elif key in order:
            order.use(key)
        else:
            order.add(key)
    assert len(order) == len(set(order))
    return "".join(order)


@pytest.mark.quick
def test_each_policy_has_its_own() -> None:
    assert {policy: order_of(policy, "abcaabccd") for policy in POLICIES} == {
        "lru": "abcd",
        "lfu": "dbac",
        "fifo": "abcd",
    }
    assert {policy: order_of(policy, "abcbba") for policy in POLICIES} == {"lru": "cba", "lfu": "cab", "fifo": "abc"}


def test_what_went_and_came_again_is_new() -> None:
    assert order_of("lfu", "aaaabAab") == "ab"
    assert order_of("fifo", "abAa") == "ba"
    assert order_of("lru", "abAZ") == "b"
    with pytest.raises(ValueError, match="Choices: 'lru', 'lfu', 'fifo'"):
        EvictionOrder("random")
