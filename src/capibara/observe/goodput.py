"""Goodput: what share of a run's time went into steps that count, over all of its restarts.

Time is booked under one phase at a time. A step that is done again after a restore counts once: what was thrown away
is "lost". The time between a process's end and the next one's start is "restart", and what no phase claims is "idle".
The books are lines of JSON in the run's folder, added at least every `flush_seconds`, so that a process that is killed
loses no more than that.

A server books its time under phases of its own, of which "serving" is the one that counts.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from capibara.errors import rule_error, unknown_name

__all__ = ["PHASES", "SERVER_PHASES", "Goodput", "GoodputReport", "read_goodput"]

PHASES = ("initialise", "compile", "data_wait", "step", "checkpoint", "restart", "evaluation", "idle")
"""What a training run's time can be booked under; "idle" also takes what nobody claims."""
SERVER_PHASES = ("load", "warm_up", "compile", "serving", "drain", "restart", "idle")
"""What a server's time can be booked under: weights and engine, programs made before the first request, programs made
while requests wait, steps, steps once it was told to stop; "idle" is when nobody asks anything."""


@dataclass(frozen=True)
class GoodputReport:
    """Seconds by phase, of `total`; they add up to it."""

    total: float
    seconds: Mapping[str, float]
    """`PHASES` and "lost": steps that were done again after a restore."""
    steps: int
    """Steps that count."""
    lost_steps: int
    restarts: int
    counts: str = "step"
    """The phase that the others are for."""

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that count; NaN before any time has gone by."""
        return self.seconds[self.counts] / self.total if self.total > 0 else float("nan")

    def dollars(self, per_hour: float) -> dict[str, float]:
        """What each phase cost, where all chips together are so much an hour. They add up to what the total cost."""
        return {name: seconds / 3600 * per_hour for name, seconds in self.seconds.items()}

    def fractions(self) -> dict[str, float]:
        total = self.total or float("nan")
        return {name: seconds / total for name, seconds in self.seconds.items()}

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.fractions().items() if share)
        lost = f", {self.lost_steps} done twice" if self.lost_steps else ""
        steps = f"{self.steps} steps{lost}, " if self.counts == "step" else ""
        return f"goodput {self.goodput:.1%} of {self.total:.1f} s: {steps}{self.restarts} restarts; {shares}"


@dataclass
class _Run:
    """One process's life in the books."""

    start: float
    until: float
    seconds: dict[str, float]
    steps: list[tuple[int, int, float]]
    """First, last and seconds of stretches of steps."""


