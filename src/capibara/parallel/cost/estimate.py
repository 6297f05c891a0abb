"""What a layout costs on a slice: bytes a chip, seconds a step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from capibara.errors import rule_error
from capibara.hardware.chips import Chip
from capibara.hardware.topology import Slice
from capibara.parallel.mesh import MeshConfig
from capibara.parallel.program.chip import ChipProgram

if TYPE_CHECKING:
    from capibara.parallel.cost.calibration import Calibration
    from capibara.parallel.cost.correction import Correction
    from capibara.parallel.cost.lifetime import Peak

__all__ = ["Estimate", "LinkUse", "Memory", "Part", "estimate"]

_STAGE_AXES = ("pipeline", "stage", "stages")


@dataclass(frozen=True)
class Memory:
    """Bytes of one chip, at the moment when most of them are live."""

    arguments: float
    """Held for the whole step: parameters, optimizer state, the batch."""
    temporaries: float
    """The most that is live beside them."""
    limit: float
    """What a program can have of the chip."""
    peak_at: str
    """The step at which it happens."""
    largest: tuple[tuple[str, float], ...]
    """Name and bytes of the largest buffers live at the peak."""
    timeline: tuple[tuple[str, float], ...]
    """Name of a step and the bytes live then, in order."""
    margin: float = 0.0
    """Share by which the total may be too low, from the worst programs that were compared with a compiler."""
    unsure: float = 0.0
    """Bytes beside the total that a compiler keeps of some programs like this and not of others (`cost.tables`)."""

    @property
    def total(self) -> float:
        return self.arguments + self.temporaries

    @property
    def most(self) -> float:
        """The upper end of the range that the total is the lower end of."""
        return (self.total + self.unsure) * (1 + self.margin)

    @property
    def fits(self) -> bool:
        """Whether it fits even when it is the most that it may be."""
        return self.most <= self.limit

    @property
    def may_fit(self) -> bool:
        """Whether only a compiler can tell: the limit is inside of the range."""
        return self.total <= self.limit < self.most


@dataclass(frozen=True)
class LinkUse:
    """Everything sent along one set of mesh axes by one kind of exchange."""

    kind: str
    axes: tuple[str, ...]
    link: str
    """ "ICI", "DCN", "NVLink" or "PCIe"."""
    count: int
    bytes: float
    """Sent by one chip over its links in a step."""
    seconds: float
    why: str


@dataclass(frozen=True)
class Part:
    """One kind of work: a point of the roofline chart."""

    name: str
    flops: float
    bytes: float
    seconds: float
    bound: str
    """ "matrix", "vector", "memory", or "host" where it is copied from or to the host's memory."""


@dataclass(frozen=True)
class Estimate:
    """One layout on one slice."""

    memory: Memory
    seconds: float
    low: float
    high: float
    """The range: everything overlaps that can, and nothing does."""
    bound: str
    compute_seconds: float
    link_seconds: float
    bubble_seconds: float
    flops: float
    """Of one chip in one step, recomputation included."""
    model_flops: float
    """Of one chip, without recomputation: what MFU counts."""
    mfu: float
    links: tuple[LinkUse, ...]
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    exposed_seconds: float = 0.0
    """Of `link_seconds`, what nothing hides."""
    correction: Correction | None = None
    """What measured runs changed in it."""

    @property
    def seconds_by_bound(self) -> dict[str, float]:
        """Seconds that each unit decides: the parts' bounds and "links". What a calibration is fitted to."""
        found = {"matrix": 0.0, "vector": 0.0, "memory": 0.0, "host": 0.0, "links": self.exposed_seconds}
        for part in self.parts:
            found[part.bound] += part.seconds
        return found


def _why_unsure(peak: Peak) -> tuple[str, ...]:
    """What the range is for, where it is a good part of the memory."""
    if 20 * peak.unsure < peak.arguments + peak.temporaries:
        return ()
    if peak.unchecked:
        return (
            f"no program with much of {', '.join(peak.unchecked)} was compared with the TPU compiler: what they read "
            f"and write may take {peak.unsure / 2**30:.3g} GiB more than is counted",
        )
    return (
        "products of activations leave tables for other products (attention that is not one kernel): the compiler "
        f"keeps more or fewer of them at once, {peak.unsure / 2**30:.3g} GiB more than is counted; "
        "capibara.kernels.attention has none",
    )


