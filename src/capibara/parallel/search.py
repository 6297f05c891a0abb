"""`search`: a job's best layouts on a slice, by the cost model, and where a compiler is given by it too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from capibara.errors import rule_error, unknown_name
from capibara.hardware.topology import slice_by_name
from capibara.parallel.evaluation import CostModel, PaperModel
from capibara.parallel.exploration import BUDGET, TARGETS, Exploration, Result
from capibara.parallel.job import Job
from capibara.parallel.layout import Layout
from capibara.parallel.mesh import MeshConfig
from capibara.parallel.mesh_choices import mesh_axes
from capibara.parallel.plans import Plans, Ranked, Refused, bytes_in_words
from capibara.parallel.space import Space

__all__ = ["TARGETS", "search"]


def search(
    job: Job,
    slice: Any,
    *,
    target: str = "throughput",
    memory_limit: float | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
    top: int = 3,
    confirm: Callable[[Layout], Any] | None = None,
    deadline_s: float | None = None,
    calibration: Any = None,
    offload: bool = True,
    budget: int = BUDGET,
    pipelines: bool = False,
    model: Callable[[Job, Any], CostModel] | None = None,
    fixes: bool = True,
) -> Plans:
    """The best layouts of a job on a slice, by the cost model; with `confirm`, by a compiler too.

    `slice` is a name ("v4-32") or a slice. `target` is one of `TARGETS`. `memory_limit`, in bytes a chip, counts where
    it is less than what the chip has. `mesh` fixes the mesh. `top` is how many layouts are ranked. `budget` is how many
    may be evaluated; `deadline_s` stops earlier by the clock, which makes the answer depend on the machine.
    `offload=False` keeps the optimizer's state on the chips. `pipelines=True` also tries stages of layers, for a
    job that can run as a pipeline (`training_job`); a `mesh` with an axis "pipeline" asks for them too. The knob
    "accumulate" is then how many microbatches follow each other through the stages. `model(job, slice)` makes another
    cost model.

    `confirm` takes a layout and returns an object with `error` (a string, or None) and `total_bytes` of a chip (or
    None): what the compiler refuses is refused, and its bytes replace the estimate's. When nothing fits, `best` is None
    and `fixes` has the changes that would, the cheapest first; `fixes=False` does not look for them.
    """
    if target not in TARGETS:
        raise unknown_name("optimization_target", target, TARGETS)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise rule_error("top is a whole number from 1 up", repr(top), "use 3")
    slice = slice_by_name(slice) if isinstance(slice, str) else slice
    limit = float(slice.chip.capacity_bytes)
    if memory_limit is not None:
        if not 0 < memory_limit < math.inf:
            raise rule_error("memory_limit is a positive number of bytes a chip", repr(memory_limit), "use 30 * 2**30")
        limit = min(limit, float(memory_limit))
    given = mesh_axes(mesh, slice.chips)
    cost = model(job, slice) if model else PaperModel(job, slice, memory_limit=limit, calibration=calibration)
    space = Space(
        cost.anatomy(),
        slice.chips,
        job.knobs,
        mesh=given,
        memory_limit=limit,
        offload=offload,
        pipelines=pipelines,
        why_no_stages=job.why_no_stages() if pipelines or "pipeline" in dict(given or ()) else "",
    )
    run = Exploration(space, cost, target, budget, deadline_s)
    run.go()
    plans = _plans(run, job, slice, top, confirm)
    if plans.best is None and fixes:
        from capibara.parallel.fixes import changes_that_fit

        again = {
            "target": target,
            "memory_limit": memory_limit,
            "calibration": calibration,
            "offload": offload,
            "pipelines": pipelines,
            "model": cost.elsewhere if model is None and isinstance(cost, PaperModel) else model,
        }
        untried = tuple(
            f"{change} was not tried: the program refuses it ({why})" for change, why in job.not_smaller.items()
        )
        found = changes_that_fit(job, slice, mesh, again, _least_bytes(plans))
        plans = replace(plans, fixes=found, notes=(*plans.notes, *untried))
    return plans


def _least_bytes(plans: Plans) -> float | None:
    near = plans.closest
    return None if near is None else near.bytes


def _plans(run: Exploration, job: Job, slice: Any, top: int, confirm: Callable[[Layout], Any] | None) -> Plans:
    """The best of each kind of layout, confirmed where a compiler was given, and why the others are out."""
    ordered = sorted(run.results.values(), key=run.worth)
    refused = [_refusal(result, run.space) for result in ordered if not result.fits]
    kinds: dict[Any, Ranked] = {}
    for result in ordered:
        if result.fits and result.layout is not None and result.estimate is not None:
            kind = (result.layout.mesh, result.layout.specs)
            kinds.setdefault(kind, Ranked(result.layout, result.estimate))
    ranked: list[Ranked] = []
    for one in kinds.values():
        if len(ranked) == top:
            break
        seen = one if confirm is None else _confirmed(one, confirm)
        ranked += [seen] if isinstance(seen, Ranked) else []
        refused += [seen] if isinstance(seen, Refused) else []
    return Plans(
        job=job,
        slice=slice,
        target=run.target,
        ranked=tuple(ranked),
        refused=tuple(refused),
        evaluations=run.evaluations,
        notes=job.notes,
    )


def _refusal(result: Result, space: Space) -> Refused:
    reason, needed = result.reason, result.bytes
    if result.estimate is not None:
        memory = result.estimate.memory
        needed = memory.total
        reason = f"needs {bytes_in_words(memory.total, memory.limit)} a chip, most at {memory.peak_at}"
    return Refused(result.layout, reason, space.words(result.point), result.estimate, needed)


def _confirmed(one: Ranked, confirm: Callable[[Layout], Any]) -> Ranked | Refused:
    said = confirm(one.layout)
    if said.error:
        return Refused(one.layout, f"the compiler refused it: {said.error}", one.layout.name, one.estimate)
    if said.total_bytes is None:
        return replace(one, confirmed=True)
    # What the arguments take is known; the rest of the compiler's bytes are what it needs beside them.
    memory = replace(one.estimate.memory, temporaries=said.total_bytes - one.estimate.memory.arguments)
    if not memory.fits:
        text = f"the compiler needs {bytes_in_words(memory.total, memory.limit)} a chip"
        return Refused(one.layout, text, one.layout.name, one.estimate)
    return replace(one, estimate=replace(one.estimate, memory=memory), confirmed=True)
