"""The monitor: samples, alerts, threads that end, memory that stays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.observe.stand_ins import Blocked, Chips, Clock, StandIn

from capibara.observe import AlertEvent, Recorder, TpuRealTimeMonitor, read_recording
from capibara.observe.sensors import METRICS, HostSensor, Reading

SOURCE = Path(__file__).resolve().parents[2] / "src"


def _monitor(*sensors: Any, **settings: Any) -> TpuRealTimeMonitor:
    return TpuRealTimeMonitor(100, settings.pop("thresholds", None), sensors=sensors, deadline_s=10, **settings)


@pytest.mark.quick
def test_a_sample_has_every_figure_and_says_how_devices_are_together() -> None:
    def answer() -> list[Reading]:
        return [
            Reading("gpu:0", "gpu", {"utilization": 0.9, "temperature": 60.0, "power": 300.0}, "NVIDIA H200"),
            Reading("gpu:1", "gpu", {"utilization": 0.7, "temperature": 71.0, "power": 350.0}, "NVIDIA H200"),
        ]

    monitor = _monitor(StandIn(answer), HostSensor(), clock=Clock(50.0))
    now = monitor.get_current_metrics()
    monitor.stop()
    assert now.keys() == {"time", *METRICS, "sources", "sensors", "alerts"}
    assert now["time"] == 50.0
    assert (now["utilization"], now["temperature"], now["power"]) == (pytest.approx(0.8), 71.0, 650.0)
    assert now["memory_usage"] is None, "the host's is not the devices'"
    assert monitor.history.series("all", "power")[1].tolist() == [650.0]
    assert monitor.curves(10)["gpu:1"]["temperature"] == [(50.0, 71.0)]
    assert now["loss"] is None
    assert now["sources"]["gpu:1"] == {
        "kind": "gpu", "chip": "NVIDIA H200", "utilization": 0.7, "temperature": 71.0, "power": 350.0,
    }  # fmt: skip
    assert now["sources"]["host"]["memory_usage"] > 0
    assert now["sensors"]["host"]["state"] == "ok"


@pytest.mark.quick
def test_thresholds_are_of_accelerators_and_of_the_host_where_there_are_none() -> None:
    idle = StandIn(lambda: [Reading("host", "host", {"utilization": 0.01})], "host", accelerators=False)
    alone = _monitor(idle, thresholds={"utilization": 0.3})
    alone.sample()
    assert [alert.source for alert in alone.get_alerts()] == ["host"]
    chips = Chips(2)
    beside = _monitor(chips, idle, thresholds={"utilization": 0.3})
    beside.sample()
    assert not beside.has_alerts()
    chips.figures["utilization"] = 0.1
    beside.sample()
    assert [alert.source for alert in beside.get_alerts()] == ["tpu:0", "tpu:1"]
    assert beside.get_current_metrics()["alerts"][0]["text"] == "utilization of tpu:0 is 0.1, below 0.3"

    def gone() -> list[Reading]:
        raise OSError

    chips.answer = gone
    beside.sample()
    assert len(beside.get_alerts()) == 2, "one that says nothing changes nothing"
    for monitor in (alone, beside):
        monitor.stop()


@pytest.mark.quick
def test_in_the_background() -> None:
    told: list[AlertEvent] = []
    chips = Chips(1)
    monitor = TpuRealTimeMonitor(20, {"memory_usage": 0.9}, sensors=[chips], callbacks=[told.append], deadline_s=10)
    before = set(threading.enumerate())
    with monitor as entered:
        assert entered is monitor
        assert monitor.running
        monitor.start_monitoring()  # once more changes nothing
        assert monitor.wait_for_sample(2, 30) > 2
        assert not monitor.has_alerts()
        chips.figures["memory_used"] = 31e9
        monitor.wait_for_sample(monitor.wait_for_sample(-1) + 1, 30)
        assert monitor.has_alerts()
        chips.figures["memory_used"] = 1e9
        monitor.wait_for_sample(monitor.wait_for_sample(-1) + 1, 30)
        assert not monitor.has_alerts()
    assert not monitor.running
    assert [event.what for event in told] == ["raised", "cleared"]
    assert [event.what for event in monitor.alert_events()] == ["raised", "cleared"]
    assert monitor.alerts_raised == 1
    assert set(threading.enumerate()) <= before, "it leaves no thread; one of before may end meanwhile"
    assert chips.closed == 1
    assert monitor.get_current_metrics()["memory_usage"] == 1 / 32, "what was last seen can still be read"
    with monitor:
        count = monitor.wait_for_sample(-1)
        assert monitor.wait_for_sample(count, 30) > count, "it begins again"


@pytest.mark.quick
def test_a_blocked_sensor_stops_nothing_that_a_program_calls() -> None:
    stuck, clock = Blocked(), Clock()
    settings = {"deadline_s": 1.0, "stale_after_s": 5.0, "clock": clock}
    with TpuRealTimeMonitor(20, {"utilization": 0.3}, sensors=[stuck, Chips(1)], **settings) as monitor:
        stuck.entered.wait(30)
        monitor.wait_for_sample(0, 30)
        clock.go(10)  # seconds, in which it does not answer
        monitor.wait_for_sample(monitor.wait_for_sample(-1) + 1, 30)
        now = monitor.get_current_metrics()
        assert now["sensors"]["blocked"]["state"] == "stale"
        assert now["sources"].keys() == {"tpu:0"}
        assert monitor.running
        stuck.let_go.set()


@pytest.mark.quick
def test_a_sample_that_fails_is_told_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    broken = threading.Event()
    broken.set()

    def clock() -> float:
        if broken.is_set() and threading.current_thread().name == "monitor":
            raise OverflowError("no time")
        return time.time()

    with TpuRealTimeMonitor(20, sensors=[Chips(1)], clock=clock) as monitor:
        deadline = time.monotonic() + 30
        while "a sample failed, and the monitor goes on: OverflowError('no time')" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        broken.clear()
        assert monitor.wait_for_sample(0, 30) > 0


@pytest.mark.quick
def test_nobody_waits_for_a_slow_sensor_to_read_the_last_figures() -> None:
    stuck = Blocked()
    monitor = TpuRealTimeMonitor(1000, sensors=[Chips(1)], deadline_s=30)
    monitor.sample()
    monitor.stop()
    slow = TpuRealTimeMonitor(1000, sensors=[stuck], deadline_s=30)
    slow._current = monitor.get_current_metrics()
    with slow:
        stuck.entered.wait(30)  # the sample waits for it now
        assert slow.get_current_metrics()["utilization"] == pytest.approx(0.8)
        assert not slow.has_alerts()
        stuck.let_go.set()


@pytest.mark.quick
def test_a_monitor_that_nobody_has_ends() -> None:
    before = threading.active_count()
    monitor = TpuRealTimeMonitor(20, sensors=[Chips(1)]).start_monitoring()
    monitor.wait_for_sample(0, 30)
    gone = weakref.ref(monitor)
    del monitor
    deadline = time.monotonic() + 30
    while gone() is not None or threading.active_count() > before:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def test_the_interpreter_ends_with_a_monitor_that_runs_and_a_sensor_and_a_callback_that_hang() -> None:
    program = """