def _without_units(program: ChipProgram, chip: Chip) -> tuple[str, ...]:
    """What a chip multiplies slower than the model says: it has no units for it, and no rate is known."""
    if "float64" in chip.flops or not any(step.matrix and step.dtype == "float64" for step, _ in program.walk()):
        return ()
    return (f"{chip.name} has no units for products in float64: they are counted at bfloat16's rate, far too fast",)


def estimate(
    program: ChipProgram,
    mesh: MeshConfig,
    where: Slice | Chip,
    *,
    stages: int = 1,
    microbatches: int = 1,
    calibration: Calibration | None = None,
    num_slices: int = 1,
    memory_limit: float | None = None,
) -> Estimate:
    """What one chip's program costs. `where` is a slice, or a GPU of which the mesh's size are taken.

    With `stages` above 1 the program is one stage's, and `microbatches` go through the stages one after another.
    `memory_limit`, in bytes, takes the place of what the chip's programs can have, where it is less.
    """
    from capibara.parallel.cost.efficiency import efficiency_of, what_is_predicted
    from capibara.parallel.cost.fusion import fuse
    from capibara.parallel.cost.lifetime import peak_memory
    from capibara.parallel.cost.links import wire
    from capibara.parallel.cost.pipeline import send_seconds, staged
    from capibara.parallel.cost.rewrites import hoist_conversions, narrow_operands, sink_constants
    from capibara.parallel.cost.timing import Timer

    for name, count in (("stages", stages), ("microbatches", microbatches)):
        if count < 1:
            raise rule_error(f"{name} is a whole number from 1 up", repr(count), "use 1")
    if memory_limit is not None and not memory_limit > 0:
        raise rule_error(
            "memory_limit is a number of bytes above zero", repr(memory_limit), "leave it out for the chip's"
        )
    chip = where.chip if isinstance(where, Slice) else where
    if calibration is not None:
        calibration.must_be_for(chip)
    table = efficiency_of(chip)
    wiring = wire(mesh, where, num_slices, table.hop_seconds)
    program = sink_constants(program)
    if chip.platform == "tpu":
        program = narrow_operands(hoist_conversions(program))
    passes, same = fuse(program, chip.platform)
    timer = Timer(program.buffers, chip, table, wiring)
    totals = timer.level(passes)
    peak = peak_memory(program, passes, same, chip.platform)

    piped = staged(program, passes, timer, totals.mid, peak, stages, microbatches)
    limit = float(chip.capacity_bytes) if memory_limit is None else min(memory_limit, float(chip.capacity_bytes))
    memory = Memory(
        peak.arguments,
        peak.temporaries + piped.held + table.reserved_bytes,
        limit,
        peak.at,
        peak.live[:5],
        peak.timeline,
        table.memory_margin,
        peak.unsure,
    )
    bubble = piped.bubble
    axis = next((name for name in mesh.axis_names if name in _STAGE_AXES), None)
    sends = send_seconds(program, wiring, axis, stages, microbatches, table.links.mid)
    seconds = totals.mid + bubble - piped.saved + sends
    exposed = totals.exposed + sends
    parts = timer.parts()
    bounds = {"matrix": 0.0, "vector": 0.0, "memory": 0.0, "host": 0.0, "links": exposed, "bubble": bubble}
    for part in parts:
        bounds[part.bound] += part.seconds
    share = (bubble - piped.saved) / totals.mid if totals.mid else 0.0
    found = Estimate(
        memory=memory,
        seconds=seconds,
        low=min(seconds, totals.fastest * (1 + share)),
        high=max(seconds, totals.slowest * (1 + share) + sends * table.links.mid / table.links.low),
        bound=max(bounds, key=lambda one: bounds[one]),
        compute_seconds=totals.compute,
        link_seconds=totals.links + sends,
        bubble_seconds=bubble,
        flops=timer.flops,
        model_flops=timer.model_flops,
        mfu=timer.model_flops / seconds / chip.peak_flops("bfloat16") if seconds else 0.0,
        links=timer.links(),
        parts=parts,
        notes=(*program.notes, *_why_unsure(peak), *_without_units(program, chip), what_is_predicted(table)),
        exposed_seconds=exposed,
    )
    return found if calibration is None else calibration.corrected(found)
