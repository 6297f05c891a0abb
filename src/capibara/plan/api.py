"""`capibara.plan.plan(...)`: from a program and the name of a slice to a plan."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error
from capibara.hardware.topology import Slice
from capibara.plan import words
from capibara.plan.evidence import Witness, checked_level
from capibara.plan.money import bills
from capibara.plan.place import checked_mesh, mesh_axes, place
from capibara.plan.result import Candidate, Change, Plan
from capibara.plan.target import Recipe, load_job
from capibara.plan.work import job_line
from capibara.prices.spot import SpotAssumptions
from capibara.prices.table import PriceTable, price_table

if TYPE_CHECKING:
    from capibara.cost.calibration import Calibration
    from capibara.parallel.job import Job
    from capibara.plan.search.plans import Plans

__all__ = ["plan"]

GiB = 2**30
_MOST_CHANGES = 3
_ENDLESS = 1e18
_FEW = 40
JAX_TAKES = 0.75
"""Of a GPU's memory, by jax's allocator when nothing is set."""


def plan(
    program: Callable[..., Any] | str | Recipe | Job,
    args: Sequence[Any] | None = None,
    on: str | Slice = "v4-32",
    *,
    train: bool = False,
    optimizer: Any = None,
    roles: Sequence[str] | None = None,
    donate: Sequence[int] = (),
    tokens: int | None = None,
    mesh: str | Mapping[str, int] | None = None,
    target: str = "throughput",
    memory_limit_gb: float | None = None,
    top: int = 3,
    level: str = "analytic",
    confirm: int | None = None,
    region: str | None = None,
    pricing: PriceTable | str | Path | None = None,
    spot: SpotAssumptions | None = None,
    calibrated: bool = True,
    time_limit: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> Plan:
    """Does a program fit on a slice, how fast will it run, what will it cost, and which layout should it have?

    Nothing is run. Everything is predicted from the traced program, and with `level` checked by a compiler.

    Args:
      program: a function; or as on the command line a preset ("llama-7b", a TOML file), a Hugging Face config.json or
        folder, or "file.py:function".
      args: of a function: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
      on: a TPU slice ("v4-32" is 16 chips) or the GPUs of a host ("h200", "h200x8").
      train: `program` is `loss(params, batch)`; the step around it (gradients, optimizer, recomputation,
        accumulation) is built here.
      optimizer: for `train`: "adamw" (the default), "sgd", or an optax-like object.
      roles: of each argument: "params", "state", "batch" or "other"; found from what the program does with it when
        None (`capibara.program.argument_roles`), and the notes say how.
      donate: arguments whose memory the outputs take over.
      tokens: of one step; when None, the integers of the batch that are looked up in weights, and examples (the
        batch's rows) where there are none.
      mesh: fixes the mesh: "data=4,model=8" or a dict.
      target: "throughput", "latency" or "memory": what the best layout is best at.
      memory_limit_gb: GiB of a chip to plan with; what programs can have of it by default.
      top: how many layouts are ranked.
      level: of evidence: "analytic", "xla" (compiled for virtual CPU devices), "tpu" or "gpu" (by the chip's own
        compiler, with no chip attached).
      confirm: how many of the best layouts are compiled at that level; one by default.
      region: whose prices are taken; the chip's first one by default.
      pricing: a table, or a TOML file laid over the shipped one.
      spot: what is assumed about preemptions.
      calibrated: correct the model by what `capibara plan --calibrate` found on this chip.
      time_limit: seconds after which the search stops with the best layout so far, which the plan then says (what the
        compilers of `level` take is not counted); None searches to the end, which gives the same plan on any machine.
      tell: called with a line of text now and then, for a progress bar.
    """
    started = time.perf_counter()
    where = place(on)
    count = checked_level(level, confirm, where)
    axes = mesh_axes(mesh, where) if isinstance(mesh, str) else None if mesh is None else checked_mesh(mesh, where)
    table = pricing if isinstance(pricing, PriceTable) else price_table(pricing)
    table.find(where.chip, region)  # an unknown region is said before minutes are spent
    limit = _limit(memory_limit_gb, where)
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise rule_error("time_limit is a number of seconds above 0", repr(time_limit), "use 60, or leave it out")
    job, recipe = _job(program, args, train, optimizer, roles, donate, tokens)

    from capibara.cost.calibration import load
    from capibara.plan.search.search import search

    calibration = load(where.chip) if calibrated else None
    witness = Witness(job, where, level, count, limit, recipe, tell) if count else None
    if tell is not None:
        tell(f"searching layouts of {job.name or 'the program'} on {where.name}")
    found = search(
        job,
        where,
        target=target,
        memory_limit=None if memory_limit_gb is None else limit,
        mesh=axes,
        top=top,
        confirm=witness,
        calibration=calibration,
        deadline_s=time_limit,
        tell=tell,
    )
    candidates = _candidates(found, witness)
    out = _refused_by_compiler(found, witness)
    if not candidates:
        # The search leaves out what cannot fit before it costs it; how far from fitting the job is, is an answer.
        candidates = _however_large(job, where, axes, limit, calibration, time_limit)
    near = found.closest
    if not candidates and near is None and axes is not None:
        raise _no_layout(found, axes)
    notes = list(dict.fromkeys(found.notes))
    if found.low > 1 and found.best is not None:
        notes.append(
            f"the compiler needed up to {found.low:.2f} times the predicted bytes of what it refused: layouts that it "
            "was not asked about are shown where they fit with that too"
        )
    if calibration is not None and candidates:
        notes += words.corrections(candidates[0].estimate, calibration.chip)
    state = _state_bytes(job)
    costs = (
        bills(candidates[0].estimate, where, job.tokens, state, table, region=region, assumptions=spot)
        if found.best is not None
        else ()  # What a layout that does not fit would cost is nobody's price; the changes have theirs.
    )
    if candidates:
        if where.chips > 1 and not any(part for spec in candidates[0].layout.specs for part in spec):
            notes.append(f"no argument is divided over the {where.chips} chips: each has all of them")
        notes += _share_that_jax_takes(candidates[0], where)
        notes += [note for note in candidates[0].estimate.notes if note not in notes]
    return Plan(
        name=job.name,
        where=where,
        fits=found.best is not None,
        candidates=candidates,
        bills=costs,
        tokens=job.tokens,
        unit=job.unit,
        work=job_line(job, found.activations),
        state_bytes=state,
        refused=tuple((one.name, one.reason) for one in found.refused),
        refused_by_compiler=out,
        unasked=found.unasked,
        asked_level=level,
        complete=found.complete,
        evaluations=found.evaluations,
        time_limit=time_limit,
        closest="" if candidates or near is None else f"{near.name} {near.reason}",
        changes=_changes(found, table, region),
        notes=tuple(notes),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        planning_seconds=time.perf_counter() - started,
        job=job,
        calibration=calibration,
    )


def _no_layout(found: Plans, axes: Mapping[str, int]) -> ValueError:
    """The error for a mesh over which the program cannot be laid at all."""
    given = ",".join(f"{name}={size}" for name, size in axes.items())
    reasons = "; ".join(list(dict.fromkeys(one.reason for one in found.refused))[:3])
    other = next((fix.layout.mesh.axes for fix in found.fixes if fix.slice == found.slice), None)
    fix = "choose sizes that divide" if other is None else ",".join(f"{name}={size}" for name, size in other.items())
    return rule_error("Each axis of a mesh divides what lies on it", f"{given}: {reasons}", f"use {fix}")


def _limit(memory_limit_gb: float | None, where: Slice) -> float:
    if memory_limit_gb is None:
        return float(where.chip.capacity_bytes)
    most = where.chip.hbm_bytes / GiB
    if not 0 < memory_limit_gb <= most:
        raise rule_error(
            f"memory_limit_gb is above 0 and at most the {most:g} GiB of a {where.chip.name}",
            f"{memory_limit_gb:g}",
            f"use {where.chip.capacity_bytes / GiB:g}",
        )
    return memory_limit_gb * GiB


def _job(
    program: Any,
    args: Sequence[Any] | None,
    train: bool,
    optimizer: Any,
    roles: Sequence[str] | None,
    donate: Sequence[int],
    tokens: int | None,
) -> tuple[Job, Recipe | None]:
    from capibara.parallel.job import Job, program_job
    from capibara.parallel.training_step import training_job

    if isinstance(program, Job):
        _nothing_else(program, args=args, train=train, optimizer=optimizer, roles=roles, donate=donate, tokens=tokens)
        return program, None
    if isinstance(program, str | Recipe):
        _nothing_else(program, args=args, roles=roles, donate=donate, tokens=tokens)
        if isinstance(program, Recipe):
            _nothing_else(program, train=train, optimizer=optimizer)
            return load_job(program), program
        recipe = Recipe(program, train=train, optimizer=optimizer)
        return load_job(recipe), recipe
    if args is None:
        raise rule_error(
            "A function is planned for the shapes of its arguments",
            "a function and no args",
            "pass args=(jax.ShapeDtypeStruct(...), ...)",
        )
    if not train:
        _nothing_else(program, optimizer=optimizer)
        return program_job(program, tuple(args), roles=roles, donate=donate, tokens=tokens), None
    _nothing_else(program, roles=roles, donate=donate)
    if len(args) != 2:
        raise rule_error(
            "With train=True the function is loss(params, batch)", f"{len(args)} arguments", "pass args=(params, batch)"
        )
    return training_job(program, *args, optimizer=optimizer or "adamw", tokens=tokens), None


def _nothing_else(program: Any, **given: Any) -> None:
    """Keywords that this kind of program settles itself are refused, not ignored."""
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            kind = "a named target" if isinstance(program, str | Recipe) else "this call"
            raise rule_error(f"{name} is not taken with {kind}", f"{name}={value!r}", f"leave {name} out")


def _candidates(found: Plans, witness: Witness | None) -> tuple[Candidate, ...]:
    def said(layout: Any) -> Any:
        return None if witness is None else witness.about(layout)

    if found.ranked:
        return tuple(Candidate(one.layout, one.estimate, said(one.layout)) for one in found.ranked)
    near = found.closest
    if near is None or near.layout is None or near.estimate is None:
        return ()
    return (Candidate(near.layout, near.estimate, said(near.layout)),)


def _refused_by_compiler(found: Plans, witness: Witness | None) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(one.layout, one.estimate, None if witness is None else witness.about(one.layout))
        for one in found.by_compiler
        if one.layout is not None and one.estimate is not None
    )


def _however_large(
    job: Job,
    where: Slice,
    axes: Mapping[str, int] | None,
    limit: float,
    calibration: Calibration | None,
    time_limit: float | None,
) -> tuple[Candidate, ...]:
    """The smallest layout of a job whose arguments alone are over the limit that was set; none where they are more than
    the chip has, or where nothing divides."""
    from capibara.plan.search.search import search

    found = search(
        job,
        where,
        target="memory",
        memory_limit=_ENDLESS,
        mesh=axes,
        top=1,
        calibration=calibration,
        budget=_FEW,
        fixes=False,
        # A picture of what does not fit is worth less than the search for what does.
        deadline_s=None if time_limit is None else time_limit / 4,
    )
    if found.best is None:
        return ()
    estimate = found.best.estimate
    return (Candidate(found.best.layout, replace(estimate, memory=replace(estimate.memory, limit=limit))),)


def _changes(found: Plans, table: PriceTable, region: str | None) -> tuple[Change, ...]:
    made = []
    for fix in found.fixes[:_MOST_CHANGES]:
        bill = bills(fix.estimate, fix.slice, fix.job.tokens, 0.0, table, region=region, kinds=("on_demand",))
        memory = fix.estimate.memory
        cost = bill[0].usd_per_billion_tokens if bill else None
        made.append(
            Change(fix.change, fix.slice.name, fix.estimate.seconds, memory.total, cost, found.low * memory.total)
        )
    return tuple(made)


def _share_that_jax_takes(best: Candidate, where: Slice) -> list[str]:
    """On a GPU, what has to be set before a job has the memory that it fits into."""
    needed = best.estimate.memory.most
    if where.chip.platform != "gpu" or not best.fits or needed <= JAX_TAKES * where.chip.hbm_bytes:
        return []
    return [
        f"jax takes {JAX_TAKES:.0%} of a GPU's memory and this needs more: set "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION={min(0.97, needed / where.chip.hbm_bytes + 0.02):.2f}"
    ]


def _state_bytes(job: Job) -> float:
    """What a checkpoint of the job holds: its parameters and its optimizer's state, once."""
    import jax

    _, args = job.build(**job.defaults())
    kept = [one for role, one in zip(job.roles, args, strict=True) if role in ("params", "state")]
    return float(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)))
