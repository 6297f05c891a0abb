"""What ran on the devices, and for how long, as the runtime wrote it down: jax's trace, read back.

A trace session leaves two files: `*.xplane.pb`, which XProf opens and `jax.profiler.ProfileData` reads, and
`*.trace.json.gz`, which Perfetto opens. On a CPU and on a TPU every row names its instruction and program; on a GPU the
rows of a command buffer (a CUDA graph) name their kernel alone, or the buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.errors import rule_error

__all__ = ["Interval", "Row", "TraceReading", "merged", "overlap", "read_trace", "union_seconds"]

Interval = tuple[float, float]
"""Start and end, in seconds from the start of the trace."""

# Rows that stand for others: a loop's row contains those of its body.
_CONTAINERS = ("while", "call", "conditional")
_DISPATCH = ("PjitFunction(", "ExecuteReplicated")
_FETCH = ("np.asarray(jax.Array)", "__array__")
_SEND = ("DevicePutWithSharding", "batched_device_put", "shard_args")
_COMPILE = ("backend_compile", "lower_sharding_computation", "trace_to_jaxpr")
_WAIT = ("Await", "BlockHostUntilReady", "block_until_ready")
_HOST_SPANS = {"dispatch": _DISPATCH, "fetch": _FETCH, "send": _SEND, "compile": _COMPILE, "wait": _WAIT}


@dataclass(frozen=True)
class Row:
    """One run of one instruction, or of one kernel."""

    device: str
    program_id: int
    module: str
    op: str
    kernel: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass
class TraceReading:
    """What a trace says."""

    rows: list[Row]
    host: dict[str, list[Interval]] = field(default_factory=dict)
    """What the host did in jax: "dispatch", "fetch", "send", "compile", "wait"."""
    kernel_rows_only: int = 0
    """Rows of a device that name no instruction: those of GPU command buffers."""

    def devices(self) -> dict[str, list[Row]]:
        """The rows of each device."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.device, []).append(row)
        return found


def read_trace(file: Path) -> TraceReading:
    """Read an `.xplane.pb`."""
    import jax

    try:
        data = jax.profiler.ProfileData.from_file(str(file))
        with warnings.catch_warnings():
            # jax's bindings make their types at the first read, and Python finds fault with how.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _read(data)
    except (RuntimeError, ValueError, OSError) as problem:
        raise rule_error(
            "A trace is the .xplane.pb that a profiler wrote, whole",
            f"{str(file)!r} ({str(problem).splitlines()[0]})",
            "profile again",
        ) from problem


def _read(data: Any) -> TraceReading:
    reading = TraceReading([], {name: [] for name in _HOST_SPANS})
    for plane in data.planes:
        on_device = plane.name.startswith("/device:") and "CUSTOM" not in plane.name
        if not on_device and plane.name != "/host:CPU":
            continue
        lines = list(plane.lines)
        # A TPU's plane has a line of instructions beside those of steps and programs, which contain them.
        named = [line for line in lines if line.name == "XLA Ops"]
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in (named or streams or lines) if on_device else lines:
            for event in line.events:
                stats = dict(event.stats) if on_device or not event.name.startswith("Threadpool") else {}
                start, end = event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9
                op = str(stats.get("hlo_op", ""))
                if op or on_device:
                    _add_row(reading, plane.name, event.name, stats, op, start, end, bool(named))
                else:
                    _add_host(reading, event.name, (start, end))
    return reading


def _add_row(
    reading: TraceReading, plane: str, name: str, stats: dict[str, Any], op: str, start: float, end: float, tpu: bool
) -> None:
    if tpu and not op:  # a TPU's rows are called by their instruction
        op = name.split(" = ")[0].lstrip("%")
    if op.split(".")[0] in _CONTAINERS or name.startswith("end: "):
        return
    if op.startswith("command_buffer"):  # all that it launches has its name, and none says whose it is
        op = ""
    if not op:
        reading.kernel_rows_only += 1
    device = plane if plane.startswith("/device:") else f"cpu:{stats.get('device_ordinal', 0)}"
    module = str(stats.get("hlo_module", ""))
    reading.rows.append(Row(device, int(stats.get("program_id", 0)), module, op, name, start, end))


def _add_host(reading: TraceReading, name: str, span: Interval) -> None:
    for what, words in _HOST_SPANS.items():
        if any(word in name for word in words):
            reading.host[what].append(span)


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The same time, in spans that do not touch."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def union_seconds(spans: Iterable[Interval]) -> float:
    """Time that at least one of them covers."""
    return sum(end - start for start, end in merged(spans))


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Time that both cover."""
    a, b = merged(first), merged(second)
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]), 0.0)
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
