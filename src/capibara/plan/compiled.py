"""One layout of a job, compiled: what a compiler says of its bytes and its exchanges.

`compile_layout` asks the chip's own compiler, with no chip attached: the TPU's (libtpu, x86-64 Linux), or XLA's for
GPUs (jax's plugin for CUDA). `partition_layout` asks XLA for the CPU, whose partitioner puts in the same collectives,
over virtual devices.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.compile.availability import chip_compiler
from capibara.compile.failures import classify, over_limit, thrown_by_compilers, useful_lines
from capibara.errors import rule_error
from capibara.hardware.topology import Slice, abstract_devices, place
from capibara.parallel.run import lower_layout

if TYPE_CHECKING:
    from capibara.mesh.layout import Layout
    from capibara.parallel.job import Job
    from capibara.program.chip import Collective

__all__ = [
    "CHIP_LEVELS",
    "LEVELS",
    "NOT_A_VERDICT",
    "Compiled",
    "compile_layout",
    "partition_layout",
]

LEVELS = {
    "analytic": "analytic: predicted from the program, nothing compiled",
    "xla": "XLA-partitioned: compiled for virtual CPU devices by XLA's partitioner",
    "tpu": "TPU-compiled: by the real TPU compiler, not run on a chip",
    "gpu": "GPU-compiled: by XLA's compiler for this GPU, not run on one",
}
"""The levels of evidence, and the words that label them."""

CHIP_LEVELS = {"tpu": "the TPU compiler", "gpu": "the GPU compiler"}
"""Levels at which the chip's own compiler speaks, whose bytes are the chip's; and what it is called."""

NOT_A_VERDICT = ("timeout", "crash", "no_compiler")
"""Kinds of errors with which a compiler could not be asked, which says nothing against the layout."""


@dataclass(frozen=True)
class Compiled:
    """What a compiler said of one layout. Bytes are one chip's; None where it did not say."""

    level: str
    evidence: str
    """Which compiler, for what."""
    arguments: float | None = None
    outputs: float | None = None
    temporaries: float | None = None
    aliased: float | None = None
    """Of the outputs, what lies in donated arguments."""
    peak: float | None = None
    """The most that is live at once, arguments included: what the compiler holds against the chip's memory."""
    collectives: tuple[Collective, ...] = ()
    """Each with the bytes of one chip, as often as it runs."""
    seconds: float = 0.0
    """To lower and compile."""
    error: str | None = None
    error_kind: str | None = None
    """ "hbm_oom" where the compiler found that it does not fit."""

    @property
    def total_bytes(self) -> float | None:
        """The most that a chip holds at once.

        Where a compiler names no peak: arguments, temporaries, and outputs that have no argument's place, which is
        more (a TPU's temporaries may lie in an argument that is done with). Of a program that the compiler refused
        for its size, the size that it named.
        """
        if self.peak is not None:
            return self.peak
        if self.arguments is None or self.temporaries is None:
            return None if self.error_kind != "hbm_oom" else self.temporaries
        return self.arguments + self.temporaries + (self.outputs or 0.0) - (self.aliased or 0.0)

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def exchanges(self) -> tuple[tuple[str, tuple[str, ...], int, float], ...]:
        """Kind, mesh axes, how often, and bytes of one chip in all: the largest first."""
        found: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        for one in self.collectives:
            found.setdefault((one.kind, one.axes), []).append(one.bytes)
        made = [(kind, axes, len(sizes), sum(sizes)) for (kind, axes), sizes in found.items()]
        return tuple(sorted(made, key=lambda one: (-one[3], one[0], one[1])))

    def as_dict(self) -> dict[str, Any]:
        """Plain values; collectives are there once, with how often they run."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        counted = Counter(self.collectives)
        fields["collectives"] = [{**dataclasses.asdict(one), "times": times} for one, times in counted.items()]
        return {**fields, "total_bytes": self.total_bytes}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Compiled:
        from capibara.program.chip import Collective

        exchanges: list[Collective] = []
        for one in fields["collectives"]:
            values = {**one, "axes": tuple(one["axes"])}
            times = values.pop("times")
            exchanges += [Collective(**values)] * times
        known = {one.name for one in dataclasses.fields(cls)}
        kept = {key: value for key, value in fields.items() if key in known}
        return cls(**{**kept, "collectives": tuple(exchanges)})


def compile_layout(job: Job, layout: Layout, on: str | Slice) -> Compiled:
    """The layout compiled for a TPU slice or a host's GPUs, in this process. A failure is in `.error`, not thrown."""
    where = place(on)
    level = where.chip.platform
    compiler = chip_compiler(level)
    if not compiler.available:
        return Compiled(level, "not compiled", error=str(compiler), error_kind="no_compiler")
    # Without a GPU nothing is timed: a product may get other tiles, and other workspace, than where it runs.
    untuned = ", products not tuned" if level == "gpu" else ""
    evidence = f"compiled by {compiler.named} for {where.name}{untuned}; not run on a chip"
    return _compiled(level, evidence, job, layout, lambda: abstract_devices(where))