class Goodput:
    """Books the time of a run. One loop uses it; phases inside of a phase are booked under the inner one.

    Args:
      file: a line of JSON at a time; the books of earlier processes of the run are read from it. None keeps them in
        memory, of this process alone.
      phases: what time can be booked under.
      counts: the phase that the others are for.
      flush_seconds: how much time may go by unwritten.
      clock: of the wall, as it goes on while no process runs.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Goodput(f"{folder}/goodput.jsonl") as goodput:
        ...     with goodput.phase("data_wait"):
        ...         batch = [1, 2, 3]
        ...     with goodput.phase("step", step=1):
        ...         loss = sum(batch)
        ...     report = goodput.report()
        >>> report.steps, round(sum(report.fractions().values()), 6)
        (1, 1.0)
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | None,
        *,
        phases: Sequence[str] = PHASES,
        counts: str = "step",
        flush_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if counts not in phases:
            raise unknown_name("phase that counts", counts, phases)
        self.file = None if file is None else Path(file)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        self.phases = tuple(phases)
        self.counts = counts
        self._clock = clock
        self._flush_seconds = flush_seconds
        self._lock = threading.RLock()
        self._earlier = [] if self.file is None else _read(self.file)
        now = clock()
        self._run = _Run(now, now, {}, [])
        self._written = _Run(now, now, {}, [])
        self._stack: list[str] = []
        self._since = now
        if self.file is not None:
            _mend(self.file)
        self._append({"start": now, "pid": os.getpid()})

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _book(self, now: float) -> None:
        """What went by since the last turn belongs to the innermost phase."""
        if self._stack:
            name = self._stack[-1]
            self._run.seconds[name] = self._run.seconds.get(name, 0.0) + now - self._since
        self._since = self._run.until = now

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Book the time of this block. With `step`, it is that step's, and the step is done when the block ends well.

        A step whose block raises is no step; its time is booked under "idle", as nothing came of it.
        """
        if name not in self.phases:
            raise unknown_name("phase", name, self.phases)
        if (step is not None) != (name == "step"):
            raise rule_error('step= comes with the phase "step"', f"{name!r}, step={step!r}", 'phase("step", step=12)')
        with self._lock:
            self._book(self._clock())
            before = self._run.seconds.get("step", 0.0)
            self._stack.append(name)
        well = False
        try:
            yield
            well = True
        finally:
            with self._lock:
                now = self._clock()
                self._book(now)
                self._stack.pop()
                if step is not None:
                    spent = self._run.seconds.get("step", 0.0) - before
                    if well:
                        self._run.steps.append((step, step, spent))
                    else:
                        self._run.seconds["step"] = before
                        self._run.seconds["idle"] = self._run.seconds.get("idle", 0.0) + spent
                if now - self._written.until >= self._flush_seconds:
                    self.flush()

    def move(self, seconds: float, source: str, target: str) -> None:
        """Book this much of what a phase has under another: for what is known of a block only at its end."""
        for name in (source, target):
            if name not in self.phases:
                raise unknown_name("phase", name, self.phases)
        with self._lock:
            self._book(self._clock())
            moved = min(seconds, self._run.seconds.get(source, 0.0))
            self._run.seconds[source] = self._run.seconds.get(source, 0.0) - moved
            self._run.seconds[target] = self._run.seconds.get(target, 0.0) + moved

    def flush(self) -> None:
        """Write what has not been written yet."""
        with self._lock:
            new = {
                name: seconds - self._written.seconds.get(name, 0.0)
                for name, seconds in self._run.seconds.items()
                if seconds != self._written.seconds.get(name, 0.0)
            }
            steps = _stretches(self._run.steps[len(self._written.steps) :])
            self._append({"until": self._run.until, "seconds": new, "steps": steps})
            self._run.steps = _stretches(self._run.steps)
            self._written = _Run(self._run.start, self._run.until, dict(self._run.seconds), list(self._run.steps))

    def report(self) -> GoodputReport:
        """The whole run up to now, with its earlier processes."""
        with self._lock:
            self._book(self._clock())
            return _report([*self._earlier, self._run], self.phases, self.counts)

    def close(self) -> None:
        with self._lock:
            self._book(self._clock())
            self.flush()

    def __enter__(self) -> Goodput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _stretches(steps: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Steps that follow each other as one entry."""
    merged: list[tuple[int, int, float]] = []
    for first, last, seconds in steps:
        if merged and merged[-1][1] + 1 == first:
            merged[-1] = (merged[-1][0], last, merged[-1][2] + seconds)
        else:
            merged.append((first, last, seconds))
    return merged


def _mend(file: Path) -> None:
    """End a line that a killed process left open, so that the next one begins on its own."""
    if file.exists() and file.stat().st_size:
        with open(file, "rb+") as opened:
            opened.seek(-1, os.SEEK_END)
            if opened.read(1) != b"\n":
                opened.write(b"\n")


def read_goodput(file: str | os.PathLike[str]) -> GoodputReport | None:
    """The books of a run up to the last line that was written; None where there are none."""
    runs = _read(Path(file))
    return _report(runs) if runs else None


def _read(file: Path) -> list[_Run]:
    runs: list[_Run] = []
    if not file.exists():
        return runs
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a killed process was writing
        if "start" in row:
            runs.append(_Run(row["start"], row["start"], {}, []))
        elif runs:
            run = runs[-1]
            run.until = row["until"]
            for name, seconds in row["seconds"].items():
                run.seconds[name] = run.seconds.get(name, 0.0) + seconds
            run.steps += [(first, last, seconds) for first, last, seconds in row["steps"]]
    return runs


def _report(runs: list[_Run], phases: Sequence[str] = PHASES, counts: str = "step") -> GoodputReport:
    seconds = dict.fromkeys([*phases, "lost"], 0.0)
    for run in runs:
        for name, spent in run.seconds.items():
            if name not in seconds:
                raise rule_error(f"These books have the phases {', '.join(phases)}", repr(name), "name another file")
            seconds[name] += spent
        seconds["idle"] += run.until - run.start - sum(run.seconds.values())
    for before, after in itertools.pairwise(runs):
        seconds["restart"] += after.start - before.until
    # Each stretch begins after the steps that count; what it does again was lost the first time.
    counted: list[tuple[int, int, float]] = []
    lost_steps = 0
    for first, last, spent in (stretch for run in runs for stretch in run.steps):
        while counted and counted[-1][1] >= first:
            start, stop, time_of = counted.pop()
            again = stop - max(first, start) + 1
            share = time_of * again / (stop - start + 1)
            seconds["lost"] += share
            lost_steps += again
            if start < first:
                counted.append((start, first - 1, time_of - share))
        counted.append((first, last, spent))
    seconds[counts] -= seconds["lost"]
    steps = sum(last - first + 1 for first, last, _ in counted)
    total = runs[-1].until - runs[0].start
    return GoodputReport(total, seconds, steps, lost_steps, len(runs) - 1, counts)
