"""Streams of arrays: what stays, what is brought ahead, what goes; and that they run as planned."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.hardware.facts import GiB
from capibara.memory import HBMOptimizer, MemoryLimitError, StreamPlan

SHAPE = (256, 256)
ARRAY = 256 * 256 * 4


def plan_of(order: str, room: float = 3, compute_seconds: float = 0.0, **settings: object) -> StreamPlan:
    optimizer = HBMOptimizer(**settings)  # type: ignore[arg-type]
    shapes = dict.fromkeys(order, SHAPE)
    return optimizer.plan(shapes, list(order), capacity_gb=room * ARRAY / GiB, compute_seconds=compute_seconds)


@pytest.mark.quick
def test_what_fits_stays() -> None:
    plan = plan_of("abcabc")
    assert plan.evictions == ()
    assert {one.where for one in plan.layout.values()} == {"resident"}
    assert plan.bytes_moved == 3 * ARRAY == plan.most_bytes


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(("policy", "gone"), [("lru", "b"), ("lfu", "c"), ("fifo", "a")])
def test_policies_differ_in_what_goes(policy: str, gone: str) -> None:
    """a came first; b was used longest ago; c the least often."""
    plan = plan_of("abbacad", access_pattern="random", cache_policy=policy)
    assert plan.evictions == ((6, gone),)
    assert plan.layout[gone].where == "streamed"


@pytest.mark.quick
def test_patterns_differ_in_how_far_ahead_arrays_are_asked_for() -> None:
    transfer = ARRAY / 1e9
    distances = {
        pattern: plan_of(
            "abcdefgh" * 2, 6, transfer / 2.5, access_pattern=pattern, bandwidth_limit_gbps=1.0
        ).prefetch_distance
        for pattern in ("sequential", "random", "mixed")
    }
    assert distances["random"] == 0
    assert distances["sequential"] >= 1
    ahead = plan_of("abcdefgh" * 2, 6, transfer, access_pattern="sequential", bandwidth_limit_gbps=1.0)
    waits = plan_of("abcdefgh" * 2, 6, transfer, access_pattern="random", bandwidth_limit_gbps=1.0)
    # Sixteen accesses and sixteen transfers of the same length: one after the other, or side by side.
    assert waits.seconds == pytest.approx(32 * transfer)
    assert ahead.seconds == pytest.approx(17 * transfer)


@pytest.mark.quick
def test_mixed_keeps_what_is_used_again() -> None:
    """h is read between arrays that are read once: those do not push it out."""
    order = "hahbhchdhehf"
    mixed = plan_of(order, 2, access_pattern="mixed")
    assert mixed.layout["h"] == mixed.layout["h"].__class__("resident", ARRAY, 1)
    once = plan_of("habcdhabcd", 3, access_pattern="sequential", cache_policy="fifo")
    assert once.layout["h"].loads == 2


@pytest.mark.quick
def test_the_bandwidth_limit_sets_the_time() -> None:
    slow, fast = (plan_of("abcd", 2, bandwidth_limit_gbps=rate).seconds for rate in (1, 4))
    assert slow == pytest.approx(4 * ARRAY / 1e9)
    assert fast == pytest.approx(slow / 4)


def test_uneven_transfers_are_asked_for_farther_ahead() -> None:
    """A large array among small ones has to be on its way for several accesses."""
    shapes = {**{f"small {n}": (64, 64) for n in range(16)}, "large": (1024, 1024)}
    order = [f"small {n}" for n in range(12)] + ["large"] + [f"small {n}" for n in range(12, 16)]
    optimizer = HBMOptimizer("sequential", "lru", 1.0)
    plan = optimizer.plan(shapes, order, compute_seconds=1e-3)
    assert plan.prefetch_distance >= 4
    assert plan.seconds < optimizer.plan(shapes, order, capacity_gb=1024 * 1024 * 4 / GiB, compute_seconds=1e-3).seconds


@pytest.mark.quick
@pytest.mark.parametrize("pattern", ["sequential", "random", "mixed"])
def test_a_stream_gives_the_arrays_in_order_as_planned(pattern: str) -> None:
    arrays = {name: np.full(SHAPE, number, np.float32) for number, name in enumerate("abcdef")}
    order = list("abacadefab")
    optimizer = HBMOptimizer(access_pattern=pattern, cache_policy="lru", bandwidth_limit_gbps=900)
    room = 3 * ARRAY / GiB
    seen = [float(array[0, 0]) for array in optimizer.stream(arrays, order, capacity_gb=room)]
    assert seen == ["abcdef".index(name) for name in order]
    plan = optimizer.plan(arrays, order, capacity_gb=room)
    assert optimizer.last_stream["loads"] == len(plan.loads)
    assert optimizer.last_stream["bytes"] == plan.bytes_moved


@pytest.mark.quick
def test_a_stream_brings_the_next_while_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order of events: the second is there before anybody asks for it."""
    put, arrived = jax.device_put, [threading.Event() for _ in range(3)]

    def noticed(array: np.ndarray, *args: object, **kwargs: object) -> jax.Array:
        found = put(array, *args, **kwargs)
        arrived[int(array[0])].set()
        return found

    monkeypatch.setattr(jax, "device_put", noticed)
    arrays = [np.full(4, number, np.float32) for number in range(3)]
    stream = HBMOptimizer("sequential").stream(arrays)
    next(stream)
    assert arrived[1].wait(30)
    stream.close()
    for event in arrived:
        event.clear()
    waiting = HBMOptimizer("random").stream(arrays)
    next(waiting)
    assert not arrived[1].wait(0.05)  # at random nobody knows what is next
    next(waiting)
    assert arrived[1].is_set()
    waiting.close()


