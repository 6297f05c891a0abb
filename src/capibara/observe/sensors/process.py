"""One process of this machine and its children, by its number."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from capibara.errors import CapibaraError, rule_error
from capibara.observe.sensors.reading import Reading

__all__ = ["ProcessSensor"]


class ProcessSensor:
    """Readings of a process with its children: processor time, of all processors, and resident memory.

    A number that another process got later is another process: this one has ended.

    Examples:
        >>> import os
        >>> [reading] = ProcessSensor(os.getpid()).read()
        >>> reading.kind, reading.values["memory_used"] > 0
        ('process', True)
    """

    accelerators = False

    def __init__(self, pid: int) -> None:
        try:
            self._process = psutil.Process(pid)
        except (psutil.NoSuchProcess, ValueError, OverflowError) as error:
            raise rule_error("A process is one that runs", f"pid {pid}", "see `ps` for those that do") from error
        self.name = f"pid {pid}"
        self._family: dict[int, psutil.Process] = {pid: self._process}
        self._processors = psutil.cpu_count() or 1
        self._process.cpu_percent(None)

    def read(self) -> Sequence[Reading]:
        if not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE:
            raise CapibaraError(f"{self.name} has ended")
        children = {child.pid: child for child in self._process.children(recursive=True)}
        # A process counts from its first reading on, so those that are known are kept.
        known = {pid: self._family.get(pid, child) for pid, child in children.items()}
        self._family = {self._process.pid: self._process, **known}
        busy = resident = 0.0
        for process in self._family.values():
            try:
                busy += process.cpu_percent(None)
                resident += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # a child that ended meanwhile
        values = {
            "utilization": busy / 100 / self._processors,
            "memory_used": resident,
            "memory_total": float(psutil.virtual_memory().total),
        }
        return [Reading(self.name, "process", values)]

    def close(self) -> None:
        pass
