"""Sensors that die, lie and block: none of them holds up the others."""

from __future__ import annotations

import threading
import time

import pytest
from tests.observe.stand_ins import Blocked, Chips, Clock, StandIn

from capibara.observe.polling import Poller
from capibara.observe.sensors import Reading


@pytest.mark.quick
def test_one_that_blocks_is_waited_for_once_and_then_is_stale() -> None:
    clock, stuck, well = Clock(), Blocked(), Chips(1)
    poller = Poller([stuck, well], deadline_s=30, first_deadline_s=2.0, stale_after_s=5.0, clock=clock)
    try:
        started = time.monotonic()
        poller.poll()
        assert time.monotonic() - started >= 2.0, "the deadline is given to it"
        states = {state.name: state.state for state in poller.states()}
        assert states == {"blocked": "starting", "tpus": "ok"}
        threads = threading.active_count()
        for _ in range(10):  # ten seconds
            clock.go(1.0)
            assert [reading.source for reading in poller.poll()] == ["tpu:0"]
        assert threading.active_count() <= threads, "it is not asked again while it is busy"
        state = poller.states()[0]
        assert state.state == "stale"
        assert "has not answered for 10.0 s" in state.text
        stuck.let_go.set()
        until = time.monotonic() + 30
        sources: list[str] = []
        while "tpu:9" not in sources:  # it comes back, in its own time
            assert time.monotonic() < until
            time.sleep(0.01)
            sources = [reading.source for reading in poller.poll()]
        assert sources == ["tpu:9", "tpu:0"]
        assert poller.states()[0].state == "ok"
    finally:
        stuck.let_go.set()
        poller.close()
    assert (stuck.closed, well.closed) == (1, 1)


@pytest.mark.quick
def test_one_that_dies_says_why_and_comes_back() -> None:
    broken = True

    def answer() -> list[Reading]:
        if broken:
            raise OSError("the bus is gone")
        return [Reading("gpu:0", "gpu", {"utilization": 0.5})]

    poller = Poller([StandIn(answer, "bus"), Chips(1)], deadline_s=10)
    try:
        assert [reading.source for reading in poller.poll()] == ["tpu:0"]
        assert (poller.states()[0].state, poller.states()[0].text) == ("failed", "OSError: the bus is gone")
        broken = False
        assert [reading.source for reading in poller.poll()] == ["gpu:0", "tpu:0"]
        assert (poller.states()[0].state, poller.states()[0].text) == ("ok", "")
    finally:
        poller.close()


@pytest.mark.quick
def test_lies_are_left_out_and_counted() -> None:
    told = {
        "utilization": float("nan"),
        "temperature": -40.0,
        "power": float("inf"),
        "memory_used": 64e9,
        "memory_total": 32e9,
        "tensorcore_utilization": 1.01,  # counters that are read one after the other
        "step": True,
        "horoscope": 1.0,
    }
    poller = Poller([StandIn(lambda: [Reading("tpu:0", "tpu", told)])], deadline_s=10)
    try:
        [reading] = poller.poll()
        assert reading.values == {"tensorcore_utilization": 1.0}
        state = poller.states()[0]
        assert (state.state, state.refused) == ("ok", 6)
        assert "utilization of tpu:0 cannot be nan" in state.text
        assert "memory_used of tpu:0 cannot be 64000000000 of 32000000000" in state.text
    finally:
        poller.close()


@pytest.mark.parametrize("nonsense", [None, 3, [None], [Reading("a", "tpu", None)]])  # type: ignore[arg-type]
def test_an_answer_that_is_none_is_a_failure(nonsense: object) -> None:
    poller = Poller([StandIn(lambda: nonsense)], deadline_s=10)  # type: ignore[arg-type,return-value]
    try:
        assert poller.poll() == []
        assert poller.states()[0].state == "failed"
    finally:
        poller.close()


def test_each_thing_is_watched_once() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        Poller([Chips(1), Chips(2)])
