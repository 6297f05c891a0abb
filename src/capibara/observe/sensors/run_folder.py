"""A trainer, by the folder of its run: the last line of its metrics, its goodput, and what chips it has."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError, rule_error
from capibara.observe.goodput import read_goodput
from capibara.observe.sensors.reading import Reading

__all__ = ["RunSensor"]

_TAIL = 1 << 16  # a line has some hundred bytes; an expert's shares at a checkpoint some thousand
_GOODPUT_EVERY_S = 5.0  # as often as they are written
_GOODPUT_SHARE = 1 / 500  # the whole of its books is read, and those of a long run are long
_FIGURES = {
    "step": "step",
    "loss": "loss",
    "seconds": "step_time",
    "tokens_per_second": "tokens_per_second",
    "mfu": "mfu",
}


class RunSensor:
    """Readings of a folder that `capibara train --out DIR` writes, while it does or later.

    Only the end of metrics.jsonl is read, and only when the file has changed, so that a run of millions of steps costs
    what one of ten does.

    Args:
      folder: of the run. Its files may still be to come.
      clock: of the wall, as files' times are.
    """

    accelerators = False

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise rule_error(
                "A run is a folder", f"{os.fspath(folder)!r}, which is none", "name the --out of capibara train"
            )
        self.name = str(folder)
        self._clock = clock
        self._values: dict[str, float] = {}
        self._written: float | None = None
        self._states: dict[str, tuple[int, int, int]] = {}
        self._goodput: float | None = None
        self._goodput_due = -float("inf")
        self._chip: str | None = None
        self._chips: int | None = None

    def read(self) -> Sequence[Reading]:
        metrics = self._folder / "metrics.jsonl"
        if self._changed(metrics):
            self._values = _last_step(metrics)
            self._written = metrics.stat().st_mtime
        if not self._values:
            raise CapibaraError(f"{self.name} has no step yet")
        self._read_goodput()
        if self._changed(self._folder / "run.json"):
            self._read_chips()
        assert self._written is not None
        values = {**self._values, "since_step": max(0.0, self._clock() - self._written)}
        if self._goodput is not None:
            values["goodput"] = self._goodput
        if values.get("mfu", 0.0) > 1:  # a CPU's peak was measured while it was busy: it says nothing
            del values["mfu"]
        return [Reading(self.name, "train", values, self._chip, self._chips)]

    def _changed(self, file: Path) -> bool:
        """Whether the file is another than when this was last asked. A resumed run puts a new one in its place."""
        try:
            told = file.stat()
        except FileNotFoundError:
            return False
        state = (told.st_ino, told.st_size, told.st_mtime_ns)
        if self._states.get(file.name) == state:
            return False
        self._states[file.name] = state
        return True

    def _read_goodput(self) -> None:
        if self._clock() < self._goodput_due:
            return
        began = time.perf_counter()
        if self._changed(self._folder / "goodput.jsonl"):
            report = read_goodput(self._folder / "goodput.jsonl")
            if report is not None and report.total > 0:
                self._goodput = report.goodput
        took = time.perf_counter() - began
        self._goodput_due = self._clock() + max(_GOODPUT_EVERY_S, took / _GOODPUT_SHARE)

    def _read_chips(self) -> None:
        try:
            life: dict[str, Any] = json.loads((self._folder / "run.json").read_text(encoding="utf-8"))["processes"][-1]
        except (OSError, ValueError, LookupError):
            return  # being written
        if life.get("platform") in ("tpu", "gpu", "cuda"):
            self._chip, self._chips = life.get("device_kind"), life.get("devices")

    def close(self) -> None:
        pass


def _last_step(file: Path) -> dict[str, float]:
    """The figures of the last whole line that is a step's, by our names."""
    with open(file, "rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _TAIL))
        lines = opened.read().split(b"\n")
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # being written, or cut where reading began
        if isinstance(row, dict) and "loss" in row:
            told = {ours: row.get(theirs) for theirs, ours in _FIGURES.items()}
            # A loss that is not finite is written as null.
            return {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
    return {}
