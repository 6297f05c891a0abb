"""A run over the lattice that ends in time: rows are compiled by several processes at once and timed by one at a time.

Tracing holds Python's lock and compilers search on the device, so that neither goes on while a row is timed. A run is
made of rounds: every worker compiles and checks its share of the next rows, then each in turn times its own. The first
process keeps the clock and the results; it computes nothing itself.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import jax

from capibara.kernels.lab.lattice import measure
from capibara.kernels.lab.lattice.workloads import Workload, draw

# So many rows of a worker in a round, the first round's and the others': a run that fails early fails soon.
FIRST_ROUND, LATER_ROUNDS = 2, 4
# A worker whose rows fail one after another has lost its device.
MOST_FAILURES = 4
# Of the device's memory, of a worker at the most: few rows need as much, and hardly ever at the same time. JAX hands
# none back, so a worker that kept more than its part of the second share begins anew.
_MEMORY_SHARE, _KEPT_SHARE = 0.25, 0.5
Row = dict[str, Any]


def _drawn(settings: Settings) -> Iterator[Workload]:
    return draw(settings.seed, settings.families, settings.shrink)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is drawn, and for how long.

    Attributes:
      minutes: of the whole run; it ends before them where the next round would not fit.
      seed, families, shrink: of `workloads.draw`.
      most_rows: an end by number, None for none.
      workers: processes that compile, 0 for none but this one.
      skip: rows of the stream that another run with this seed has made.
      workloads: what to time in the place of draws, as a function of the settings; workers are processes of their own,
        so it is one that a module has.
    """

    minutes: float = 8.0
    seed: int = 0
    families: tuple[str, ...] | None = None
    shrink: int = 1
    most_rows: int | None = None
    workers: int = 0
    skip: int = 0
    workloads: Callable[[Settings], Iterator[Workload]] = _drawn


class _Share:
    """What one process compiles and times."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stream = settings.workloads(settings)
        self.place = 0
        self.ready: list[measure.Prepared] = []
        self.pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // max(settings.workers, 1)))

    def compile(self, index: int) -> Row | None:
        """Compile the row of this number; what came of it where it failed."""
        while self.place <= index:
            workload = next(self.stream)
            self.place += 1
        try:
            self.ready.append(measure.prepare(workload, self.pool, self.settings.seed))
        except Exception as failure:  # noqa: BLE001 - the row says what it was
            return _failed(workload, failure)
        return None

    def times(self) -> Iterator[Row]:
        for prepared in self.ready:
            try:
                yield prepared.time()
            except Exception as failure:  # noqa: BLE001 - the row says what it was
                yield _failed(prepared.workload, failure)
        self.ready = []


def _failed(workload: Workload, failure: Exception) -> Row:
    """A row that says what went wrong: one failure is not the end of a run of many minutes."""
    last = traceback.extract_tb(failure.__traceback__)[-1]
    text = f"{type(failure).__name__}: {str(failure)[:300]} ({os.path.basename(last.filename)}:{last.lineno})"
    return {
        "family": workload.family, "model": workload.model, "held_back": workload.held_back, "what": workload.what,
        "direction": workload.direction, "failed": text,
    }  # fmt: skip


def run(settings: Settings, on_row: Callable[[Row], None]) -> int:
    """Draw, compile and time rows until the time is over; `on_row` has each as it is made. Returns how many were
    drawn."""
    end = time.monotonic() + 60 * settings.minutes
    if settings.workers == 0:
        return _alone(settings, on_row, end)
    return _together(settings, on_row, end)


def _alone(settings: Settings, on_row: Callable[[Row], None], end: float) -> int:
    share, index, longest = _Share(settings), settings.skip, 0.0
    while settings.most_rows is None or index - settings.skip < settings.most_rows:
        start = time.monotonic()
        if start + longest > end:
            break
        failed = share.compile(index)
        for row in [failed] if failed is not None else share.times():
            on_row(row)
        longest = max(longest, time.monotonic() - start)
        index += 1
    return index - settings.skip


def _together(settings: Settings, on_row: Callable[[Row], None], end: float) -> int:
    # Read when a process first asks for its device: the workers share its memory, and torch has a part of its own.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{max(_MEMORY_SHARE, 0.8 / settings.workers):.3f}"
    spawn = multiprocessing.get_context("spawn")
    taken = spawn.Value("i", settings.skip)

    def started() -> Member:
        here, there = spawn.Pipe()
        process = spawn.Process(target=_work, args=(settings, there, taken), daemon=True)
        process.start()
        there.close()
        return process, here

    members = [started() for _ in range(settings.workers)]
    per_row, size = 0.0, FIRST_ROUND * settings.workers
    drawn = 0
    while members:
        left = end - time.monotonic()
        if per_row:
            size = min(LATER_ROUNDS * settings.workers, int(left / per_row / settings.workers) * settings.workers)
        if settings.most_rows is not None:
            size = min(size, settings.most_rows - drawn)
        if size <= 0 or left <= 0:
            break
        start = time.monotonic()
        # What is compiled late in a round is timed late: nobody begins a row in the last third of what is left.
        goal = settings.skip + drawn + size
        members = _told(members, ("compile", goal, start + 2 * left / 3), on_row, together=True)
        members = _told(members, ("time",), on_row, together=False)
        members = [started() if _ended_for_memory(member, settings.workers) else member for member in members]
        drawn = min(goal, taken.value) - settings.skip
        taken.value = settings.skip + drawn
        per_row = max((time.monotonic() - start) / size, per_row / 2)
    for process, here in members:
        here.send(("end",))
        process.join(10)
    return drawn


Member = tuple[Any, Connection]


def _told(
    members: Sequence[Member], command: tuple[Any, ...], on_row: Callable[[Row], None], together: bool
) -> list[Member]:
    """Give each worker the command, all at once or one after another; those that are still there afterwards."""
    groups = [list(members)] if together else [[member] for member in members]
    alive = []
    for group in groups:
        for _, here in group:
            here.send(command)
        for process, here in group:
            try:
                while True:
                    answer = here.recv()
                    if answer is None:
                        alive.append((process, here))
                        break
                    on_row(answer)
            except (EOFError, ConnectionError):
                on_row({"failed": f"a worker ended with code {process.exitcode}", "family": "none"})
    return alive


def _ended_for_memory(member: Member, workers: int) -> bool:
    """Ask a worker how much of its share of memory it has ever taken, and end it where that is too much."""
    process, here = member
    here.send(("memory",))
    if here.recv() * _MEMORY_SHARE * workers <= _KEPT_SHARE:
        return False
    here.send(("end",))
    process.join(10)
    return True


def _work(settings: Settings, pipe: Connection, taken: Any) -> None:
    share, failures = _Share(settings), 0
    while True:
        command, *given = pipe.recv()
        if command == "end":
            return
        if command == "memory":
            held = jax.devices()[0].memory_stats() or {}
            pipe.send(held.get("pool_bytes", 0) / held.get("bytes_limit", 1))
            continue
        if command == "time":
            for row in share.times():
                pipe.send(row)
        else:
            goal, latest = given
            while time.monotonic() < latest and failures < MOST_FAILURES:
                with taken.get_lock():
                    index = taken.value
                    if index >= goal:
                        break
                    taken.value += 1
                failed = share.compile(index)
                failures = 0 if failed is None else failures + 1
                if failed is not None:
                    pipe.send(failed)
        pipe.send(None)
