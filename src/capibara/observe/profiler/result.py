"""What was learnt of a stretch of a program: its programs, its operations, its figures; and the file it is kept in."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.errors import rule_error

__all__ = ["OpRow", "OpTimes", "Profile", "ProgramRow", "last_profile", "read_profile"]

_FORMAT = "capibara-profile"
_VERSION = 1
GB = 1e9

_last: list[Profile] = []


@dataclass(frozen=True)
class ProgramRow:
    """One compiled program that ran. Work is that of all its runs on all devices."""

    name: str
    runs: int
    devices: int
    flops: float
    matrix_flops: float
    bytes: float
    peak_bytes: float
    """Of one device: arguments, results, temporaries."""


@dataclass(frozen=True)
class OpRow:
    """One instruction of one program, over all its runs on one device: the mean of the devices.

    `seconds` and what follows from it are None where no trace was taken.
    """

    program: str
    op: str
    kind: str
    source: str
    """jax's name stack: where in the user's program it comes from."""
    count: float
    """How often it ran on a device."""
    flops: float
    matrix_flops: float
    bytes: float
    dtype: str
    bound: str
    """What its time is bound by at best on this chip: "compute", "vector", "memory"; "links" for a collective."""
    least_seconds: float
    """What its work takes at the chip's peaks: the roofline."""
    runs: int = 0
    """Of its program."""
    seconds: float | None = None
    best_seconds: float | None = None
    """Of one run of it: the tenth percentile."""
    median_seconds: float | None = None
    written_dtype: str = ""
    products: tuple[tuple[int, int, int, int], ...] = ()
    """(batch, m, n, k) of the matrix products in it."""

    @property
    def steady_seconds(self) -> float:
        """All its runs at their median: without what a busy machine did to a few of them."""
        return (self.median_seconds or 0.0) * self.count

    @property
    def roofline(self) -> float | None:
        """The share of the chip's peak, of whatever bounds it, that it reaches; None where its time is not known."""
        return None if not self.seconds else self.least_seconds / self.seconds


@dataclass(frozen=True)
class OpTimes:
    """One operation over repeats of the whole program: what `capibara profile --against` compares."""

    program: str
    op: str
    """jax's name stack, or the instruction without its number where it has none."""
    seconds: tuple[float, ...]
    """Of one run of its program, a figure a repeat: the tenth percentile of the runs in it."""


