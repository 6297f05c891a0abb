"""`profile`: a stretch of a program, counted or traced."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import statistics
import tempfile
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error, unknown_name
from capibara.observe.profiler.executions import Executions, ProgramRuns
from capibara.observe.profiler.queues import FLUSH
from capibara.observe.profiler.result import OpRow, Profile, ProgramRow, keep_last
from capibara.observe.profiler.trace import Interval, Row, TraceReading, merged, overlap, read_trace, union_seconds

if TYPE_CHECKING:
    from capibara.hardware.facts import Chip
    from capibara.program.hlo_work import HloOp

__all__ = ["CAPTURES", "MODES", "Recording", "profile"]

MODES = ("counting", "tracing")
CAPTURES = ("memory", "flops", "communication", "kernel_details")
_DTYPES = ("bfloat16", "float16", "float32", "float64", "int8")
# Python between two calls takes less.
_WAIT = 100e-6
_active = threading.Lock()


class Recording:
    """What `profile` gives to the body of its `with`: `.profile` is there once the body is left."""

    def __init__(self) -> None:
        self.profile: Profile | None = None
        self.nested = False
        """True inside of another profiler, where nothing is recorded."""


@contextlib.contextmanager
def profile(
    name: str = "profile",
    mode: str = "counting",
    trace_dir: str | Path | None = None,
    captures: tuple[str, ...] | None = None,
) -> Iterator[Recording]:
    """Profile what runs inside, whoever jitted it.

    Args:
        name: What the profile is called.
        mode: "counting" listens to jax's calls, which costs microseconds a call. "tracing" lets the runtime write down
            every operation, which gives the time of each.
        trace_dir: Where the files of a trace go; without, a folder that lives as long as the recording.
        captures: Which figures the profile gives, of "memory", "flops", "communication" and "kernel_details"; the
            last two are those of a trace. All that the mode has by default.

    Inside of another profiler a warning says so, the body runs, and nothing is recorded.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> double = jax.jit(lambda x: x @ x)
        >>> x = double(jnp.eye(64))
        >>> with profile("products") as recording:
        ...     for _ in range(7):
        ...         x = double(x)
        >>> recording.profile.runs, recording.profile.total_flops == 7 * 2 * 64**3
        (7, True)
    """
    if mode not in MODES:
        raise unknown_name("profiling mode", mode, MODES)
    if trace_dir is not None and mode != "tracing":
        raise rule_error("A trace is written when tracing", f"trace_dir with mode={mode!r}", "pass mode='tracing'")
    for capture in captures or ():
        if capture not in CAPTURES:
            raise unknown_name("figure to capture", capture, CAPTURES)
    if captures is None:
        captures = CAPTURES if mode == "tracing" else CAPTURES[:2]
    recording = Recording()
    if not _active.acquire(blocking=False):
        recording.nested = True
        warnings.warn(
            f"Profilers do not nest: {name!r} is entered inside of another and records nothing; the program goes on, "
            f"and the outer profiler has all of it. Fix: leave the outer one first.",
            RuntimeWarning,
            stacklevel=3,
        )
        yield recording
        return
    try:
        yield from _recorded(recording, name, mode, trace_dir, captures)
    finally:
        _active.release()


def _recorded(
    recording: Recording, name: str, mode: str, trace_dir: str | Path | None, captures: tuple[str, ...]
) -> Iterator[Recording]:
    from jax._src import xla_bridge

    notes: list[str] = []
    # Looking at devices, and tracing, starts jax's backends, after which a program can no longer say how many devices
    # it wants, or join others (jax.distributed): where they are not up yet, nothing lies there and the trace waits.
    up = xla_bridge.backends_are_initialized()
    memory_before = _memory() if up else {"in_use": 0.0}
    trace = _Trace(recording, trace_dir, notes)
    executions = Executions(trace.start if mode == "tracing" and not up else None)
    if up:
        executions.queues.calibrate()  # compiled and measured now: not in the time that is counted, nor in the trace
        if mode == "tracing":
            trace.start()
    started = time.perf_counter()
    try:
        executions.start()
        yield recording
        left = time.perf_counter()
        executions.stop()
        ended = executions.wait()
        told = time.perf_counter()
        if mode == "tracing":
            trace.start()  # nothing ran: an empty one
    finally:
        executions.stop()
        trace.stop()
    folder = trace.folder
    xplane = _newest(folder, "*.xplane.pb")
    reading = None if xplane is None else _named(read_trace(xplane), executions.programs())
    recording.profile = _result(
        name, executions, reading, _Clock(started, left, ended, told), memory_before, notes, captures,
        trace_file=_newest(folder, "*.trace.json.gz"),
        xplane_file=xplane,
    )  # fmt: skip
    keep_last(recording.profile)


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Moments of a recording, by `time.perf_counter`."""

    entered: float
    left: float
    """When the body was."""
    ended: float
    """When the devices had done what the body gave them; not after `told`, and before `left` never."""
    told: float
    """When that was known."""

    @property
    def wall_seconds(self) -> float:
        return self.ended - self.entered

    def window(self, executions: Executions) -> dict[str, float]:
        """From the first call to the last result, and what lies around it; {} where nothing was called."""
        first = executions.first_call
        if first is None:
            return {}
        compiling = union_seconds(
            (max(start, first), min(end, self.ended))
            for start, end in executions.waited_for()
            if end > first and start < self.ended
        )
        return {
            "before_first_call": first - self.entered,
            "seconds": self.ended - first - compiling,
            "waited_for_compiling": compiling,
            "after_body": self.ended - self.left,
            "finding_out": self.told - self.ended,
            "idle_flush": executions.queues.idle_seconds or 0.0,
        }


