"""What happened to a run, told from the files that its flight recorders and its watchdogs left.

Every process of a program has a recording (its events, and what sensors said) and, after a hang, a file of stacks
beside it; a run that was out of memory has an autopsy. Side by side they say who was where, who the others waited for,
and how the machines were. All of it is also one file, `crash.json`: the trainer and the watchdog write it when they see
the end, and the next start of a run that nobody saw end does.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capibara.errors import rule_error
from capibara.observe.recorder import Recording, read_recording
from capibara.observe.sample_ring import Samples

__all__ = ["CRASH_FILE", "CrashStory", "ProcessStory", "StepSeen", "keep_crash", "read_crash_story"]

logger = logging.getLogger(__name__)

CRASH_FILE = "crash.json"
"""In a run's recordings, the story of its last crash or hang."""
_AUTOPSY = "autopsy.json"
_FORMAT = "capibara crash 1"
_FULL, _HOT = 0.95, 85.0
"""A share of memory in use, and degrees, that are told as a likely cause."""
_STEPS_KEPT, _STEPS_TOLD = 50, 5
_TOLD = ("utilization", "memory_usage", "temperature", "power", "clock")

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
_SECTION = re.compile(r"^== (?P<clock>\S+ \S+) process \d+, pid \d+: (?P<reason>.*)$", re.MULTILINE)
_MAIN = "thread 'MainThread'"
_FRAMES = 5


@dataclass(frozen=True)
class StepSeen:
    """A step that was finished. NaN and None are one here: not told."""

    step: int
    time: float
    seconds: float | None
    loss: float | None

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f", {self.seconds:.4g} s"
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        return f"step {self.step} at {_clock(self.time)[11:19]}{seconds}{loss}"


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
    steps: tuple[StepSeen, ...] = ()
    """The last ones that it finished since it was started last."""
    sample_times: tuple[float, ...] = ()
    """When its machine's sensors were asked since then."""
    sensors: Mapping[str, Mapping[str, tuple[float | None, ...]]] = field(default_factory=dict)
    """source -> metric -> a value a sample; "all" are the devices together."""

    def sensors_at(self, time: float) -> dict[str, float]:
        """What the devices together were like when a moment came: metric -> the last value told before it."""
        place = sum(when <= time for when in self.sample_times) - 1
        if place < 0:
            return {}
        together = {name: values[place] for name, values in self.sensors.get("all", {}).items() if name in _TOLD}
        return {name: value for name, value in together.items() if value is not None}

    @property
    def likely(self) -> tuple[str, ...]:
        """What the last sample says of memory and heat, where it says much."""
        told = []
        for source, metrics in self.sensors.items():
            memory, heat = (metrics.get(name, (None,))[-1] for name in ("memory_usage", "temperature"))
            if source != "all" and memory is not None and memory >= _FULL:
                ended = "; the kernel ends processes of a machine without memory (dmesg tells)"
                told.append(f"{source}'s memory was {memory:.0%} full{ended if source == 'host' else ''}")
            if source != "all" and heat is not None and heat >= _HOT:
                told.append(f"{source} was at {heat:.0f} degrees")
        return tuple(told)

    def _sensor_lines(self) -> list[str]:
        if not self.sample_times:
            return ["  no sensors were recorded"]
        span = self.sample_times[-1] - self.sample_times[0]
        lines = [f"  sensors over its last {span:.0f} s, {len(self.sample_times)} samples; now (least to most):"]
        for source, metrics in self.sensors.items():
            figures = {name: [v for v in metrics.get(name, ()) if v is not None] for name in _TOLD}
            told = [
                f"{name} {_figure(v[-1])} ({_figure(min(v))} to {_figure(max(v))})" for name, v in figures.items() if v
            ]
            if told and source != "all":
                lines.append(f"    {source}: {', '.join(told)}")
        lines += [f"  likely: {text}" for text in self.likely]
        return lines

    def _step_lines(self) -> list[str]:
        lines = []
        for step in self.steps[-_STEPS_TOLD:]:
            then = ", ".join(f"{name} {_figure(value)}" for name, value in self.sensors_at(step.time).items())
            lines.append(f"  {step}{'; ' if then else ''}{then}")
        return lines

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
    autopsy: Mapping[str, Any] | None = None
    """What lay in memory, of a run that was out of it (`capibara.memory.autopsy`)."""
    earlier_crash: str | None = None
    """The file that tells of an earlier crash of this run, where there is one."""

    @property
    def absent(self) -> tuple[int, ...]:
        """Processes without a recording in the folder."""
        there = {one.process for one in self.processes}
        return tuple(process for process in range(self.count) if process not in there)

    @property
    def last_step(self) -> int | None:
        return max((one.last_step for one in self.processes if one.last_step is not None), default=None)

    @property
    def has_steps(self) -> bool:
        """Whether any process came to a step since it was started last."""
        return any(one.steps for one in self.processes)

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
            "autopsy": self.autopsy,
            "earlier_crash": self.earlier_crash,
        }

    def save(self, file: str | os.PathLike[str]) -> Path:
        """All of it as one file, which `read_crash_story` reads again."""
        to = Path(file)
        # Processes of several hosts write it at one time, and in containers they have one number.
        draft = to.with_name(f"{to.name}.{secrets.token_hex(8)}.draft")
        text = json.dumps({"format": _FORMAT, **self.as_dict()}, indent=1, ensure_ascii=False, allow_nan=False)
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            os.replace(draft, to)
        finally:
            draft.unlink(missing_ok=True)  # of a full disk
        return to

    def __str__(self) -> str:
        many = "1 process" if self.count == 1 else f"{self.count} processes"
        step = "no step was finished" if self.last_step is None else f"the last finished step is {self.last_step}"
        lines = [f"{self.folder}: {many}; {step}"]
        if self.earlier_crash is not None:
            lines.append(f"an earlier crash of it is told by {self.earlier_crash}")
        if self.ended_in_order:
            return "\n".join([*lines, "all ended in order"])
        if self.autopsy is not None:
            lines.append(f"out of memory: {self.autopsy['error']}")
            if self.autopsy.get("nearest_change"):
                lines.append(f"  nearest change that fits: {self.autopsy['nearest_change']}")
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
            lines += one._step_lines() + one._sensor_lines()
        if self.missing:
            lines += [f"missing: {text}" for text in self.missing]
        elif len(self.processes) > 1:
            lines.append("all processes were at the same place: the devices or the network between them hung")
        return "\n".join(lines)


