"""The watchdog: a run that makes no progress is written down, the process that is missing is named, and it is ended.

Each process beats at every phase of its loop; the beats are small files in a folder that all of them see. A process
without a beat for its time limit leaves a notice there; every watchdog that is still alive then writes down the stacks
of its process, all of it becomes one file, crash.json, and all end with exit code 43, so that the supervisor starts
them again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from capibara.errors import rule_error
from capibara.observe.crash_story import keep_crash
from capibara.observe.recorder import Recorder
from capibara.train.exit_codes import HUNG

__all__ = ["Beat", "Watchdog", "missing"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """Where a process is."""

    process: int
    pid: int
    host: str
    step: int
    phase: str
    beats: int
    """Beats at this step: of two processes at one step, the one with more is further."""
    progress: float
    """When it last beat."""
    alive: float
    """When its watchdog last looked: a loop may hang while the process lives."""
    dumped: bool = False
    ended: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.beats

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host}) at step {self.step} in {self.phase!r}"


def _heartbeat(folder: Path, process: int) -> Path:
    return folder / f"heartbeat_{process}.json"


def _read(path: Path) -> Beat | None:
    try:
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _write(path: Path, data: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(data), encoding="utf-8")
    os.replace(draft, path)


def missing(beats: dict[int, Beat | None], dead_after: float, now: float | None = None) -> list[str]:
    """Who is not where the others are, in words: absent, dead, or behind. Empty: all are at the same place."""
    now = time.time() if now is None else now
    told = []
    running = [beat for beat in beats.values() if beat is not None and not beat.ended]
    furthest = max((beat.place for beat in running), default=(0, 0))
    for process, beat in sorted(beats.items()):
        if beat is None:
            told.append(f"process {process} never gave a sign")
        elif beat.ended:
            told.append(f"{beat} ended")
        elif now - beat.alive > dead_after:
            told.append(f"{beat} is dead or stopped: no sign for {now - beat.alive:.0f} s")
        elif beat.place < furthest:
            told.append(f"{beat} is behind the others, without progress for {now - beat.progress:.0f} s")
    return told


class Watchdog:
    """Watches the loop of this process, and where the others are; a context manager.

    Args:
      folder: that every process of the program sees. What an earlier start of the program left in it is not heeded.
      timeout: seconds without a beat that are a hang.
      process: this one's number, of `processes`.
      recorder: whose files the stacks go to; without one they go into `folder`.
      grace: seconds that the others get to write down their stacks before this process ends.
      on_hang: called with the text instead of ending the process.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Watchdog(folder, timeout=60) as watchdog:
        ...     watchdog.beat(1, "data")
        ...     watchdog.beat(1, "step")
        ...     watchdog.where()[0].place
        (1, 2)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        timeout: float,
        process: int = 0,
        processes: int = 1,
        *,
        recorder: Recorder | None = None,
        grace: float = 5.0,
        on_hang: Callable[[str], None] | None = None,
    ) -> None:
        if not timeout > 0:
            raise rule_error("timeout is more than 0 seconds", f"{timeout!r}", "leave the watchdog out for none")
        self.folder = Path(folder)
        self.timeout = timeout
        self.process = process
        self.processes = processes
        self._own_recorder = recorder is None
        self.recorder = recorder or Recorder(self.folder, process, processes)
        self.grace = grace
        self._on_hang = on_hang
        self._interval = min(1.0, timeout / 4)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._step, self._beats, self._phase = 0, 0, "start"
        self._progress = time.time()
        self._limit = timeout
        self._started = time.time()
        self._dumped = False
        self._backstop: Any = None

    @property
    def _notice(self) -> Path:
        return self.folder / "hang.json"

    def beat(self, step: int, phase: str = "step", allow: float | None = None) -> None:
        """The loop is here now. It is a few assignments; the file follows within a second.

        Args:
          phase: what begins.
          allow: seconds that this phase may take, where it is not `timeout`: a first step compiles.
        """
        with self._lock:
            self._beats = self._beats + 1 if step == self._step else 1
            self._step, self._phase = step, phase
            self._progress = time.time()
            self._limit = self.timeout if allow is None else allow

    def _publish(self, ended: bool = False) -> None:
        with self._lock:
            beat = Beat(
                self.process, os.getpid(), socket.gethostname(), self._step, self._phase, self._beats, self._progress,
                time.time(), self._dumped, ended,
            )  # fmt: skip
        _write(_heartbeat(self.folder, self.process), vars(beat))

    def where(self) -> dict[int, Beat | None]:
        """Where every process is, by its last beat."""
        self._publish()
        beats = {process: _read(_heartbeat(self.folder, process)) for process in range(self.processes)}
        # A live process writes every second, so that what is older than this start is of an earlier one.
        return {p: beat if beat is not None and beat.alive >= self._started else None for p, beat in beats.items()}

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._look()
            except Exception:
                # The loop is well; what watches it is not, and says so each time.
                logger.exception("the watchdog of process %d could not look", self.process)

    def _look(self) -> None:
        self._publish()
        with self._lock:
            silent, limit = time.time() - self._progress, self._limit
        if self._backstop is not None:
            # A loop that hangs in C code with Python's lock keeps this thread from running. This one needs no lock.
            faulthandler.dump_traceback_later(limit + self.grace + 4 * self._interval, file=self._backstop, exit=True)
        notice = self._read_notice()
        if silent > limit or notice:
            self._hang(notice or f"process {self.process} made no progress for {silent:.1f} s")

    def _read_notice(self) -> str:
        try:
            notice = json.loads(self._notice.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ""
        # One of an earlier start of the program says nothing about this one.
        return str(notice["text"]) if notice["time"] >= self._started else ""

    def _hang(self, why: str) -> None:
        beats = self.where()
        gone = missing(beats, dead_after=max(3.0, 4 * self._interval))
        with self._lock:
            here = f"this process is at step {self._step} in {self._phase!r}"
        who = "; ".join(gone) or "all processes are at the same place: the devices or the network between them hang"
        text = f"{why}; {here}. Missing: {who}"
        if not self._read_notice():
            _write(self._notice, {"text": why, "time": time.time(), "process": self.process})
        self.recorder.dump_stacks(text)
        logger.error("no progress: %s; stacks are in %s", text, self.recorder.stacks_file)
        with self._lock:
            self._dumped = True
        if self._on_hang is not None:
            self._keep_crash()
            self._on_hang(text)
            self._stop.set()
            return
        deadline = time.time() + self.grace
        while time.time() < deadline and not self._all_dumped():
            time.sleep(self._interval / 2)
        self._keep_crash()
        # Not sys.exit: the main thread does not come to it, and exit handlers may wait for the devices.
        os._exit(HUNG)

    def _keep_crash(self) -> None:
        """All processes' files as one. Each does it, and the last one has them all."""
        try:
            keep_crash(self.recorder.folder)
        except Exception:  # whatever it is: a process that hangs is ended
            logger.exception(
                "the story of the hang could not be written; the recordings are in %s", self.recorder.folder
            )

    def _all_dumped(self) -> bool:
        now, dead_after = time.time(), max(3.0, 4 * self._interval)
        return all(
            beat is None or beat.dumped or beat.ended or now - beat.alive > dead_after for beat in self.where().values()
        )

    def __enter__(self) -> Watchdog:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._progress = self._started = time.time()
        self._publish()
        self._backstop = open(self.recorder.stacks_file, "a", encoding="utf-8")
        self._thread = threading.Thread(target=self._watch, name="capibara-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._backstop is not None:
            self._backstop.close()
        self._publish(ended=True)
        if self._own_recorder:
            self.recorder.close()