def test_a_stream_keeps_to_the_bandwidth_limit() -> None:
    arrays = [np.zeros(SHAPE, np.float32)] * 4
    optimizer = HBMOptimizer(bandwidth_limit_gbps=0.01)
    started = time.perf_counter()
    for _ in optimizer.stream(arrays):
        pass
    assert time.perf_counter() - started >= 4 * ARRAY / 0.01e9  # a quarter of it would be 0.03 s
    assert optimizer.last_stream["waited_seconds"] > 0


def test_a_stream_that_nobody_wants_more_of_ends_at_once() -> None:
    """The third array would take 26 hours at this limit."""
    stream = HBMOptimizer(bandwidth_limit_gbps=1e-8).stream([np.zeros(0, np.float32)] * 2 + [np.zeros(250_000)])
    next(stream)
    next(stream)  # the third is asked for
    stream.close()


def test_a_divided_stream_counts_by_device() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    place = NamedSharding(mesh, PartitionSpec("data"))
    arrays = [np.full(SHAPE, number, np.float32) for number in range(4)]
    optimizer = HBMOptimizer("random")
    assert optimizer.plan(arrays, capacity_gb=ARRAY / GiB, sharding=place).evictions == ()
    assert len(optimizer.plan(arrays, capacity_gb=ARRAY / GiB).evictions) == 3
    for number, array in enumerate(optimizer.stream(arrays, capacity_gb=ARRAY / GiB, sharding=place)):
        assert array.sharding == place
        assert float(array[0, 0]) == number


def test_arrays_that_are_on_a_device_are_given_as_they_are() -> None:
    there = jax.numpy.ones(4)
    stream = HBMOptimizer().stream({"there": there, "moved": np.zeros(4)}, ["there", "moved", "there"])
    first, _, last = stream
    assert first is there
    assert last is there


@pytest.mark.quick
def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="Unknown access pattern 'sequentially'"):
        HBMOptimizer(access_pattern="sequentially")
    with pytest.raises(ValueError, match="Unknown cache policy"):
        HBMOptimizer(cache_policy="mru")
    with pytest.raises(ValueError, match="GB a second"):
        HBMOptimizer(bandwidth_limit_gbps=0)
    with pytest.raises(ValueError, match="names of shapes"):
        HBMOptimizer().plan({"a": SHAPE}, ["b"])
    with pytest.raises(MemoryLimitError, match=f"'a' of {ARRAY} bytes"):
        HBMOptimizer().plan({"a": SHAPE}, ["a"], capacity_gb=ARRAY / 2 / GiB)
    assert HBMOptimizer().plan({}, []).seconds == 0