def partition_layout(job: Job, layout: Layout) -> Compiled:
    """The layout compiled by XLA for the CPU devices of this process, which must be enough for its mesh."""
    import jax

    devices = jax.devices("cpu")
    if len(devices) < layout.mesh.size:
        raise rule_error(
            f"The mesh of this layout takes {layout.mesh.size} devices",
            f"{len(devices)} virtual CPU devices in this process",
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={layout.mesh.size} before jax starts, or plan a "
            "file.py:function, which is compiled in a process of its own",
        )
    evidence = f"compiled by XLA for {layout.mesh.size} virtual CPU devices; temporaries are the CPU's, not a TPU's"
    return _compiled("xla", evidence, job, layout, lambda: devices[: layout.mesh.size])


def _compiled(level: str, evidence: str, job: Job, layout: Layout, devices: Callable[[], Sequence[Any]]) -> Compiled:
    from capibara.program.hlo_collectives import collectives_in

    why_not = job.why_no_stages() if layout.stages > 1 else ""
    if why_not:
        return Compiled(level, "not compiled", error=why_not, error_kind="pipeline")
    start, lowering = time.perf_counter(), True
    try:
        mesh = layout.mesh.build(devices())
        start = time.perf_counter()  # loading a compiler is not this layout's doing
        lowered = lower_layout(job, layout, mesh, host_memory=level == "tpu")
        lowering = False
        compiled = lowered.compile()
    except thrown_by_compilers() as error:
        text = f"{type(error).__name__}: {error}"
        kind = classify(text, lowering=lowering)
        sizes = over_limit(text) if kind == "hbm_oom" else None
        return Compiled(
            level,
            evidence,
            temporaries=None if sizes is None else sizes.used_bytes,
            seconds=time.perf_counter() - start,
            error=useful_lines(text),
            error_kind=kind,
        )
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    return Compiled(
        level,
        evidence,
        arguments=_size(stats, "argument_size_in_bytes"),
        outputs=_size(stats, "output_size_in_bytes"),
        temporaries=_size(stats, "temp_size_in_bytes"),
        aliased=_size(stats, "alias_size_in_bytes"),
        # XLA for the CPU names one too, of a backend that keeps other temporaries.
        peak=_peak(stats) if level in CHIP_LEVELS else None,
        collectives=tuple(collectives_in(compiled.as_text(), layout.mesh.axes)),
        seconds=seconds,
    )


def _peak(stats: Any) -> float | None:
    """The chip's peak. The compiler's counts arguments that lie with the host, which take nothing of the chip."""
    peak, host = _size(stats, "peak_memory_in_bytes"), _size(stats, "host_argument_size_in_bytes")
    return None if not peak else peak - (host or 0.0)


def _size(stats: Any, field: str) -> float | None:
    value = getattr(stats, field, None)
    return float(value) if isinstance(value, int) and value >= 0 else None
