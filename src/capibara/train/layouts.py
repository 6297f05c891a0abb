"""Where a training run lies: the planner's own layout of its step on the devices that are there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from capibara.cost.result import Estimate
from capibara.errors import rule_error, unsaid
from capibara.hardware.chips import chip, chip_for
from capibara.hardware.topology import Slice, slice_by_grid
from capibara.mesh.choices import mesh_config
from capibara.mesh.layout import Layout
from capibara.parallel.job import Job
from capibara.plan.search.search import search
from capibara.plan.search.space import PARAMETERS

__all__ = ["Chosen", "choose_layout", "slice_of"]

_log = logging.getLogger(__name__)
_SIMULATED = "h200"
"""The chip that devices of a CPU stand for: any number of them has all-to-all links."""
_SEARCH_SECONDS = 60.0


@dataclass(frozen=True)
class Chosen:
    """A layout, what the planner predicts of it, and for which chips."""

    layout: Layout
    estimate: Estimate | None
    """None on one device of a CPU, where there is nothing to choose."""
    where: Slice
    simulated: bool
    """The devices are a CPU's, and the layout is one for other chips."""


def slice_of(devices: Sequence[Any]) -> tuple[Slice, bool]:
    """The slice that these devices are, and whether they only stand for one."""
    first = devices[0]
    count = len(devices)
    if first.platform == "cpu":
        return Slice(f"{count} simulated device{'s' * (count > 1)}", chip(_SIMULATED), (count,)), True
    found = chip_for(first.device_kind)
    if found is None:
        raise rule_error(
            "A layout is planned for a chip of the table",
            first.device_kind,
            "add its row to capibara/hardware/chips.py, or name remat, accumulate and the mesh",
        )
    if found.platform == "tpu":
        coords = [device.coords for device in devices]
        grid = tuple(max(c[axis] for c in coords) - min(c[axis] for c in coords) + 1 for axis in range(3))
        return slice_by_grid(found, grid), False
    return Slice(f"{found.name}x{count}" if count > 1 else found.name, found, (count,)), False


def choose_layout(
    job: Job,
    devices: Sequence[Any],
    axes: Mapping[str, int] | None = None,
    *,
    parameters: Sequence[str] = PARAMETERS,
    target: str = "throughput",
    tell: Callable[[str], None] | None = None,
) -> Chosen:
    """The planner's best layout of the job on these devices, on a mesh of these axes where they are named.

    `DoesNotFit` says what would.
    """
    where, simulated = slice_of(devices)
    if len(devices) == 1 and simulated and all(len(values) == 1 for values in job.knobs.values()):
        return Chosen(_whole(job), None, where, simulated)
    # What the kernels of chips that are only stood for would fall back to is nobody's news; what runs is said as ever.
    with unsaid() if simulated else contextlib.nullcontext():
        plans = search(
            job,
            where,
            mesh=axes,
            target=target,
            parameters=parameters,
            top=1,
            deadline_s=_SEARCH_SECONDS,
            offload=False,
            pipelines=False,
            tell=tell,
        )
    best = plans.require()
    return Chosen(best.layout, best.estimate, where, simulated)


def _whole(job: Job) -> Layout:
    """Everything on one device."""
    from jax.sharding import PartitionSpec

    _, args = job.build(**job.defaults())
    return Layout(
        mesh=mesh_config({"data": 1}),
        specs=(PartitionSpec(),) * len(jax.tree.leaves(args)),
        choices=tuple(job.defaults().items()),
        name="one device",
    )


def with_choice(layout: Layout, **changes: Any) -> Layout:
    """The layout with other values of its knobs."""
    return replace(layout, choices=tuple((name, changes.get(name, value)) for name, value in layout.choices))