class _Trace:
    """jax's trace of a recording, which begins once and ends once."""

    def __init__(self, recording: Recording, trace_dir: str | Path | None, notes: list[str]) -> None:
        self.folder: Path | None = None
        """Where its files are; None where there is no trace."""
        self._recording, self._trace_dir, self._notes = recording, trace_dir, notes
        self._begun = False

    def start(self) -> None:
        """Begin it, unless it has."""
        if self._begun:
            return
        self._begun = True
        import jax

        if self._trace_dir is None:
            folder = Path(tempfile.mkdtemp(prefix="capibara-trace-"))
            weakref.finalize(self._recording, shutil.rmtree, folder, ignore_errors=True)
        else:
            folder = Path(self._trace_dir)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a row for every Python call would be most of the trace, and of its cost
        try:
            jax.profiler.start_trace(str(folder), profiler_options=options)
        except RuntimeError as problem:
            text = f"jax is tracing already, so there are no times of operations here ({problem})"
            warnings.warn(f"{text}. Fix: end that trace first.", RuntimeWarning, stacklevel=6)
            self._notes.append(text)
        else:
            self.folder = folder

    def stop(self) -> None:
        """End it, where it runs."""
        if self.folder is not None:
            import jax

            jax.profiler.stop_trace()


def _named(reading: TraceReading, programs: list[ProgramRuns]) -> TraceReading:
    """The same rows with the numbers of their programs; where the runtime gave none, by name and instruction.

    Without those of the profiler's own program, which waits for the devices at the end.
    """
    numbers = {(program.program_id, program.name) for program in programs}
    by_name: dict[tuple[str, str], int] = {}
    for program in programs:
        for op in program.work.ops:
            by_name.setdefault((program.name, op.name), program.program_id)
    rows = [
        row
        if (row.program_id, row.module) in numbers
        else dataclasses.replace(row, program_id=by_name.get((row.module, row.op), row.program_id))
        for row in reading.rows
        if row.module != f"jit_{FLUSH}"
    ]
    return dataclasses.replace(reading, rows=rows)


