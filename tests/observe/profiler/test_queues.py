"""When a device was done, by a clock and a device that do as they are told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.observe.profiler import executions, profile, queues
from capibara.observe.profiler.executions import Executions
from capibara.observe.profiler.queues import Queues, last_ready


@dataclass
class Device:
    """A queue that is empty at a time, a way to it and back that takes a while, and the clock of both."""

    now: float = 100.0
    empty_at: float = 0.0
    way: float = 0.002
    flushes: int = 0

    def clock(self) -> float:
        return self.now

    def flush(self) -> None:
        self.flushes += 1
        self.now = max(self.now, self.empty_at) + self.way


@pytest.mark.quick
def test_of_an_empty_queue_asking_costs_the_program_nothing() -> None:
    device = Device()
    asked = Queues(device.flush, device.clock)
    asked.calibrate()
    assert asked.idle_seconds == pytest.approx(0.002)
    ready = device.now
    device.now += 0.5  # what is done between the last result and the question is not the device's time either
    assert asked.emptied(ready) == ready


@pytest.mark.quick
def test_a_queue_that_is_at_work_is_waited_for_less_the_way() -> None:
    device = Device()
    asked = Queues(device.flush, device.clock)
    asked.calibrate()
    device.empty_at = device.now + 1.0
    assert asked.emptied(device.now) == pytest.approx(device.empty_at)


@pytest.mark.quick
def test_where_devices_came_up_inside_the_way_is_measured_afterwards() -> None:
    device = Device()
    asked = Queues(device.flush, device.clock)
    device.empty_at = device.now + 1.0
    ready = device.now
    assert asked.emptied(ready) == pytest.approx(device.empty_at)
    assert asked.idle_seconds == pytest.approx(0.002)
    device.empty_at = 0.0
    ready = device.now
    assert asked.emptied(ready) == ready


def test_the_way_is_the_shortest_of_a_few() -> None:
    device = Device()
    ways = iter([9.0, 0.004, 0.002, 0.5, 0.003, 0.002])

    def flush() -> None:
        device.way = next(ways)
        device.flush()

    asked = Queues(flush, device.clock)
    asked.calibrate()
    assert asked.idle_seconds == pytest.approx(0.002)


def test_a_cpu_has_no_queue() -> None:
    asked = Queues()
    asked.calibrate()
    assert asked.idle_seconds is None
    assert asked.emptied(3.0) == 3.0


@dataclass
class Result:
    """Of a device that is stood in for."""

    ready: bool = True
    deleted: bool = False

    def is_ready(self) -> bool:
        assert not self.deleted, "jax raises here"
        return self.ready

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> Result:
        self.ready = True
        return self


@pytest.mark.quick
def test_results_that_were_there_end_at_the_question_and_others_when_they_come() -> None:
    device = Device()
    assert last_ready(7.0, [Result(), Result(deleted=True)], device.clock) == 7.0
    late = Result(ready=False)
    assert last_ready(7.0, [Result(), late], device.clock) == device.now
    assert late.ready


@jax.jit
def doubled(x: jax.Array) -> jax.Array:
    return x @ x


def test_neither_looking_up_nor_asking_moves_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    x = doubled(doubled(jnp.eye(64)))
    monkeypatch.setattr(queues, "_device_flush", lambda: lambda: time.sleep(0.5))
    looked_up = Executions._looked_up

    def slowly(self: Executions, *call: Any) -> Any:
        time.sleep(0.2)  # the device is at work meanwhile
        return looked_up(self, *call)

    monkeypatch.setattr(Executions, "_looked_up", slowly)
    with profile() as recording:
        started = time.perf_counter()
        for _ in range(3):
            x = doubled(x)
        x.block_until_ready()
        took = time.perf_counter() - started
    found = recording.profile
    assert found is not None
    assert found.window["idle_flush"] >= 0.5
    assert found.window["finding_out"] >= 0.2
    assert found.seconds == found.window["seconds"]
    # From the first call's hand-over, after which it was looked up, to before the flush.
    assert 0.2 <= found.seconds <= took + 0.4
    assert found.wall_seconds < took + 0.4


def test_only_compiling_that_a_device_waits_for_is_taken_off() -> None:
    listening = Executions()
    name = executions._BACKEND_COMPILE
    listening._last_results[0] = Result(ready=False)
    listening._compiled(name, 0.5)
    assert len(listening.compiling_spans()) == 1
    assert listening.waited_for() == []
    for idle in (Result(), Result(deleted=True)):
        listening._last_results[0] = idle
        listening._compiled(name, 0.5)
    assert len(listening.waited_for()) == 2
    listening._own.looking_up = True  # of the profiler's own questions the program knows nothing
    listening._compiled(name, 0.5)
    assert len(listening.compiling_spans()) == 3
    assert sum(listening.compilations.values()) == 3