def read_crash_story(path: str | os.PathLike[str]) -> CrashStory:
    """The story of a run: of a process's recording and those beside it, a folder of them, a run's folder, a crash.json.

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
    if given.is_file() and given.suffix == ".json":
        return _read_crash_file(given)
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
    recordings = _read_those_that_are(files)
    # An earlier start of the program may have had more processes than the last one: nobody waited for those.
    count = max(recordings.values(), key=lambda one: one.events[-1].time if one.events else 0.0).processes
    told = {file: recording for file, recording in recordings.items() if recording.process < count}
    stories = [_process(recording, file) for file, recording in told.items()]
    crash = folder / CRASH_FILE
    return CrashStory(
        str(folder),
        count,
        tuple(sorted(stories, key=lambda one: one.process)),
        _autopsy(folder.parent / _AUTOPSY, list(told.values())),
        str(crash) if crash.is_file() else None,
    )


def _read_those_that_are(files: list[Path]) -> dict[Path, Recording]:
    """The recordings among several files: one that is damaged does not take the others' story with it."""
    found, wrong = {}, None
    for file in files:
        try:
            found[file] = read_recording(file)
        except ValueError as error:
            wrong = wrong or error
            logger.warning("%s", error)
    if not found and wrong is not None:
        raise wrong
    return found


def keep_crash(folder: str | os.PathLike[str]) -> Path | None:
    """Write a run's recordings as one file, `crash.json` beside them; None where there are none, or all ended well.

    One that tells of steps is not written over by a start that did not come to any, for want of its data for one: what
    became of that start lies in the recordings until the next.
    """
    recordings = Path(folder)
    if not any(recordings.glob("process_*.recording")):
        return None
    story = read_crash_story(recordings)
    if story.ended_in_order:
        return None
    file = recordings / CRASH_FILE
    if file.is_file() and not story.has_steps and _has_steps(file):
        logger.warning("%s stays as it is: this start came to no step", file)
        return None
    return replace(story, earlier_crash=None).save(file)


def _has_steps(file: Path) -> bool:
    try:
        return _read_crash_file(file).has_steps
    except ValueError:  # of another version, or damaged
        return False


def _read_crash_file(file: Path) -> CrashStory:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["format"] != _FORMAT:
            raise KeyError("format")
        processes = tuple(
            ProcessStory(
                **{
                    **one,
                    **{name: tuple(one[name]) for name in ("alerts", "stack", "sample_times")},
                    "steps": tuple(StepSeen(**step) for step in one["steps"]),
                    "sensors": {
                        source: {name: tuple(values) for name, values in metrics.items()}
                        for source, metrics in one["sensors"].items()
                    },
                }
            )
            for one in told["processes"]
        )
        return CrashStory(told["folder"], told["process_count"], processes, told["autopsy"], told["earlier_crash"])
    except (ValueError, LookupError, TypeError) as error:
        raise rule_error(
            f"A crash file is what capibara wrote as {CRASH_FILE}", f"{str(file)!r}: {error!r}", "name a run's folder"
        ) from error


def _autopsy(file: Path, recordings: list[Recording]) -> dict[str, Any] | None:
    """That of the last start, if there is one."""
    started = max((e.time for one in recordings for e in one.events if e.kind == "start"), default=0.0)
    try:
        if file.stat().st_mtime + 1 < started:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is being written
        return None
    return found if isinstance(found, dict) and "error" in found else None


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _by_source(samples: Samples) -> dict[str, dict[str, tuple[float | None, ...]]]:
    sources: dict[str, dict[str, tuple[float | None, ...]]] = {}
    for (source, metric), values in (samples.series or {}).items():
        sources.setdefault(source, {})[metric] = tuple(_plain(value) for value in values)
    return sources


def _process(recording: Recording, file: Path) -> ProcessStory:
    events = recording.events
    last_step = max((place for place, event in enumerate(events) if event.kind == "step"), default=-1)
    phases = [event for event in events if event.kind == "phase"]
    stacks = file.with_suffix(".stacks.txt")
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.is_file() else ""
    started = max((event.time for event in events if event.kind == "start"), default=0.0)
    reason, stack, text = _stack(text, started)
    samples = recording.samples.since(started)
    steps = [event for event in events if event.kind == "step" and event.time >= started]
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
        steps=tuple(
            StepSeen(event.step, event.time, _plain(event.seconds), _plain(event.loss))
            for event in steps[-_STEPS_KEPT:]
        ),
        sample_times=samples.times,
        sensors=_by_source(samples),
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


def _figure(value: float) -> str:
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
