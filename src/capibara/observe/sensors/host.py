"""The machine itself: processors, memory, and the hottest of its thermal zones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from capibara.observe.sensors.reading import Reading

__all__ = ["HostSensor"]

ZONES = Path("/sys/class/thermal")
_TEMPERATURE_EVERY_S = 1.0  # it changes slowly, and asking the firmware may take milliseconds


class HostSensor:
    """Readings of "host". Processors are at work as the kernel counts them, between one reading and the next.

    Args:
      zones: the kernel's folder of thermal zones; where it has none, psutil's sensors are asked.
      clock: in seconds, for how often temperatures are read.

    Examples:
        >>> [reading] = HostSensor().read()
        >>> reading.source, 0 < reading.values["memory_used"] < reading.values["memory_total"]
        ('host', True)
    """

    name = "host"
    accelerators = False

    def __init__(self, zones: Path = ZONES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._zones = sorted(zones.glob("thermal_zone*/temp"))
        self._temperature: float | None = None
        self._read_at: float | None = None
        self._times = psutil.cpu_times()

    def read(self) -> Sequence[Reading]:
        memory = psutil.virtual_memory()
        values = {
            "memory_used": float(memory.total - memory.available),
            "memory_total": float(memory.total),
        }
        busy = self._busy()
        if busy is not None:
            values["utilization"] = busy
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _TEMPERATURE_EVERY_S:
            self._temperature, self._read_at = self._hottest(), now
        if self._temperature is not None:
            values["temperature"] = self._temperature
        return [Reading("host", "host", values)]

    def _busy(self) -> float | None:
        """Since the last reading; None where no time has gone by. psutil's own share is kept by thread, and says 0 in a
        new one."""
        before, self._times = self._times, psutil.cpu_times()
        # What guests use is in `user` as well.
        grown = {
            name: max(0.0, getattr(self._times, name) - getattr(before, name))
            for name in self._times._fields
            if not name.startswith("guest")
        }
        total = sum(grown.values())
        idle = grown["idle"] + grown.get("iowait", 0.0)
        return 1 - idle / total if total > 0 else None

    def _hottest(self) -> float | None:
        told = [degrees for zone in self._zones if (degrees := _zone(zone)) is not None]
        if not self._zones and hasattr(psutil, "sensors_temperatures"):  # Linux and FreeBSD
            told = [one.current for group in psutil.sensors_temperatures().values() for one in group]
        # A zone that is switched off tells 0 or less.
        return max((degrees for degrees in told if degrees > 0), default=None)

    def close(self) -> None:
        pass


def _zone(file: Path) -> float | None:
    try:
        return int(file.read_text()) / 1000
    except (OSError, ValueError):  # a zone may be there and refuse to be read
        return None
