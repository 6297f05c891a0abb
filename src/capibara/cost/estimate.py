"""What a layout costs on a slice: bytes a chip, seconds a step, and where they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.cost.fusion import fuse
from capibara.cost.lifetime import peak_memory
from capibara.cost.links import wire
from capibara.cost.pipeline import send_seconds, staged
from capibara.cost.result import Estimate, Memory
from capibara.cost.rewrites import hoist_conversions, narrow_operands, sink_constants
from capibara.cost.timing import Timer
from capibara.errors import rule_error
from capibara.hardware.facts import Chip
from capibara.hardware.topology import Slice
from capibara.mesh.mesh import MeshConfig
from capibara.program.chip import ChipProgram

if TYPE_CHECKING:
    from capibara.cost.calibration import Calibration
    from capibara.cost.lifetime import Peak

__all__ = ["estimate"]

_STAGE_AXES = ("pipeline", "stage", "stages")


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


def _what_is_predicted(chip: Chip) -> str:
    """In words, which factors were measured on this chip and which were not."""
    table = chip.efficiency
    factors = {"products": table.matrix, "memory": table.memory, "links": table.links}
    measured = [name for name, factor in factors.items() if factor.measured]
    predicted = [
        f"{name} ({factor.source.removeprefix('predicted: ')})"
        for name, factor in factors.items()
        if not factor.measured
    ]
    told = f"Measured on {chip.name}: {', '.join(measured)}. " if measured else ""
    return f"{told}Predicted, not measured on {chip.name}: {'; '.join(predicted)}."


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
    table = chip.efficiency
    wiring = wire(mesh, where, num_slices, table.hop_seconds)
    program = sink_constants(program)
    if chip.platform == "tpu":
        program = narrow_operands(hoist_conversions(program))
    passes, same = fuse(program, chip.platform)
    timer = Timer(program.buffers, chip, wiring)
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
        notes=(*program.notes, *_why_unsure(peak), *_without_units(program, chip), _what_is_predicted(chip)),
        exposed_seconds=exposed,
    )
    return found if calibration is None else calibration.corrected(found)
