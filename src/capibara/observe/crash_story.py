"""What happened to a run, told from the files that its flight recorders and its watchdogs left.

Every process of a program has a recording and, after a hang, a file of stacks beside it. Side by side they say who was
where, and who the others waited for.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capibara.errors import rule_error
from capibara.observe.recorder import Recording, read_recording

__all__ = ["CrashStory", "ProcessStory", "read_crash_story"]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
_SECTION = re.compile(r"^== (?P<clock>\S+ \S+) process \d+, pid \d+: (?P<reason>.*)$", re.MULTILINE)
_MAIN = "thread 'MainThread'"
_FRAMES = 5


@dataclass(frozen=True)
class ProcessStory:
    """Where one process was last."""

    process: int
    host: str
    pid: int
    starts: int
    last_step: int | None
    phase: str | None
    """The last phase or collective that it entered."""
    phases_since_step: int
    """How many it entered after its last step: of two processes at one step, the one with more is further."""
    last_time: float
    """When it last wrote anything."""
    ended: bool
    alerts: tuple[str, ...]
    """The last few things that it reported."""
    reason: str | None
    """Why its stacks were written down, where they were."""
    stack: tuple[str, ...]
    """Where its main thread was then, the innermost last."""
    stacks_file: str | None
    all_stacks: str
    """Those of all of its threads, as they were written down."""

    @property
    def place(self) -> tuple[int, int]:
        return (-1 if self.last_step is None else self.last_step), self.phases_since_step

    def __str__(self) -> str:
        step = "before its first step" if self.last_step is None else f"after step {self.last_step}"
        phase = "" if self.phase is None else f" in {self.phase!r}"
        return f"process {self.process} (pid {self.pid} on {self.host}) {step}{phase}"


@dataclass(frozen=True)
class CrashStory:
    """What all processes' files say together."""

    folder: str
    count: int
    """Processes that the program had."""
    processes: tuple[ProcessStory, ...]

    @property
    def absent(self) -> tuple[int, ...]:
        """Processes without a recording in the folder."""
        there = {one.process for one in self.processes}
        return tuple(process for process in range(self.count) if process not in there)

    @property
    def last_step(self) -> int | None:
        return max((one.last_step for one in self.processes if one.last_step is not None), default=None)

    @property
    def ended_in_order(self) -> bool:
        return not self.absent and all(one.ended for one in self.processes)

    @property
    def missing(self) -> tuple[str, ...]:
        """Who was not where the others were, in words."""
        told = [f"process {process} left no recording here" for process in self.absent]
        going = [one for one in self.processes if not one.ended]
        furthest = max((one.place for one in going), default=(-1, 0))
        for one in self.processes:
            if one.ended and going:
                told.append(f"{one} had ended in order while others went on")
            elif not one.ended and one.place < furthest:
                told.append(f"{one} was behind the others")
        return tuple(told)

    def as_dict(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "processes": [asdict(one) for one in self.processes],
            "process_count": self.count,
            "last_step": self.last_step,
            "ended_in_order": self.ended_in_order,
            "missing": list(self.missing),
        }

    def __str__(self) -> str:
        many = "1 process" if self.count == 1 else f"{self.count} processes"
        step = "no step was finished" if self.last_step is None else f"the last finished step is {self.last_step}"
        lines = [f"{self.folder}: {many}; {step}"]
        if self.ended_in_order:
            return "\n".join([*lines, "all ended in order"])
        for one in self.processes:
            how = "ended in order" if one.ended else "nothing says that it ended"
            started = f", started {one.starts} times" if one.starts > 1 else ""
            lines.append(f"{one}: {how}; its last sign is of {_clock(one.last_time)}{started}")
            if one.reason is not None:
                lines.append(f"  its stacks were written down: {one.reason}")
            lines += [f"  reported: {text}" for text in one.alerts]
            lines += [f"  {frame}" for frame in one.stack]
            if one.stacks_file is not None:
                lines.append(f"  all threads: {one.stacks_file}")
        if self.missing:
            lines += [f"missing: {text}" for text in self.missing]
        elif len(self.processes) > 1:
            lines.append("all processes were at the same place: the devices or the network between them hung")
        return "\n".join(lines)


