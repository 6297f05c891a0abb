"""`search`: a job's best layouts on a slice, by the cost model, and where a compiler is given by it too."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from capibara.errors import rule_error, unknown_name
from capibara.hardware.topology import slice_by_name
from capibara.mesh.choices import mesh_axes
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.parallel.job import Job
from capibara.plan.search.confirmation import Confirmation, may_fit
from capibara.plan.search.evaluation import CostModel, PaperModel
from capibara.plan.search.exploration import BUDGET, TARGETS, Exploration, Result
from capibara.plan.search.fixes import changes_that_fit
from capibara.plan.search.plans import Plans, Ranked, Refused, bytes_in_words
from capibara.plan.search.space import PARAMETERS, Space

__all__ = ["TARGETS", "search"]

# Of the time there is, what goes into looking for a layout that fits before changes of the job are tried.
_SHARE_WITHOUT_A_FIT = 0.6


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
    parameters: Sequence[str] = PARAMETERS,
    budget: int = BUDGET,
    pipelines: bool = False,
    model: Callable[[Job, Any], CostModel] | None = None,
    fixes: bool = True,
    without: Sequence[Layout] = (),
    tell: Callable[[str], None] | None = None,
) -> Plans:
    """The best layouts of a job on a slice, by the cost model; with `confirm`, by a compiler too.

    `slice` is a name ("v4-32") or a slice. `target` is one of `TARGETS`. `memory_limit`, in bytes a chip, counts where
    it is less than what the chip has. `mesh` fixes the mesh. `top` is how many layouts are ranked. `budget` is how many
    may be evaluated; `deadline_s` stops earlier by the clock, which makes the answer depend on the machine: it is then
    the best so far, and `complete` is False (what a compiler takes is not counted). `tell` is called with a line of
    text after each layout.
    `offload=False` keeps the optimizer's state on the chips. `parameters` says what may be cut over the data axis:
    "replicated" (nothing), "optimizer" (its state), "full" (the parameters too). `pipelines=True` also tries stages of
    layers, for a job that can run as a pipeline (`training_job`); a `mesh` with an axis "pipeline" asks for them too.
    The knob "accumulate" is then how many microbatches follow each other through the stages. `model(job, slice)` makes
    another cost model.

    `confirm` takes a layout and returns an object with `error` (a string, or None) and `total_bytes` of a chip (or
    None), or None where the compiler is not asked: what it refuses is refused, with its bytes, and those of what it
    takes replace the estimate's (`confirmation` says which layouts it is asked about; one with `settles` False knows
    nothing of the chip's memory, and is asked about what fits by the model with its margin alone). When nothing fits,
    `best` is None and `fixes` has the changes that would, the cheapest first; `fixes=False` does not look for them.
    `without` are layouts that are known to be out.
    """
    if target not in TARGETS:
        raise unknown_name("optimization_target", target, TARGETS)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise rule_error("top is a whole number from 1 up", repr(top), "use 3")
    for word in parameters:
        if word not in PARAMETERS:
            raise unknown_name("parameters", word, PARAMETERS)
    started = time.monotonic()

    def left() -> float | None:
        return None if deadline_s is None else max(0.0, deadline_s - (time.monotonic() - started))

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
        parameters=tuple(parameters),
        pipelines=pipelines,
        why_no_stages=job.why_no_stages() if pipelines or "pipeline" in dict(given or ()) else "",
    )
    dear = isinstance(cost, PaperModel) and cost.asks_for_mesh
    run = Exploration(space, cost, target, budget, left(), _SHARE_WITHOUT_A_FIT if fixes else 1.0, tell, dear)
    run.go()
    searched = left()
    plans = _plans(run, job, slice, top, confirm, without)
    if isinstance(cost, PaperModel):
        plans = replace(plans, activations=cost.activations())
    if plans.best is None and fixes:
        # Where a compiler needed more than the model said, it will of a changed job too.
        tighter = None if plans.low == 1 else limit / plans.low
        again = {
            "target": target,
            "memory_limit": memory_limit if tighter is None else tighter,
            "calibration": calibration,
            "offload": offload,
            "parameters": parameters,
            "pipelines": pipelines,
            "model": (
                functools.partial(cost.elsewhere, memory_limit=tighter)
                if model is None and isinstance(cost, PaperModel)
                else model
            ),
            "without": [one.layout for one in plans.by_compiler if one.layout is not None],
        }
        untried = tuple(
            f"{change} was not tried: the program refuses it ({why})" for change, why in job.not_smaller.items()
        )
        found, all_tried = changes_that_fit(search, job, slice, mesh, again, _least_bytes(plans), searched, tell)
        plans = replace(plans, fixes=found, notes=(*plans.notes, *untried), complete=plans.complete and all_tried)
    return plans


def _least_bytes(plans: Plans) -> float | None:
    """What the job needs of a chip by the model, whose bytes a changed job's are compared with."""
    near = plans.closest
    if near is None:
        return None
    return near.bytes if near.estimate is None else near.estimate.memory.total


def _plans(
    run: Exploration,
    job: Job,
    slice: Any,
    top: int,
    confirm: Callable[[Layout], Any] | None,
    without: Sequence[Layout],
) -> Plans:
    """The best of each kind of layout, confirmed where a compiler was given, and why the others are out."""
    ordered = sorted(run.results.values(), key=run.worth)
    costed = [Ranked(r.layout, r.estimate) for r in ordered if r.layout is not None and r.estimate is not None]
    costed = [one for one in costed if one.layout not in without]
    refused = [_refusal(result, run.space) for result in ordered if not result.fits]
    plans = Plans(
        job, slice, run.target, (), tuple(refused), run.evaluations, notes=job.notes, complete=not run.cut_short
    )
    if confirm is None:
        kinds: dict[Any, Ranked] = {}
        for one in costed:
            if one.estimate.memory.fits:
                kinds.setdefault((one.layout.mesh, one.layout.specs), one)
        return replace(plans, ranked=tuple(kinds.values())[:top])
    asked = Confirmation(confirm)
    # What fits by the model alone without its margin is for a compiler that knows the chip's memory.
    settles = getattr(confirm, "settles", True)
    asked.ask([one for one in costed if one.estimate.memory.fits or (settles and may_fit(one))], top)
    # What the compiler settled is no longer what the model thought of it.
    settled = [*(one.layout for one in asked.ranked), *(one.layout for one in asked.refused)]
    kept = [one for one in refused if one.layout is None or one.layout not in settled]
    return replace(
        plans,
        ranked=tuple(asked.ranked),
        refused=(*asked.refused, *kept),
        unasked=asked.unasked,
        low=asked.low,
    )


def _refusal(result: Result, space: Space) -> Refused:
    reason, needed = result.reason, result.bytes
    if result.estimate is not None:
        memory = result.estimate.memory
        needed = memory.total
        needs = "may need" if memory.may_fit else "needs"
        words = bytes_in_words(memory.most if memory.may_fit else memory.total, memory.limit)
        reason = f"{needs} {words} a chip, most at {memory.peak_at}"
    return Refused(result.layout, reason, space.words(result.point), result.estimate, needed)