import threading, time
from capibara.observe import TpuRealTimeMonitor
from capibara.observe.sensors import HostSensor, Reading
class Stuck:
    name, accelerators = "stuck", True
    def read(self):
        time.sleep(600)
    def close(self): pass
class Full:
    name, accelerators = "full", True
    def read(self): return [Reading("tpu:0", "tpu", {"memory_usage": 1.0})]
    def close(self): pass
hang = lambda event: time.sleep(600)
monitor = TpuRealTimeMonitor(20, {"memory_usage": 0.9}, sensors=[Stuck(), Full(), HostSensor()], callbacks=[hang])
monitor.start_monitoring()
monitor.wait_for_sample(2)
print(monitor.has_alerts(), threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True", "6"], "the main one, the monitor's, three sensors', a callback's"


@pytest.mark.quick
def test_settings_reach_what_they_are_for(tmp_path: Path) -> None:
    clock, chips = Clock(), Chips(1, memory_usage=0.95)
    wide = _monitor(chips, thresholds={"memory_usage": 0.9}, hysteresis=0.5, sustain_s=10, clock=clock)
    wide.sample()
    assert not wide.has_alerts(), "it has to last"
    clock.go(10)
    wide.sample()
    assert wide.has_alerts()
    chips.figures["memory_usage"] = 0.5
    wide.sample()
    assert wide.has_alerts(), "the margin is half of it"
    chips.figures["memory_usage"] = 0.4
    wide.sample()
    assert not wide.has_alerts()
    wide.stop()

    run = StandIn(lambda: [Reading("run", "train", {"tokens_per_second": 3600.0}, "TPU v4", 1)], "run")
    own = tmp_path / "own.toml"
    own.write_text(
        '[[price]]\nchip = "v4"\nregion = "here"\non_demand = 3.0\nspot = 1.0\n'
        '[[price]]\nchip = "v4"\nregion = "there"\non_demand = 5.0\n'
    )
    dollars = []
    for more in ({}, {"region": "there"}, {"price_kind": "spot"}, {"region": "there", "price_kind": "spot"}):
        monitor = _monitor(run, pricing=own, **more)
        figure = monitor.sample()["dollars_per_token"]
        dollars.append(None if figure is None else round(1e6 * figure * 3600 * 3600 / 1e6, 6))
        monitor.stop()
    assert dollars == [3.0, 5.0, 1.0, None], "an hour's dollars of one chip; no spot price there"

    stuck = Blocked()
    patient = TpuRealTimeMonitor(100, sensors=[stuck], deadline_s=0.3)
    started = time.monotonic()
    patient.sample()
    assert time.monotonic() - started >= 0.3
    stuck.let_go.set()
    patient.stop()


def test_many_samples_on_a_virtual_clock_take_no_more_memory() -> None:
    """All 864,000 of a day at ten a second: benchmarks/monitor_cost.py."""
    clock, chips = Clock(), Chips(4)
    monitor = _monitor(chips, thresholds={"memory_usage": 0.9}, clock=clock, history=500)

    def samples(count: int) -> None:
        for i in range(count):
            clock.go(0.1)
            chips.figures["memory_used"] = 31e9 if i % 6 < 3 else 8e9  # an alert of each chip comes and goes
            monitor.sample()

    tracemalloc.start()
    samples(800)  # more than the thousand events that are kept
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    samples(1000)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    monitor.stop()
    assert len(monitor.history) == 500
    assert len(monitor.alert_events()) == 1000
    # Anything that were kept of a sample would be a thousand times its size, and a float alone has 24 bytes.
    assert grown < 1000 * 16, f"{grown} bytes more after 1000 samples"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"update_frequency_ms": 0}, "10 or more"),
        ({"update_frequency_ms": float("nan")}, "10 or more"),
        ({"update_frequency_ms": "fast"}, "10 or more"),
        ({"alert_thresholds": {"temprature": 80}}, "Did you mean 'temperature'"),
        ({"history": 0}, "at least one sample"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"stale_after_s": -1}, "stale_after_s"),
        ({"region": "atlantis"}, "region"),
        ({"price_kind": "free"}, "kind of price"),
        ({"watch": ["/nowhere/at/all"]}, "a run's folder, a server's http address, or a process's number"),
    ],
)
def test_bad_input(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TpuRealTimeMonitor(**settings)


@pytest.mark.quick
def test_no_sensors_is_a_monitor_that_knows_nothing_and_says_so(
    caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    monitor = _monitor(thresholds={"utilization": 0.3})
    now = monitor.sample()
    monitor.stop()
    assert now["utilization"] is None
    assert now["sources"] == {}
    assert not monitor.has_alerts()
    assert "the monitor has no sensors" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        found = TpuRealTimeMonitor()
    alone = not any(sensor.accelerators for sensor in found._sensors)
    assert ("no TPU and no GPU in this machine" in caplog.text) == alone


@pytest.mark.quick
def test_samples_outlive_the_process_in_a_recorder(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        monitor = _monitor(HostSensor(), recorder=recorder)
        taken = [monitor.sample() for _ in range(2)]
        monitor.stop()
        samples = read_recording(recorder.file).samples
    assert samples.times == tuple(sample["time"] for sample in taken)
    assert samples.series is not None
    told = [sample["sources"]["host"]["memory_usage"] for sample in taken]
    assert samples.series["host", "memory_usage"] == pytest.approx(told)
    assert samples.series["all", "memory_usage"] == pytest.approx(told)