def read_crash_story(path: str | os.PathLike[str]) -> CrashStory:
    """The story of a run: of a process's recording and those beside it, of a folder of them, or of a run's folder.

    Examples:
        >>> import tempfile
        >>> from capibara.observe import Recorder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     recorder = Recorder(folder, process=0, processes=2)
        ...     recorder.step(7)
        ...     recorder.phase("all-reduce of gradients")
        ...     story = read_crash_story(recorder.file)
        >>> story.last_step, story.processes[0].phase, story.missing
        (7, 'all-reduce of gradients', ('process 1 left no recording here',))
    """
    given = Path(path)
    folder = given.parent if given.is_file() else given
    if not given.is_file() and (given / "recordings").is_dir():
        folder = given / "recordings"
    files = sorted(folder.glob("process_*.recording"))
    if given.is_file() and given not in files:
        files = [given]  # under another name: it is read, or says that it is none
    if not files:
        raise rule_error(
            "A story is told from process_0.recording and its like",
            f"{os.fspath(path)!r}, where there is none",
            "name a run's folder, such as runs/dev, or a file in its recordings",
        )
    recordings = [read_recording(file) for file in files]
    # An earlier start of the program may have had more processes than the last one: nobody waited for those.
    count = max(recordings, key=lambda one: one.events[-1].time if one.events else 0.0).processes
    told = [(recording, file) for recording, file in zip(recordings, files, strict=True) if recording.process < count]
    stories = [_process(recording, file) for recording, file in told]
    return CrashStory(str(folder), count, tuple(sorted(stories, key=lambda one: one.process)))


def _process(recording: Recording, file: Path) -> ProcessStory:
    events = recording.events
    last_step = max((place for place, event in enumerate(events) if event.kind == "step"), default=-1)
    phases = [event for event in events if event.kind == "phase"]
    stacks = file.with_suffix(".stacks.txt")
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.is_file() else ""
    started = max((event.time for event in events if event.kind == "start"), default=0.0)
    reason, stack, text = _stack(text, started)
    return ProcessStory(
        process=recording.process,
        host=recording.host,
        pid=events[-1].pid if events else 0,
        starts=sum(event.kind == "start" for event in events),
        last_step=recording.last_step,
        phase=phases[-1].text if phases else None,
        phases_since_step=sum(event.kind == "phase" for event in events[last_step + 1 :]),
        last_time=events[-1].time if events else 0.0,
        ended=recording.ended,
        # The one about the stacks is their reason, cut to a record's length.
        alerts=tuple(e.text for e in events if e.kind == "alert" and not e.text.startswith("stacks in "))[-3:],
        reason=reason,
        stack=stack,
        stacks_file=str(stacks) if text else None,
        all_stacks=text,
    )


def _stack(text: str, started: float) -> tuple[str | None, tuple[str, ...], str]:
    """Of the last dump since the process started: its reason, the innermost frames of its main thread, all of it."""
    sections = list(_SECTION.finditer(text))
    if not sections:
        # Only Python's own backstop wrote, when the process hung with its lock held; the innermost frame is its first.
        frames = _frames(text.partition("most recent call first")[2].partition("\n\n")[0])
        return ("Python's own timeout" if text.strip() else None), tuple(reversed(frames[:_FRAMES])), text
    last = sections[-1]
    if datetime.fromisoformat(f"{last['clock']}+00:00").timestamp() + 1 < started:
        return None, (), ""  # of an earlier start: what it waited for is over
    body = text[last.end() :]
    main = body.partition(_MAIN)[2].partition("\n\n")[0]
    frames = _frames(main or body.partition("\n\n")[0])
    return last["reason"], tuple(frames[-_FRAMES:]), text[last.start() :]


def _frames(text: str) -> list[str]:
    return [f"{found['file']}:{found['line']} in {found['name']}" for found in _FRAME.finditer(text)]


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
