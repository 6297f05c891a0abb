"""DIR/run.json: what a run knows only while it runs, kept for its report.

The file has an entry a process that worked on the run, as a run may be resumed on other devices: where it was laid
out, which kernels the compiled step has, its memory, what was predicted. It is written when a process has compiled its
step, and again when it ends well.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.train.loop import Loop

__all__ = ["Life", "begin_life", "end_life", "host_peak_bytes", "peak_bytes", "read_lives"]

_FILE = "run.json"


@dataclass(frozen=True)
class Life:
    """One process's part of a run."""

    date: str
    step: int
    """The step that it went on after; 0 for a new run."""
    devices: int
    device_kind: str
    platform: str
    processes: int
    mesh: Mapping[str, int]
    layout: str
    choices: Mapping[str, Any]
    where: str
    """The slice that the layout was planned for."""
    simulated: bool
    """The devices are a CPU's, and stand for those of `where`."""
    parameters: int
    compile_seconds: float
    memory: Mapping[str, int] | None
    """Of the compiled step on one device, in bytes, where the compiler says it."""
    predicted: Mapping[str, Any] | None
    """Seconds (with low and high) and bytes of a step, where the planner had something to plan."""
    kernels: Sequence[Mapping[str, Any]]
    """Op, implementation, why, and how many calls of the step's trace."""
    versions: Mapping[str, str]
    command: Sequence[str] = field(default_factory=list)
    ended: Mapping[str, Any] = field(default_factory=dict)
    """Step, loss on the held-out part, peak bytes and a sample of text; empty for a process that was killed."""


def begin_life(folder: Path, loop: Loop, parameters: int) -> Life:
    """Write down what is known once the step is compiled and the state is there."""
    from capibara.kernels.lab.bench import versions
    from capibara.processes import process_count

    chosen, first = loop.compiled.chosen, loop.devices[0]
    estimate = chosen.estimate
    life = Life(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        step=loop.step,
        devices=len(loop.devices),
        device_kind=first.device_kind,
        platform=first.platform,
        processes=process_count(),
        mesh=dict(chosen.layout.mesh.axes),
        layout=chosen.layout.name,
        choices=dict(chosen.layout.choices),
        where=chosen.where.name if not chosen.simulated else f"{len(loop.devices)} x {chosen.where.chip.name}",
        simulated=chosen.simulated,
        parameters=parameters,
        compile_seconds=loop.compiled.seconds,
        memory=_compiled_memory(loop),
        predicted=None
        if estimate is None
        else {
            "seconds": estimate.seconds,
            "low": estimate.low,
            "high": estimate.high,
            "bytes": estimate.memory.total,
            "bound": estimate.bound,
        },
        kernels=_kernels(loop.compiled.decisions),
        versions=versions(),
        command=list(sys.argv),
    )
    _write(folder, [*read_lives(folder), life])
    return life


def end_life(folder: Path, **ended: Any) -> None:
    """Add to the last entry what is known at the end; what is None is not."""
    lives = read_lives(folder)
    known = {name: value for name, value in ended.items() if value is not None}
    if lives:
        last = lives[-1]
        _write(folder, [*lives[:-1], Life(**{**_fields(last), "ended": {**last.ended, **known}})])


def read_lives(folder: Path) -> list[Life]:
    """The processes that worked on the run, in order; none where it was made before there was a run.json."""
    file = folder / _FILE
    if not file.is_file():
        return []
    known = Life.__dataclass_fields__
    entries = json.loads(file.read_text(encoding="utf-8"))["processes"]
    return [Life(**{key: value for key, value in entry.items() if key in known}) for entry in entries]


def _fields(life: Life) -> dict[str, Any]:
    return {name: getattr(life, name) for name in Life.__dataclass_fields__}


def _write(folder: Path, lives: Sequence[Life]) -> None:
    draft = folder / f"{_FILE}.draft"
    draft.write_text(json.dumps({"processes": [asdict(life) for life in lives]}, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, folder / _FILE)


def _kernels(decisions: Sequence[Any]) -> list[dict[str, Any]]:
    """Each op with what took it and why; calls of one op that were decided alike are one entry."""
    entries: dict[tuple[str, str, str], dict[str, Any]] = {}
    for decision in decisions:
        if not hasattr(decision, "call"):
            continue  # a note that is no op's selection
        key = (decision.call.op.name, decision.implementation, decision.why)
        entry = entries.setdefault(key, {"op": key[0], "implementation": key[1], "why": key[2], "calls": 0})
        entry["calls"] += 1
    return list(entries.values())


def _compiled_memory(loop: Loop) -> dict[str, int] | None:
    stats = loop.compiled.memory_analysis()
    if stats is None:
        return None
    names = {
        "arguments": "argument_size_in_bytes",
        "outputs": "output_size_in_bytes",
        "temporaries": "temp_size_in_bytes",
        "shared": "alias_size_in_bytes",
    }
    return {name: int(getattr(stats, attribute)) for name, attribute in names.items()}


def peak_bytes(devices: Sequence[Any]) -> int | None:
    """The most that any of this process's devices had in use so far; None where the platform does not count."""
    peaks = []
    for device in devices:
        stats = device.memory_stats() if device.process_index == devices[0].process_index else None
        if stats and "peak_bytes_in_use" in stats:
            peaks.append(int(stats["peak_bytes_in_use"]))
    return max(peaks, default=None)


def host_peak_bytes() -> int | None:
    """The most memory that this process had; None where the system does not say."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
