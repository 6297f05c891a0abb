"""The monitor: sensors asked at an interval, the last figures kept, alerts raised and cleared, whoever listens told."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from capibara.errors import rule_error, say_once
from capibara.observe.alerts import Alert, AlertEvent, Alerts
from capibara.observe.economy import Economy
from capibara.observe.history import History
from capibara.observe.notify import Callback, Notifier
from capibara.observe.polling import Poller, SensorState
from capibara.observe.recorder import Recorder
from capibara.observe.sensors.found import default_sensors, sensor_for
from capibara.observe.sensors.reading import ACCELERATORS, METRICS, Reading, Sensor

__all__ = ["TpuRealTimeMonitor"]

_log = logging.getLogger("capibara.observe")

_FASTEST_MS = 10.0
_FIRST_S = 2.0

TOGETHER = "all"
"""The source under which the history has what is together."""

# How the figures of several devices become one; what is a run's or a server's is that of the first that tells it.
_COMBINE: Mapping[str, Callable[[list[float]], float]] = {
    "utilization": lambda values: sum(values) / len(values),
    "tensorcore_utilization": lambda values: sum(values) / len(values),
    "memory_used": sum,
    "memory_total": sum,
    "memory_usage": max,
    "temperature": max,
    "power": sum,
    "clock": min,
}


class TpuRealTimeMonitor:
    """Watches the accelerators of this machine, the machine, and what else it is told to, in the background.

    Thresholds of devices (memory_usage, temperature, power, utilization) are held against every TPU and GPU, and
    against the host where there is none; those of runs and servers against what is in `watch`. The thread ends at
    `stop`, with the last reference to the monitor, or with the interpreter.

    Args:
      update_frequency_ms: milliseconds from one sample to the next, 10 or more.
      alert_thresholds: name -> value, of `capibara.observe.alerts.THRESHOLDS`: memory_usage, temperature and most
        others alert above it, utilization, tokens_per_second, mfu and goodput below.
      sensors: in place of those of the machine.
      watch: runs' folders, servers' addresses, processes' numbers.
      callbacks: called with an `AlertEvent` at each change, in threads of their own: `capibara.observe.log_alerts`,
        `webhook`, `command`, or any function.
      history: how many samples are kept.
      recorder: a flight recorder that gets every sample too, so that the last minutes outlive the process.
      hysteresis: how far back a figure has to come, as a share of its threshold, before its alert is cleared.
      sustain_s: for how long a figure has to be beyond its threshold before there is an alert.
      deadline_s: how long a sample waits for slow sensors; half of the interval, 0.5 at most, and 2 for the first one.
      stale_after_s: how long a sensor's last answer stands while it does not answer; five intervals, 2 at least.
      region: whose prices make dollars a token; the first that the price table lists for the chip.
      price_kind: of `capibara.prices.table.KINDS`: "on_demand", "spot", "flex_start", "committed_1y", "committed_3y".
      pricing: a price table of the user's own.
      clock: in seconds; the wall's where it is None.

    Examples:
        >>> with TpuRealTimeMonitor(update_frequency_ms=100, alert_thresholds={"memory_usage": 0.999}) as monitor:
        ...     metrics = monitor.get_current_metrics()
        >>> 0 < metrics["sources"]["host"]["memory_usage"] < 1
        True
    """

    def __init__(
        self,
        update_frequency_ms: float = 1000,
        alert_thresholds: Mapping[str, float] | None = None,
        *,
        sensors: Sequence[Sensor] | None = None,
        watch: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
        history: int = 6000,
        recorder: Recorder | None = None,
        hysteresis: float = 0.05,
        sustain_s: float = 0.0,
        deadline_s: float | None = None,
        stale_after_s: float | None = None,
        region: str | None = None,
        price_kind: str = "on_demand",
        pricing: str | Path | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not _is_number(update_frequency_ms) or not _FASTEST_MS <= update_frequency_ms < math.inf:
            raise rule_error(
                f"update_frequency_ms is a number of milliseconds, {_FASTEST_MS:g} or more",
                repr(update_frequency_ms),
                "write 100",
            )
        self._interval_s = update_frequency_ms / 1000
        for name, seconds in (("deadline_s", deadline_s), ("stale_after_s", stale_after_s)):
            if seconds is not None and not (_is_number(seconds) and 0 < seconds < math.inf):
                raise rule_error(f"{name} is a number of seconds above 0", repr(seconds), "leave it out")
        self._deadline_s = min(0.5, self._interval_s / 2) if deadline_s is None else deadline_s
        self._first_deadline_s = _FIRST_S if deadline_s is None else deadline_s
        self._stale_after_s = max(2.0, 5 * self._interval_s) if stale_after_s is None else stale_after_s
        self._alerts = Alerts(alert_thresholds, hysteresis=hysteresis, sustain_s=sustain_s)
        self._economy = Economy(region, price_kind, pricing)
        watched = [sensor_for(what) for what in watch]
        self._sensors = [*(default_sensors() if sensors is None else sensors), *watched]
        self._has_accelerators = any(sensor.accelerators for sensor in self._sensors)
        if not self._sensors:
            say_once(_log, "none", "the monitor has no sensors: every figure is None, and nothing alerts")
        elif sensors is None and not self._has_accelerators:
            text = "there is no TPU and no GPU in this machine: thresholds of devices are held against the host"
            say_once(_log, "host", text, level=logging.INFO)
        self._callbacks = tuple(callbacks)
        self._recorder = recorder
        self._wall = clock or time.time
        self._clock = clock or time.monotonic
        self.history = History(history)
        """The last samples: `history.series("tpu:0", "utilization")` gives times and values; "all" is together."""
        self._sampling = threading.Lock()
        self._lock = threading.RLock()
        self._sampled = threading.Condition(self._lock)
        self._samples = 0
        self._raised = 0
        self._current: dict[str, Any] | None = None
        self._parts = _Parts()

    def start_monitoring(self) -> TpuRealTimeMonitor:
        """Begin to take samples in the background; one that runs goes on as it is."""
        with self._lock:
            parts = self._open()
            if parts.thread is None:
                parts.thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), parts.stop, self._interval_s), name="monitor", daemon=True
                )
                parts.thread.start()
        return self

    def _open(self) -> _Parts:
        parts = self._parts
        if parts.poller is None:
            if parts.stop.is_set():  # it was stopped: it begins anew
                parts = self._parts = _Parts()
            parts.poller = Poller(
                self._sensors,
                deadline_s=self._deadline_s,
                first_deadline_s=self._first_deadline_s,
                stale_after_s=self._stale_after_s,
                clock=self._clock,
            )
            parts.notifiers = [Notifier(callback) for callback in self._callbacks]
            # At the interpreter's exit, and when nobody has the monitor any more.
            parts.finalizer = weakref.finalize(self, parts.close)
        return parts

    def stop(self) -> None:
        """End the threads. What was sampled stays readable, and `start_monitoring` begins again."""
        with self._lock:
            parts = self._parts
        # Without the lock: the thread that is waited for may want it.
        if parts.finalizer is not None:
            parts.finalizer()

    def sample(self) -> dict[str, Any]:
        """Take a sample now, in this thread, beside those of the background: what `get_current_metrics` then gives."""
        with self._sampling:  # one at a time; whoever reads figures meanwhile does not wait for sensors
            with self._lock:
                parts = self._open()
                poller = parts.poller
            assert poller is not None
            readings = poller.poll()
            now = self._wall()
            figures = self._figures(readings)
            states = poller.states()
            together = self._together(readings, figures)
            told = {(TOGETHER, name): value for name, value in together.items() if value is not None}
            if self._recorder is not None:
                self._recorder.sensors({**figures, **told}, now)
            with self._lock:
                self.history.append(now, {**figures, **told})
                watched = {key: value for key, value in figures.items() if self._is_alerted(key[0])}
                events = self._alerts.update(now, watched)
                self._raised += sum(event.what == "raised" for event in events)
                self._samples += 1
                self._current = self._document(now, readings, figures, together, states)
                self._sampled.notify_all()
            for event in events:
                for notifier in parts.notifiers:
                    notifier.tell(event)
            return self._current

    def _figures(self, readings: Sequence[Reading]) -> dict[tuple[str, str], float]:
        accelerators = [reading for reading in readings if reading.kind in ACCELERATORS]
        figures: dict[tuple[str, str], float] = {}
        for reading in readings:
            derived = self._economy.of(reading, accelerators) if reading.kind in ("train", "serve") else {}
            for name, value in {**reading.values, **derived}.items():
                figures[reading.source, name] = value
        return figures

    def _is_alerted(self, source: str) -> bool:
        return source != "host" or not self._has_accelerators

    def _together(
        self, readings: Sequence[Reading], figures: Mapping[tuple[str, str], float]
    ) -> dict[str, float | None]:
        """One value of each figure: of all devices, or of the first run or server that tells it."""
        wanted = ACCELERATORS if self._has_accelerators else ("host",)
        devices = [reading.source for reading in readings if reading.kind in wanted]
        others = [reading.source for reading in readings if reading.kind in ("train", "serve")]
        together: dict[str, float | None] = {}
        for name in METRICS:
            combine = _COMBINE.get(name)
            told = [
                value
                for source in (devices if combine else others)
                if (value := figures.get((source, name))) is not None
            ]
            together[name] = None if not told else combine(told) if combine else told[0]
        return together

    def _document(
        self,
        now: float,
        readings: Sequence[Reading],
        figures: Mapping[tuple[str, str], float],
        together: Mapping[str, float | None],
        states: Sequence[SensorState],
    ) -> dict[str, Any]:
        document: dict[str, Any] = {"time": now, **together}
        sources_told: dict[str, dict[str, Any]] = {
            reading.source: {"kind": reading.kind, "chip": reading.chip} for reading in readings
        }
        for (source, name), value in figures.items():
            sources_told[source][name] = value
        document["sources"] = sources_told
        document["sensors"] = {
            state.name: {"state": state.state, "age_s": state.age_s, "text": state.text, "refused": state.refused}
            for state in states
        }
        document["alerts"] = [alert.as_dict() for alert in self._alerts.active]
        return document

    def get_current_metrics(self) -> dict[str, Any]:
        """The last sample, or one taken now where there is none.

        Every name of `capibara.observe.sensors.METRICS` is a key: devices together (utilization is their mean,
        memory_usage, temperature and clock are of the fullest, hottest and slowest, memory and power are sums), None
        where nothing tells it. "sources" has the figures of each, "sensors" how each sensor is, "alerts" what is beyond
        a threshold.
        """
        current = self._current
        return copy.deepcopy(self.sample() if current is None else current)  # the caller's own, to do with as it likes

    def has_alerts(self) -> bool:
        """Whether anything is beyond its threshold now."""
        with self._lock:
            return bool(self._alerts.active)

    def get_alerts(self) -> list[Alert]:
        """What is beyond its threshold now, the oldest first."""
        with self._lock:
            return self._alerts.active

    def alert_events(self) -> list[AlertEvent]:
        """The last thousand alerts that were raised or cleared."""
        with self._lock:
            return list(self._alerts.events)

    def curves(self, last: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """source -> metric -> (time, value) of the last so many samples, without those in which it was not told."""
        curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
        with self._lock:
            for source, metric in self.history.keys():  # noqa: SIM118  # no dict
                times, values = self.history.series(source, metric, last)
                told = ~np.isnan(values)
                points = list(zip(times[told].tolist(), values[told].tolist(), strict=True))
                curves.setdefault(source, {})[metric] = points
        return curves

    def wait_for_sample(self, after: int = 0, timeout_s: float | None = None) -> int:
        """Wait until more than so many samples were taken; how many were."""
        with self._sampled:
            self._sampled.wait_for(lambda: self._samples > after or self._parts.stop.is_set(), timeout_s)
            return self._samples

    @property
    def running(self) -> bool:
        """Whether samples are taken in the background."""
        thread = self._parts.thread
        return thread is not None and thread.is_alive() and not self._parts.stop.is_set()

    @property
    def alerts_raised(self) -> int:
        """How many alerts were raised so far."""
        return self._raised

    @property
    def interval_s(self) -> float:
        return self._interval_s

    def __enter__(self) -> TpuRealTimeMonitor:
        return self.start_monitoring()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class _Parts:
    """What has threads, apart from the monitor, so that nothing that runs keeps the monitor alive."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        self.poller: Poller | None = None
        self.notifiers: list[Notifier] = []
        self.finalizer: weakref.finalize[..., TpuRealTimeMonitor] | None = None

    def close(self) -> None:
        self.stop.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(2.0)
        if self.poller is not None:
            self.poller.close()
            self.poller = None
        for notifier in self.notifiers:
            notifier.close()


def _run(monitor: weakref.ref[TpuRealTimeMonitor], stop: threading.Event, interval_s: float) -> None:
    due = time.monotonic()
    while not stop.is_set():
        watched = monitor()
        if watched is None:
            return
        try:
            watched.sample()
        except Exception as error:  # noqa: BLE001  # whatever it is, the next sample may be well
            say_once(_log, type(error).__name__, "a sample failed, and the monitor goes on: %r", error)
        del watched  # or this thread would be who keeps it
        # What was missed while the machine slept is not made up for.
        due = max(due + interval_s, time.monotonic())
        stop.wait(due - time.monotonic())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
