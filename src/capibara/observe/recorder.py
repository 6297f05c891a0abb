"""The flight recorder: the last few thousand things a process did, in a file that is whole when the process is killed.

The file is a ring of records in shared memory-mapped pages: writing one is a copy of 256 bytes and no call to the
system, and what was written belongs to the file even after kill -9 (not after a loss of power). Each record has a
checksum, so that one that was being written at that moment is left out and not misread. Behind the events lies a ring
of what sensors said (`capibara.observe.sample_ring`).
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from capibara.errors import rule_error, unknown_name
from capibara.observe.sample_ring import SampleRing, Samples, read_samples, ring_rows

__all__ = ["KINDS", "Event", "Recorder", "Recording", "format_stacks", "read_recording"]

KINDS = ("start", "step", "phase", "alert", "end")
"""What happened: a process began, finished a step, entered a phase or collective, has an alert, ended in order."""

RECORD = 256
_MAGIC = b"CAPIREC1"
_HEADER = struct.Struct("<8sIII64s")  # magic, capacity, process, processes, host
_FIELDS = struct.Struct("<QdBqddI")  # number, time, kind, step, seconds, loss, process id
_TAIL = struct.Struct("<HI")  # length of the text, CRC-32
_TEXT = RECORD - _FIELDS.size - _TAIL.size
_NO_STEP = -1


@dataclass(frozen=True)
class Event:
    """A record. `seconds` and `loss` are NaN where the event has none, `step` is -1."""

    number: int
    time: float
    kind: str
    step: int
    seconds: float
    loss: float
    pid: int
    text: str

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        parts = [f"{clock}  {self.kind:<5}"]
        if self.step != _NO_STEP:
            parts.append(f"step {self.step}")
        if self.seconds == self.seconds:
            parts.append(f"{self.seconds:.4g} s")
        if self.loss == self.loss:
            parts.append(f"loss {self.loss:.6g}")
        return " ".join([*parts, self.text]).rstrip()


class Recorder:
    """Writes one process's recording: `process_0.recording` in the folder. A restarted process goes on in it.

    Args:
      folder: of this machine, as a mapped file must be.
      process: this process's number, of `processes`; they name the file.
      capacity: how many events are kept.
      samples: how many samples of sensors are kept, which `TpuRealTimeMonitor(recorder=...)` writes: the last ten
        minutes of one a second.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Recorder(folder) as recorder:
        ...     recorder.phase("all-reduce of gradients")
        ...     recorder.step(1, seconds=0.25, loss=2.5)
        ...     recording = read_recording(recorder.file)
        >>> [(event.kind, event.text, event.step) for event in recording.events]
        [('start', '', -1), ('phase', 'all-reduce of gradients', -1), ('step', '', 1)]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        process: int = 0,
        processes: int = 1,
        capacity: int = 4096,
        samples: int = 600,
    ) -> None:
        if capacity < 2:
            raise rule_error("A recorder keeps at least 2 events", f"capacity={capacity}", "leave it out for 4096")
        if samples < 1:
            raise rule_error("A recorder keeps at least 1 sample", f"samples={samples}", "leave it out for 600")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / f"process_{process}.recording"
        self.stacks_file = self.folder / f"process_{process}.stacks.txt"
        self.process = process
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._number = 0
        self._last_phase = ""
        capacity, samples = self._go_on(capacity, samples)
        events = RECORD * (capacity + 1)
        size = events + SampleRing.size(samples)
        self._capacity = capacity
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # All of it now: a mapped page that the disk has no room for kills the process when it is written.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.truncate(descriptor, size)
            self._map: mmap.mmap | None = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        host = socket.gethostname().encode()[:64]
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, capacity, process, processes, host)
        self._samples = SampleRing(self._map, events, samples)
        self._write("start")

    def _go_on(self, capacity: int, samples: int) -> tuple[int, int]:
        """Take up the recording of the process before this one; what is no recording is put aside."""
        if not self.file.exists():
            return capacity, samples
        try:
            earlier = read_recording(self.file)
            whole = earlier.capacity >= 2 and self.file.stat().st_size >= RECORD * (earlier.capacity + 1)
        except ValueError:
            whole = False
        if not whole:
            os.replace(self.file, self.file.with_suffix(".damaged"))
            return capacity, samples
        self._number = max((event.number for event in earlier.events), default=-1) + 1
        return earlier.capacity, earlier.sample_capacity or samples

    def _write(
        self, kind: str, text: str = "", step: int = _NO_STEP, seconds: float = float("nan"), loss: float = float("nan")
    ) -> None:
        said = text.encode()
        if len(said) > _TEXT:
            said = said[: _TEXT - 3].decode(errors="ignore").encode() + b"..."
        with self._lock:
            if self._map is None:
                return
            fields = _FIELDS.pack(self._number, time.time(), KINDS.index(kind), step, seconds, loss, self._pid)
            body = fields + said.ljust(_TEXT, b"\0")
            record = body + _TAIL.pack(len(said), zlib.crc32(body))
            at = RECORD * (1 + self._number % self._capacity)
            self._map[at : at + RECORD] = record
            self._number += 1

    def step(self, step: int, seconds: float = float("nan"), loss: float = float("nan")) -> None:
        """A step that is done."""
        self._write("step", "", step, seconds, loss)

    def phase(self, name: str, step: int = _NO_STEP) -> None:
        """What begins now: the name of a phase, or of a collective that all processes must come to."""
        self._last_phase = name
        self._write("phase", name, step)

    @property
    def last_phase(self) -> str:
        return self._last_phase

    def alert(self, text: str, step: int = _NO_STEP) -> None:
        self._write("alert", text, step)

    def event(self, kind: str, text: str = "", step: int = _NO_STEP) -> None:
        if kind not in KINDS:
            raise unknown_name("kind of event", kind, KINDS)
        self._write(kind, text, step)

    def sensors(self, figures: Mapping[tuple[str, str], float], time: float) -> None:
        """What sensors said at a moment: (source, metric) -> value."""
        with self._lock:
            if self._map is not None:
                self._samples.append(time, self._pid, figures)

    def dump_stacks(self, reason: str) -> Path:
        """The Python stack of every thread, added to `process_0.stacks.txt`; that file."""
        clock = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        with open(self.stacks_file, "a", encoding="utf-8") as file:
            file.write(f"== {clock} process {self.process}, pid {self._pid}: {reason}\n{format_stacks()}\n")
            file.flush()
            os.fsync(file.fileno())
        self.alert(f"stacks in {self.stacks_file.name}: {reason}")
        return self.stacks_file

    def close(self, in_order: bool = True) -> None:
        """Say that the process ended in order; without this, or with False, the story says that it was cut off."""
        if in_order:
            self._write("end")
        with self._lock:
            if self._map is not None:
                self._map.close()
                self._map = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.alert(f"ended by {type(error).__name__}: {error}")
        self.close(in_order=error is None)


