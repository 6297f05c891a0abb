"""The documented profilers: which figures are asked for decides how much is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from capibara.errors import rule_error
from capibara.observe.profiler.result import Profile
from capibara.observe.profiler.session import CAPTURES, Recording, profile

__all__ = ["TpuPerformanceProfiler", "TpuProfiler"]

_PERCENT = ("memory_efficiency", "compute_efficiency")
# A program may name each of its steps; a profile has rows and, traced, files.
_KEPT = 64


def _captures(memory: bool, flops: bool, communication: bool, kernel_details: bool) -> tuple[str, ...]:
    asked = (memory, flops, communication, kernel_details)
    return tuple(name for name, wanted in zip(CAPTURES, asked, strict=True) if wanted)


def _mode(captures: tuple[str, ...]) -> str:
    return "tracing" if {"communication", "kernel_details"} & {*captures} else "counting"


class TpuPerformanceProfiler:
    """Profiles of stretches of a program, on whatever jax runs on.

    Programs are counted, which costs microseconds a call, unless what only a trace can tell is asked for.

    Args:
        capture_memory: `peak_memory_gb` and `memory_efficiency`; nan without.
        capture_flops: `tflops`, `total_flops` and `compute_efficiency`; nan without.
        capture_communication: `comm_overhead_ms`, by a trace; nan without.
        capture_kernel_details: `kernels`, a row an operation with its time and its place under the roofline, by a
            trace; without, the rows are there and have no times.
        trace_dir: Where the files of traces go; without, in a folder that lives as long as this object.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> profiler = TpuPerformanceProfiler(capture_kernel_details=True)
        >>> with profiler.profile_context("products"):
        ...     x = jax.jit(lambda x: x @ x)(jnp.eye(128))
        >>> metrics = profiler.get_detailed_metrics()
        >>> metrics["tflops"] > 0, [row["kind"] for row in metrics["kernels"]]
        (True, ['product'...
    """

    def __init__(
        self,
        capture_memory: bool = True,
        capture_flops: bool = True,
        capture_communication: bool = False,
        capture_kernel_details: bool = False,
        trace_dir: str | Path | None = None,
    ) -> None:
        self.captures = _captures(capture_memory, capture_flops, capture_communication, capture_kernel_details)
        self.trace_dir = trace_dir
        self.profiles: dict[str, Profile] = {}
        """The last profile of each name, of the 64 names that were used last."""
        self._recordings: dict[str, Recording] = {}

    @contextlib.contextmanager
    def profile_context(self, name: str) -> Iterator[None]:
        """Profile what runs inside, under a name."""
        mode = _mode(self.captures)
        trace_dir = self.trace_dir if mode == "tracing" else None
        with profile(name, mode, trace_dir, self.captures) as recording:
            yield
        if recording.profile is not None:
            self.profiles.pop(name, None)
            self.profiles[name] = recording.profile
            self._recordings[name] = recording
            while len(self.profiles) > _KEPT:
                oldest = next(iter(self.profiles))
                del self.profiles[oldest], self._recordings[oldest]

    def get_detailed_metrics(self, name: str | None = None) -> dict[str, Any]:
        """The figures of one context, the last by default: efficiencies as fractions, and the rows of `kernels`."""
        chosen = self._chosen(name)
        return {**chosen.metrics(), "kernels": kernel_rows(chosen), "notes": list(chosen.notes)}

    def get_metrics(self, name: str | None = None) -> dict[str, Any]:
        """The same without the rows, and efficiencies in percent."""
        metrics = self._chosen(name).metrics()
        return {key: 100 * value if key in _PERCENT else value for key, value in metrics.items()}

    def _chosen(self, name: str | None) -> Profile:
        if not self.profiles:
            raise rule_error(
                "Metrics are those of a profile_context that was left",
                "none",
                "run the program inside of `with profiler.profile_context(name):`",
            )
        if name is None:
            return list(self.profiles.values())[-1]
        if name not in self.profiles:
            raise rule_error(
                f"The contexts profiled are {', '.join(map(repr, self.profiles))}", repr(name), "name one of them"
            )
        return self.profiles[name]


class TpuProfiler:
    """One stretch of a program: `with profiler:`, then `generate_report()`.

    Args:
        capture_memory: `peak_memory_gb`; nan without.
        capture_flops: `total_flops` and rates; nan without.
        capture_communication: `comm_overhead_ms`, the times of operations and the trace file. Without, programs are
            counted and nothing is traced.
        trace_dir: Where the files of the trace go; without, in a folder that lives as long as this object.
    """

    def __init__(
        self,
        capture_memory: bool = True,
        capture_flops: bool = True,
        capture_communication: bool = True,
        trace_dir: str | Path | None = None,
    ) -> None:
        # A trace has the rows of operations as well: the report's table.
        self.captures = _captures(capture_memory, capture_flops, capture_communication, capture_communication)
        self.trace_dir = trace_dir
        self.recording: Recording | None = None
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        mode = _mode(self.captures)
        context = profile("profile", mode, self.trace_dir if mode == "tracing" else None, self.captures)
        recording = context.__enter__()
        if not recording.nested:
            self.recording = recording
        self._open.append(context)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.pop().__exit__(*raised)

    def generate_report(self) -> dict[str, Any]:
        """Figures by their documented names, `table` (text), `kernels` (rows), `trace_file` and `xplane_file`."""
        found = None if self.recording is None else self.recording.profile
        if found is None:
            raise rule_error("A report is of a `with profiler:` that was left", "none", "run the program inside of one")
        return {
            **found.metrics(),
            "table": table(found),
            "kernels": kernel_rows(found),
            "trace_file": found.trace_file,
            "xplane_file": found.xplane_file,
            "notes": list(found.notes),
        }


def kernel_rows(found: Profile) -> list[dict[str, Any]]:
    """A row an operation, the longest first."""
    return [
        {
            "program": op.program,
            "op": op.op,
            "kind": op.kind,
            "source": op.source,
            "count": op.count,
            "milliseconds": None if op.seconds is None else op.seconds * 1e3,
            "flops": op.flops,
            "bytes": op.bytes,
            "bound": op.bound,
            "roofline": op.roofline,
        }
        for op in found.ops
    ]


def table(found: Profile, rows: int = 20) -> str:
    """The longest operations as text: time, share of it, what bounds them, how near the chip's peak they come."""
    whole = sum(op.seconds or 0.0 for op in found.ops)
    lines = [f"{'op':<32} {'kind':<11} {'count':>7} {'ms':>9} {'share':>6} {'bound':<8} {'roofline':>8}"]
    for op in found.ops[:rows]:
        seconds = "-" if op.seconds is None else f"{op.seconds * 1e3:.3f}"
        share = "-" if not whole or op.seconds is None else f"{op.seconds / whole:.0%}"
        reached = "-" if op.roofline is None else f"{op.roofline:.0%}"
        name = op.source.rpartition("/")[2] or op.op
        lines.append(
            f"{name[:32]:<32} {op.kind:<11} {op.count:>7.0f} {seconds:>9} {share:>6} {op.bound:<8} {reached:>8}"
        )
    left = len(found.ops) - rows
    return "\n".join(lines + ([f"... and {left} more"] if left > 0 else []))
