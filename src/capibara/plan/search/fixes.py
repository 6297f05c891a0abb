"""When nothing fits: the changes with which something does, each tried by the same model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from capibara.hardware.topology import Slice, slice_by_name, slice_names
from capibara.mesh.mesh import MeshConfig
from capibara.parallel.job import Job
from capibara.plan.search.plans import Fix, Plans

__all__ = ["changes_that_fit"]

_HALVINGS = 4
_LARGER = 4
_GPUS_OF_A_HOST = (1, 2, 4, 8)
# A look at whether and how well a change helps; the full search follows when the user makes it.
_BUDGET = 60
# Two sizes of a batch tell what is needed without any; another layout that is best there may need this much less.
_SLACK = 1.25


def changes_that_fit(
    search: Callable[..., Plans],
    job: Job,
    slice: Any,
    mesh: MeshConfig | Mapping[str, int] | None,
    options: Mapping[str, Any],
    bytes: float | None = None,
    deadline_s: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> tuple[tuple[Fix, ...], bool]:
    """Every change that was found to fit, the cheapest (chip-seconds a token) first, and whether all were tried.

    Each is tried by `search`, the search that found nothing. `bytes` is what the job needs of a chip as it is: two
    sizes of a batch tell whether any smaller one can fit. After `deadline_s` no other change is tried.
    """
    limit = options["memory_limit"] or float(slice.chip.capacity_bytes)
    started = time.monotonic()
    out_of_time: list[str] = []

    def tried(change: str, changed: Job, slice: Any, mesh: Any, **more: Any) -> Fix | float | None:
        left = None if deadline_s is None else deadline_s - (time.monotonic() - started)
        if left is not None and left <= 0:
            out_of_time.append(change)
            return None
        if tell is not None:
            tell(f"nothing fits; trying {change}")
        keywords = {**options, **more, "deadline_s": left}
        if changed is not job:  # The same places of other arrays are another layout.
            keywords["without"] = ()
        plans = search(changed, slice, mesh=mesh, top=1, budget=_BUDGET, fixes=False, **keywords)
        if plans.best is None:
            out_of_time.extend([] if plans.complete else [change])
            return None if plans.closest is None else plans.closest.bytes
        needed = plans.best.estimate.memory.total
        # A model with a limit of its own may not know this one.
        return needed if needed > limit else Fix(change, slice, changed, plans.best.layout, plans.best.estimate)

    def first(chain: Iterator[Try]) -> Fix | None:
        """The first of a chain of growing changes that fits."""
        for one in chain:
            found = tried(*one)
            if isinstance(found, Fix):
                return found
            if out_of_time:  # To make the next job takes time too.
                return None
        return None

    def smaller() -> Iterator[Fix]:
        """The least that each dimension of the batch has to shrink by."""
        for chain in _smaller(job, slice, mesh):
            whole = bytes
            for one in chain:
                found = tried(*one)
                if isinstance(found, Fix):
                    yield found
                    break
                if out_of_time:
                    return
                # What half of a batch did not save is needed without any batch, by less of a sequence too.
                if whole is not None and found is not None and 2 * found - whole > _SLACK * limit:
                    return
                whole = found

    single: list[Try] = [*_other_knobs(job, slice, mesh)]
    single += [("a mesh of another shape", job, slice, None)] if mesh is not None else []
    answers = [tried(*one) for one in single]
    if not options["offload"]:
        answers.append(tried("the optimizer's state on the host", job, slice, mesh, offload=True))
    found = [one for one in answers if isinstance(one, Fix)]
    found += smaller()
    more = first(_more_chips(job, slice, mesh))
    found += [] if more is None else [more]
    if not found and not out_of_time:
        # One change is not enough: more chips and a smaller batch together.
        both = first(_together(job, slice, mesh))
        found = [] if both is None else [both]
    return tuple(sorted(found, key=lambda fix: (fix.cost, fix.change))), not out_of_time


Try = tuple[str, Job, Any, Any]


def _other_knobs(job: Job, slice: Any, mesh: Any) -> Iterator[Try]:
    """Each knob's values that nobody asked to try."""
    for name, values in job.beyond.items():
        text = " or ".join(str(value) for value in values)
        yield f"{name} {text}", replace(job, knobs=MappingProxyType({**job.knobs, name: values})), slice, mesh


def _smaller(job: Job, slice: Any, mesh: Any) -> Iterator[Iterator[Try]]:
    for change in job.smaller:
        yield _halved(change, job, slice, mesh)


def _halved(change: str, job: Job, slice: Any, mesh: Any) -> Iterator[Try]:
    subject = change.removeprefix("half ")
    for times in range(1, _HALVINGS + 1):
        make = job.smaller.get(change)
        if make is None:
            return
        job = make()
        yield (change if times == 1 else f"1/{2**times} of {subject}"), job, slice, mesh


def _more_chips(job: Job, slice: Any, mesh: Any) -> Iterator[Try]:
    """The next larger slices of the same chip, or more GPUs of a host, by doubling; a given mesh grows along its data
    axis."""
    if not isinstance(slice, Slice) or slice.chip.platform not in ("tpu", "gpu"):
        return
    if slice.chip.platform == "tpu":
        sizes = {one.chips: (one, f"{one}") for one in map(slice_by_name, slice_names(slice.chip))}
    else:
        sizes = {
            many: (Slice(f"{slice.chip.name}x{many}", slice.chip, (many,)), f"{slice.chip.name}x{many} of one host")
            for many in _GPUS_OF_A_HOST
        }
    for times in range(1, _LARGER + 1):
        larger, text = sizes.get(slice.chips * 2**times, (None, ""))
        if larger is None:
            continue
        grown = mesh
        if mesh is not None:
            axes = mesh.axes if isinstance(mesh, MeshConfig) else dict(mesh)
            grown = {**axes, "data": axes.get("data", 1) * 2**times}
        yield text, job, larger, grown


def _together(job: Job, slice: Any, mesh: Any) -> Iterator[Try]:
    for text, _, larger, grown in _more_chips(job, slice, mesh):
        for change in job.smaller:
            for words, smaller, _, _ in _halved(change, job, slice, mesh):
                yield f"{text} and {words}", smaller, larger, grown