def format_stacks() -> str:
    """The Python stack of each thread of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        stack = "".join(traceback.format_stack(frame))
        texts.append(f"thread {names.get(ident, 'of C code')!r} ({ident}):\n{stack}")
    return "\n".join(texts)


@dataclass(frozen=True)
class Recording:
    """What a recorder wrote, in order."""

    process: int
    processes: int
    host: str
    capacity: int
    events: tuple[Event, ...]
    samples: Samples = field(default_factory=Samples)
    """What sensors said."""
    sample_capacity: int | None = None
    """How many samples it has room for; None in one from before there were any, or whose ring is damaged."""

    @property
    def last_step(self) -> int | None:
        return next((event.step for event in reversed(self.events) if event.kind == "step"), None)

    @property
    def ended(self) -> bool:
        """Whether the last process ended in order."""
        return bool(self.events) and self.events[-1].kind == "end"

    def story(self, last: int = 20) -> str:
        """In words: how it ended, and the last events."""
        lines = [f"process {self.process} of {self.processes} on {self.host}: {len(self.events)} events"]
        starts = sum(event.kind == "start" for event in self.events)
        if starts > 1:
            lines.append(f"it was started {starts} times")
        if self.last_step is not None:
            lines.append(f"its last finished step is {self.last_step}")
        lines.append("it ended in order" if self.ended else "it was cut off: nothing says that it ended")
        phase = next((event for event in reversed(self.events) if event.kind == "phase"), None)
        if phase is not None and not self.ended:
            lines.append(f"the last phase that it entered is {phase.text!r}")
        return "\n".join([*lines, *(f"  {event}" for event in self.events[-last:])])


def _events(data: bytes, capacity: int) -> Iterator[Event]:
    for place in range(1, capacity + 1):
        record = data[place * RECORD : (place + 1) * RECORD]
        if len(record) < RECORD:
            return
        body = record[: -_TAIL.size]
        size, crc = _TAIL.unpack(record[-_TAIL.size :])
        if zlib.crc32(body) != crc or body == b"\0" * len(body):
            continue  # never written, or the one that was being written
        number, when, kind, step, seconds, loss, pid = _FIELDS.unpack(body[: _FIELDS.size])
        if kind >= len(KINDS):
            continue  # of a later version
        text = body[_FIELDS.size : _FIELDS.size + size].decode(errors="replace")
        yield Event(number, when, KINDS[kind], step, seconds, loss, pid, text)


def read_recording(file: str | os.PathLike[str]) -> Recording:
    """The recording in a file; of a running process too."""
    data = Path(file).read_bytes()
    if len(data) < RECORD or data[: len(_MAGIC)] != _MAGIC:
        raise rule_error(
            "A recording is a file that a Recorder wrote", f"{os.fspath(file)!r}, which is none", "name another file"
        )
    _, capacity, process, processes, host = _HEADER.unpack(data[: _HEADER.size])
    events = sorted(_events(data, capacity), key=lambda event: event.number)
    ring = data[RECORD * (capacity + 1) :]
    return Recording(
        process,
        processes,
        host.rstrip(b"\0").decode(errors="replace"),
        capacity,
        tuple(events),
        read_samples(ring),
        ring_rows(ring),
    )
