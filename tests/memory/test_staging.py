"""numpy arrays through a few buffers of the host: the same bits in the same order, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.hardware.facts import GiB
from capibara.memory import HBMOptimizer, staging
from capibara.memory.offload import host_kind
from capibara.memory.staging import BUFFERS, Staging, staging_kind

CPU = jax.devices("cpu")[0]
HERE = jax.sharding.SingleDeviceSharding(CPU)
KIND = host_kind(CPU)
NAME = "capibara-memory-staging"

pytestmark = pytest.mark.skipif(KIND is None, reason="this jax's CPU has no second memory to stage in")


def arrays(count: int, size: int = 256) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((size,), np.float32) for _ in range(count)]


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.mark.quick
@pytest.mark.parametrize("pattern", ["sequential", "mixed"])
def test_the_same_bits_in_the_same_order(pattern: str) -> None:
    given = arrays(9)
    given[4] = np.frombuffer(np.random.default_rng(1).bytes(1024), np.float32)  # not-a-numbers among them
    order = [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 4, 8]
    optimizer = HBMOptimizer(pattern)
    room = 3 * given[0].nbytes / GiB
    seen = [np.asarray(array).tobytes() for array in optimizer.stream(given, order, capacity_gb=room, stage=True)]
    assert seen == [given[number].tobytes() for number in order]
    told = optimizer.last_stream
    assert told["staged"] == told["loads"] == len(optimizer.plan(given, order, capacity_gb=room).loads)
    assert 1 <= told["most_staged"] <= BUFFERS
    assert told["staging_seconds"] > 0
    assert told["transfer_seconds"] > 0
    assert not running()


def test_what_lies_with_the_host_already_is_not_staged() -> None:
    assert KIND is not None
    pinned = jax.device_put(np.arange(4.0, dtype=np.float32), HERE.with_memory_kind(KIND))
    optimizer = HBMOptimizer("sequential")
    mixed = {"pinned": pinned, "numpy": np.ones(4, np.float32), "there": jnp.zeros(4)}
    seen = [float(array.sum()) for array in optimizer.stream(mixed, stage=True)]
    assert seen == [6.0, 4.0, 0.0]
    assert (optimizer.last_stream["staged"], optimizer.last_stream["loads"]) == (1, 2)


def test_a_cpu_stages_only_when_it_is_told_to() -> None:
    assert staging_kind(HERE) is None
    optimizer = HBMOptimizer("sequential")
    list(optimizer.stream(arrays(2)))
    assert "staged" not in optimizer.last_stream
    with pytest.raises(ValueError, match="in an order that is known"):
        HBMOptimizer("random").stream(arrays(2), stage=True)


def test_where_there_is_pinned_memory_arrays_are_staged_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capibara.memory.hbm.staging_kind", lambda where: KIND)
    for pattern, stage, staged in (("sequential", None, 4), ("sequential", False, None), ("random", None, None)):
        optimizer = HBMOptimizer(pattern)
        list(optimizer.stream(arrays(4), stage=stage))
        assert optimizer.last_stream.get("staged") == staged


def staged_by(stage: Any, given: list[Any]) -> Staging:
    assert KIND is not None
    return Staging(given, HERE, KIND, stage)


def noted_in(made: list[weakref.ref[Any]]) -> Any:
    """Staging as it is, with every buffer noted."""

    def stage(array: Any, where: Any) -> jax.Array:
        found = staging.put(array, where).block_until_ready()
        made.append(weakref.ref(found))
        return found

    return stage


@pytest.mark.quick
def test_a_few_are_staged_ahead_and_no_more() -> None:
    begun: list[int] = []

    def stage(number: int, where: Any) -> Any:
        begun.append(number)
        return jnp.zeros(())

    staged = staged_by(stage, list(range(10)))
    try:
        for taken in range(7):
            deadline = time.monotonic() + 60
            while len(begun) < taken + BUFFERS and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)
            assert sorted(begun) == list(range(taken + BUFFERS))
            staged.send(lambda array: array)
    finally:
        staged.stop()


def test_the_next_is_staged_while_one_is_sent() -> None:
    second = threading.Event()

    def stage(number: int, where: Any) -> Any:
        if number == 1:
            second.set()
        return jnp.zeros(())

    staged = staged_by(stage, [0, 1])

    def transfer(array: jax.Array) -> jax.Array:
        assert second.wait(60)  # it would hang if one waited for the other
        return array

    staged.send(transfer)
    staged.stop()


@pytest.mark.quick
def test_an_error_comes_up_at_the_array_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    put = staging.put

    def failing(array: Any, where: Any) -> Any:
        if float(array[0]) == 2.0:
            raise MemoryError("no pinned memory left")
        return put(array, where)

    monkeypatch.setattr(staging, "put", failing)
    stream = HBMOptimizer("sequential").stream([np.full(4, number, np.float32) for number in range(5)], stage=True)
    assert float(next(stream)[0]) == 0.0
    assert float(next(stream)[0]) == 1.0
    with pytest.raises(MemoryError, match="no pinned memory left"):
        next(stream)
    assert not running()


def test_a_stream_that_is_closed_early_leaves_no_thread_and_no_buffer() -> None:
    made: list[weakref.ref[Any]] = []
    given = arrays(50)
    staged = staged_by(noted_in(made), given)
    staged.send(lambda array: jax.device_put(array, HERE, may_alias=False).block_until_ready())
    staged.stop()
    assert len(made) <= BUFFERS + 1
    gc.collect()
    assert not [one for one in made if one() is not None]
    assert not running()
    stream = HBMOptimizer("sequential").stream(given, stage=True)
    next(stream)
    stream.close()
    assert not running()


def test_buffers_that_were_sent_are_let_go_during_the_stream() -> None:
    made: list[weakref.ref[Any]] = []
    staged = staged_by(noted_in(made), arrays(12))
    for _ in range(12):
        staged.send(lambda array: jax.device_put(array, HERE, may_alias=False).block_until_ready())
        assert sum(one() is not None for one in list(made)) <= BUFFERS
    staged.stop()