@dataclass(frozen=True)
class Profile:
    """A stretch of a program.

    Figures of time and work are those of one chip (a mean over them) unless they say total.
    """

    name: str
    mode: str
    """ "counting" or "tracing"."""
    wall_seconds: float
    """From entering to leaving, with the results waited for."""
    seconds: float
    """What rates are of. Counting: from the first call to the last result, less compiling that the device waited for.
    Tracing: the time in which the device ran something."""
    compile_seconds: float
    platform: str
    device_kind: str
    chips: int
    peak_flops: Mapping[str, float]
    """Of one chip, by dtype, as `Chip.product_flops` has it."""
    memory_bandwidth: float
    launch_seconds: float
    programs: tuple[ProgramRow, ...]
    ops: tuple[OpRow, ...]
    compilations: Mapping[str, int]
    """Function, with the file and line that it is at where jax knows -> programs compiled for it inside."""
    host_arguments: int
    """Calls that were handed an array of the host."""
    peak_memory_bytes: float
    memory_source: str
    captures: tuple[str, ...] = ("memory", "flops")
    busy_seconds: float | None = None
    communication_seconds: float | None = None
    """In collectives, by the trace; what of it ran beside other work is part of it."""
    exposed_communication_seconds: float | None = None
    """In collectives while nothing else ran."""
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    """Tracing: what the host did: dispatch, fetch, send, compile, wait; "outside_while_idle": time in which the device
    had nothing to do and the host was not in jax."""
    host_counts: Mapping[str, int] = field(default_factory=dict)
    """Tracing: how often the host did each."""
    dispatch_median_seconds: float | None = None
    """Tracing: what one call of a jitted function takes the host."""
    idle_seconds: float | None = None
    trace_file: str | None = None
    """For Perfetto (https://ui.perfetto.dev)."""
    xplane_file: str | None = None
    """For XProf and TensorBoard."""
    notes: tuple[str, ...] = ()
    repeats: int = 0
    """How often the whole program was run and profiled after a first time that did not count; 0: once, cold."""
    op_times: tuple[OpTimes, ...] = ()
    """With repeats: what each operation took in each of them; all else here is of the last."""
    window: Mapping[str, float] = field(default_factory=dict)
    """How the seconds of counting came about: from entering to the first call ("before_first_call"), from there to the
    last result ("seconds"), without the compiling that the device waited for ("waited_for_compiling"); how long after
    the body the last result came ("after_body"), and what it took to know that, which is left out ("finding_out", in
    which "idle_flush" is what a device's empty queue takes to say so)."""

    @property
    def total_flops(self) -> float:
        """Of all programs, runs and devices."""
        return sum(program.flops for program in self.programs)

    @property
    def runs(self) -> int:
        """How many times any program ran."""
        return sum(program.runs for program in self.programs)

    @property
    def tflops(self) -> float:
        """Reached by one chip, in 10^12 a second."""
        return _rate(self.total_flops, self.seconds * self.chips) / 1e12

    @property
    def compute_efficiency(self) -> float:
        """The time that the products take at the peak of their types, as a share of the time there was."""
        return _rate(
            sum(op.matrix_flops / self.peak_flops.get(op.dtype, self.peak_flops["bfloat16"]) for op in self.ops),
            self.seconds,
        )

    @property
    def memory_efficiency(self) -> float:
        """Bytes read and written a second, as a share of the memory's bandwidth. Caches may make it more than 1."""
        return _rate(sum(op.bytes for op in self.ops), self.seconds * self.memory_bandwidth)

    def metrics(self) -> dict[str, Any]:
        """The figures by their documented names; what was not captured is nan."""
        flops, memory = "flops" in self.captures, "memory" in self.captures
        communication = self.communication_seconds if "communication" in self.captures else None
        return {
            "tflops": self.tflops if flops else math.nan,
            "total_flops": self.total_flops if flops else math.nan,
            "compute_efficiency": self.compute_efficiency if flops else math.nan,
            "peak_memory_gb": self.peak_memory_bytes / GB if memory else math.nan,
            "memory_efficiency": self.memory_efficiency if memory else math.nan,
            "comm_overhead_ms": math.nan if communication is None else communication * 1e3,
            "seconds": self.seconds,
            "runs": self.runs,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; nan is None there."""
        shown = {key: None if isinstance(x, float) and math.isnan(x) else x for key, x in self.metrics().items()}
        return {"format": _FORMAT, "version": _VERSION, "metrics": shown, **dataclasses.asdict(self)}

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def read_profile(file: Path) -> Profile:
    """A profile that was kept: `Profile.save`, or `capibara profile --json > FILE`."""
    rule = "A profile is the JSON that `capibara profile --json` writes, whole"
    fix = "profile again and keep its output"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise rule_error(rule, f"{str(file)!r} ({problem.strerror})", "name a file that is there") from problem
    except ValueError as problem:
        raise rule_error(rule, f"{str(file)!r}, cut short or no JSON ({problem})", fix) from problem
    if isinstance(document, dict) and "profile" in document:
        document = document["profile"]
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise rule_error(rule, f"{str(file)!r}, which is another document", fix)
    if document.get("version") != _VERSION:
        raise rule_error(f"Profiles are of version {_VERSION}", f"version {document.get('version')!r}", fix)
    names = {one.name for one in dataclasses.fields(Profile)}
    values = {key: value for key, value in document.items() if key in names}
    try:
        values["programs"] = tuple(ProgramRow(**row) for row in values["programs"])
        values["ops"] = tuple(OpRow(**{**row, "products": tuple(map(tuple, row["products"]))}) for row in values["ops"])
        values["op_times"] = tuple(
            OpTimes(row["program"], row["op"], tuple(row["seconds"])) for row in values.get("op_times", ())
        )
        for key in ("captures", "notes"):
            values[key] = tuple(values[key])
        return Profile(**values)
    except (KeyError, TypeError) as problem:
        raise rule_error(rule, f"{str(file)!r}, in which something is missing ({problem})", fix) from problem


def keep_last(profile: Profile) -> None:
    """Remember it as this process's last."""
    _last[:] = [profile]


def last_profile() -> Profile | None:
    """The profile that this process finished last; None when there was none."""
    return _last[-1] if _last else None