def _newest(folder: Path | None, pattern: str) -> Path | None:
    files = sorted(folder.rglob(pattern), key=lambda file: file.stat().st_mtime) if folder is not None else []
    return files[-1] if files else None


def _memory() -> dict[str, float]:
    """Bytes in use and at the peak, of the device that has most of either; of a CPU, those of jax's live arrays."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if any(stats):
        return {
            "in_use": max(one.get("bytes_in_use", 0) for one in stats),
            "peak": max(one.get("peak_bytes_in_use", 0) for one in stats),
        }
    held: dict[Any, float] = defaultdict(float)
    for array in jax.live_arrays():
        for device in array.devices():
            held[device] += array.nbytes / len(array.devices())
    return {"in_use": max(held.values(), default=0.0)}


def _peak_memory(before: dict[str, float], programs: list[ProgramRuns]) -> tuple[float, str]:
    after = _memory()
    if "peak" in after and after["peak"] > before.get("peak", 0.0):
        return after["peak"], "the device's own count"
    # The device counts since the process began, and a CPU not at all: the largest program, by its compiler, or what
    # lay there at either end.
    largest = max((program.peak_bytes for program in programs), default=0.0)
    return max(largest, before["in_use"], after["in_use"]), "the compiler's figures of the largest program"


def _result(
    name: str, executions: Executions, reading: TraceReading | None, clock: _Clock, memory_before: dict[str, float],
    notes: list[str], captures: tuple[str, ...], *, trace_file: Path | None, xplane_file: Path | None,
) -> Profile:  # fmt: skip
    import jax

    from capibara.hardware import chip_for, host

    programs = executions.programs()
    device = jax.local_devices()[0]
    chip = chip_for(device.device_kind)
    if chip is None:
        notes.append(f"{device.device_kind} is not in the table of chips; shares of peaks are those of this host")
        chip = host()
    most = max((program.devices for program in programs), default=1)
    # Devices that XLA makes of one host share it; several devices may be one chip.
    chips = 1 if device.platform == "cpu" else max(most // chip.devices_per_chip, 1)
    shared = most if device.platform == "cpu" else chip.devices_per_chip
    for problem, calls in executions.problems.items():
        notes.append(f"{calls} calls are not counted: {problem}")
    for program in programs:
        if program.work.loops_of_unknown_length:
            notes.append(f"{program.name} has loops of unknown length, whose bodies are counted once a run")
        if program.work.uncounted:
            targets = ", ".join(program.work.uncounted)
            notes.append(f"{program.name} calls kernels whose operations nobody states, counted as none: {targets}")
    memory, source = _peak_memory(memory_before, programs)
    ops = _ops(programs, reading, chip, shared)
    compiling = union_seconds(executions.compiling_spans())
    window = clock.window(executions)
    counted = max(window["seconds"], 1e-9) if window else 0.0
    timed: dict[str, Any] = {}
    if reading is not None:
        timed = _times(reading, programs, clock.wall_seconds, len(reading.devices()) // chips or 1)
        unseen = {row.module for row in reading.rows if row.module} - {program.name for program in programs}
        if unseen:
            notes.append(f"{', '.join(sorted(unseen))} ran and could not be counted; their rows have times and no work")
        if reading.kernel_rows_only:
            notes.append(
                f"{reading.kernel_rows_only} rows name a kernel and no instruction: GPU command buffers do that; "
                f"XLA_FLAGS=--xla_gpu_enable_command_buffer= gives a row an instruction"
            )
    return Profile(
        name=name,
        mode="counting" if reading is None else "tracing",
        wall_seconds=clock.wall_seconds,
        seconds=timed.get("busy_seconds", counted) or counted,
        compile_seconds=compiling,
        platform=chip.platform,
        device_kind=device.device_kind,
        chips=chips,
        peak_flops={
            dtype: chip.product_flops(dtype) for dtype in ("bfloat16", "float16", "float32", "float64", "int8")
        },
        memory_bandwidth=chip.hbm_bandwidth,
        launch_seconds=chip.efficiency.launch_seconds,
        programs=tuple(_program_row(program) for program in programs),
        ops=tuple(sorted(ops, key=lambda op: -(op.seconds or op.least_seconds))),
        compilations=dict(executions.compilations),
        host_arguments=executions.host_arguments,
        peak_memory_bytes=memory,
        memory_source=source,
        captures=captures,
        trace_file=None if trace_file is None else str(trace_file),
        xplane_file=None if xplane_file is None else str(xplane_file),
        notes=tuple(notes),
        window=window,
        **timed,
    )


def _program_row(program: ProgramRuns) -> ProgramRow:
    times = program.runs * program.devices
    work = program.work
    return ProgramRow(
        program.name, program.runs, program.devices, work.flops * times, work.matrix_flops * times, work.bytes * times,
        program.peak_bytes,
    )  # fmt: skip


def _ops(programs: list[ProgramRuns], reading: TraceReading | None, chip: Chip, shared: int) -> list[OpRow]:
    """A row an instruction, of one chip; `shared` devices are one."""
    timed: dict[tuple[int, str], list[Row]] = defaultdict(list)
    devices = 1
    if reading is not None:
        devices = max(len(reading.devices()), 1)
        for row in reading.rows:
            timed[row.program_id, row.op or row.kernel].append(row)
        _name_kernels(programs, timed)
    rows = []
    for program in programs:
        # A device kind may share a chip: what one chip does is what its devices do together.
        each = program.runs * min(program.devices, shared)
        for op in program.work.ops:
            found = timed.pop((program.program_id, op.name), [])
            if op.kind == "copy" and reading is not None and not found:
                continue  # the runtime made nothing of it
            spread = len({row.device for row in found}) / min(program.devices, shared)
            rows.append(_op_row(program, op, found, spread, each, chip))
    for (_, op_name), found in timed.items():
        kind = "collective" if "nccl" in op_name.lower() else "kernel"
        seconds = [row.seconds for row in found]
        rows.append(
            OpRow(
                program=found[0].module or "(device)",
                op=op_name,
                kind=kind,
                source="",
                count=len(found) / devices,
                flops=0.0,
                matrix_flops=0.0,
                bytes=0.0,
                dtype="",
                bound="unknown",
                least_seconds=0.0,
                # Which program it is of, nobody says: of the one that runs most, as a loop's does.
                runs=max((program.runs for program in programs), default=1),
                seconds=sum(seconds) / devices,
                best_seconds=_best(seconds),
                median_seconds=statistics.median(seconds),
            )
        )
    return rows


def _name_kernels(programs: list[ProgramRuns], timed: dict[tuple[int, str], list[Row]]) -> None:
    """Give the rows that name a kernel alone to the instructions that it was made of, where one knows them.

    Instructions that do the same share a kernel, and have its rows in turn.
    """
    for program in programs:
        sharing: dict[str, list[str]] = defaultdict(list)
        for op in program.work.ops:
            if op.kernel:
                sharing[op.kernel].append(op.name)
        for kernel, names in sharing.items():
            # Rows without a program are of any that has such a kernel.
            keys = [key for key in ((program.program_id, kernel), (0, kernel)) if key in timed]
            found = sorted((row for key in keys for row in timed[key] if not row.op), key=lambda row: row.start)
            for key in keys:
                timed[key] = [row for row in timed[key] if row.op]
                if not timed[key]:
                    del timed[key]
            for number, name in enumerate(names):
                if part := found[number :: len(names)]:
                    timed[program.program_id, name] += part


def _op_row(program: ProgramRuns, op: HloOp, found: list[Row], spread: float, each: int, chip: Chip) -> OpRow:
    times = op.times * each
    compute = op.matrix_flops / chip.product_flops(op.dtype)
    parts = {"compute": compute, "vector": op.vector_flops / chip.vector_flops, "memory": op.bytes / chip.hbm_bandwidth}
    bound = "links" if op.kind == "collective" else max(parts, key=lambda part: parts[part])
    seconds = _runs_of(found, op.times * program.runs)
    return OpRow(
        program=program.name,
        op=op.name,
        kind=op.kind,
        source=op.source,
        count=times,
        flops=op.flops * times,
        matrix_flops=op.matrix_flops * times,
        bytes=op.bytes * times,
        dtype=op.dtype,
        bound=bound,
        least_seconds=max(parts.values()) * times,
        runs=program.runs,
        seconds=sum(seconds) / max(spread, 1.0) if seconds else None,
        best_seconds=_best(seconds) if seconds else None,
        median_seconds=statistics.median(seconds) if seconds else None,
        written_dtype=op.written_dtype,
        products=tuple((one.batch, one.m, one.n, one.k) for one in op.products),
    )


def _runs_of(rows: list[Row], runs: int) -> list[float]:
    """Seconds of each run of an instruction, of which a device may have several rows, one after another.

    A product of a vendor's library may clear its scratch space in a row of its own.
    """
    by_device: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.start):
        by_device[row.device].append(row)
    seconds = []
    for mine in by_device.values():
        together = len(mine) // runs if runs and not len(mine) % runs else 1
        seconds += [sum(row.seconds for row in mine[i : i + together]) for i in range(0, len(mine), together)]
    return seconds


def _best(seconds: list[float]) -> float:
    """The tenth percentile: others make runs longer, never shorter, and the very shortest is a matter of luck."""
    return sorted(seconds)[len(seconds) // 10]


def _times(reading: TraceReading, programs: list[ProgramRuns], wall: float, sharing: int) -> dict[str, Any]:
    collectives = {
        (program.program_id, op.name) for program in programs for op in program.work.ops if op.kind == "collective"
    }

    def exchanges(row: Row) -> bool:
        return (row.program_id, row.op) in collectives or "nccl" in row.kernel.lower()

    busy, talking, exposed = [], [], []
    everywhere: list[Interval] = []
    for rows in reading.devices().values():
        sent = [(row.start, row.end) for row in rows if exchanges(row)]
        other = [(row.start, row.end) for row in rows if not exchanges(row)]
        everywhere += sent + other
        busy.append(union_seconds(sent + other))
        talking.append(union_seconds(sent))
        exposed.append(union_seconds(sent) - overlap(sent, other))
    whole = union_seconds(everywhere)
    in_jax = [span for spans in reading.host.values() for span in spans]
    waits = _waits_for_host(everywhere, in_jax)
    calls = [end - start for start, end in merged(reading.host["dispatch"])]
    return {
        # Devices of one host run at the same time on it.
        "busy_seconds": whole if sharing > 1 else statistics.fmean(busy) if busy else 0.0,
        "communication_seconds": statistics.fmean(talking) if talking else 0.0,
        "exposed_communication_seconds": statistics.fmean(exposed) if exposed else 0.0,
        "idle_seconds": max(wall - whole, 0.0),
        "dispatch_median_seconds": statistics.median(calls) if calls else None,
        "host_counts": {
            **{what: len(spans) for what, spans in reading.host.items()},
            "outside_while_idle": sum(seconds >= _WAIT for seconds in waits),
        },
        "host_seconds": {
            **{what: union_seconds(spans) for what, spans in reading.host.items()},
            "dispatch_while_idle": union_seconds(reading.host["dispatch"])
            - overlap(reading.host["dispatch"], everywhere),
            "outside_while_idle": sum(waits),
        },
    }


def _waits_for_host(device: list[Interval], in_jax: list[Interval]) -> list[float]:
    """How long nothing ran, each time, until the host came back to jax: its own work, and not a busy machine's."""
    covered = merged([*device, *in_jax])
    calls = {start for start, _ in in_jax}
    return [after[0] - before[1] for before, after in itertools.pairwise(covered) if after[0] in calls]
