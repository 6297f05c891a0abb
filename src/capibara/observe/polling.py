"""Sensors asked all at once, each in a thread of its own: one that dies, lies or blocks holds up none of the others.

A sensor that has not answered by the deadline is left to itself and asked again when it comes back. What it said last
stands until it is stale; then it is gone from the figures, and the sensor says that it is stale.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from capibara.errors import rule_error
from capibara.observe.sensors.reading import Reading, Sensor, believable

__all__ = ["Poller", "SensorState"]

_log = logging.getLogger("capibara.observe")


@dataclass(frozen=True)
class SensorState:
    """How a sensor is."""

    name: str
    state: Literal["ok", "failed", "stale", "starting"]
    """"failed": it raised. "stale": it did not answer for `stale_after_s`."""
    age_s: float | None
    """How old its last answer is; None before the first."""
    text: str = ""
    """What is wrong: the error, or the figures that cannot be true."""
    refused: int = 0
    """How many figures were left out so far, as they could not be true."""


class _Line:
    """One sensor, its thread, and its last answer."""

    def __init__(self, sensor: Sensor, clock: Callable[[], float], answered: threading.Condition) -> None:
        self.sensor = sensor
        self.asked = threading.Event()
        self.busy = False
        self.asked_at: float | None = None
        self.readings: tuple[Reading, ...] = ()
        self.read_at: float | None = None
        self.error = ""
        self.lies = ""
        self.refused = 0
        self._clock = clock
        self._answered = answered
        self._stop = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"sensor {self.sensor.name}", daemon=True)
            self._thread.start()
        self.busy, self.asked_at = True, self._clock()
        self.asked.set()

    def stop(self) -> None:
        self._stop = True
        self.asked.set()

    def join(self, timeout: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self.asked.wait()
            self.asked.clear()
            if self._stop:
                break
            readings: tuple[Reading, ...] = ()
            error, refused = "", []
            try:
                believed = [believable(reading) for reading in self.sensor.read()]
                readings = tuple(one.reading for one in believed)
                refused = [text for one in believed for text in one.refused]
            except Exception as raised:  # noqa: BLE001  # whatever is wrong with a sensor, it is that sensor's
                error = f"{type(raised).__name__}: {raised}" if str(raised) else type(raised).__name__
            with self._answered:
                if error and not self.error:  # its text may change every time
                    _log.warning("sensor %s: %s", self.sensor.name, error)
                self.error = error
                self.lies = "; ".join(refused)[:500]
                self.refused += len(refused)
                if not error:
                    self.readings, self.read_at = readings, self._clock()
                self.busy = False
                self._answered.notify_all()
        try:
            self.sensor.close()
        except Exception as raised:  # noqa: BLE001
            _log.warning("sensor %s did not close: %s", self.sensor.name, raised)


class Poller:
    """Asks sensors, and gives what they said.

    Args:
      sensors: each with a name of its own.
      deadline_s: how long one asking waits for those that are slow.
      first_deadline_s: the same where one is asked for the first time, and may have a library to open; `deadline_s`.
      stale_after_s: how long an answer stands.
      clock: in seconds; what waits for a thread waits by the wall's clock.
    """

    def __init__(
        self,
        sensors: Sequence[Sensor],
        *,
        deadline_s: float = 0.5,
        first_deadline_s: float | None = None,
        stale_after_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [sensor.name for sensor in sensors]
        if len(set(names)) != len(names):
            raise rule_error("Sensors have names of their own", names, "watch each thing once")
        self._deadline_s = deadline_s
        self._first_deadline_s = deadline_s if first_deadline_s is None else first_deadline_s
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._answered = threading.Condition()
        self._lines = [_Line(sensor, clock, self._answered) for sensor in sensors]

    def poll(self) -> list[Reading]:
        """Ask every sensor that is not still busy, wait for them until the deadline, and give what stands."""
        with self._answered:
            waited = [line for line in self._lines if not line.busy]
            first = any(line.asked_at is None for line in waited)
            for line in waited:
                line.ask()
            deadline_s = self._first_deadline_s if first else self._deadline_s
            self._answered.wait_for(lambda: not any(line.busy for line in waited), deadline_s)
            now = self._clock()
            return [
                reading
                for line in self._lines
                if not line.error and not self._is_stale(line, now)
                for reading in line.readings
            ]

    def states(self) -> list[SensorState]:
        """How each sensor is, in the order given."""
        with self._answered:
            now = self._clock()
            return [self._state(line, now) for line in self._lines]

    def _is_stale(self, line: _Line, now: float) -> bool:
        since = line.asked_at if line.read_at is None else line.read_at
        return since is not None and line.busy and now - since > self._stale_after_s

    def _state(self, line: _Line, now: float) -> SensorState:
        name = line.sensor.name
        age = None if line.read_at is None else max(0.0, now - line.read_at)
        if self._is_stale(line, now):
            waiting = now - (line.asked_at or now)
            return SensorState(name, "stale", age, f"it has not answered for {waiting:.1f} s", line.refused)
        if line.error:
            return SensorState(name, "failed", age, line.error, line.refused)
        return SensorState(name, "starting" if line.read_at is None else "ok", age, line.lies, line.refused)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the threads. One that is stuck inside of its sensor is left: it ends with the process."""
        for line in self._lines:
            line.stop()
        until = time.monotonic() + timeout_s
        for line in self._lines:
            line.join(max(0.0, until - time.monotonic()))
