"""When nothing fits: the changes with which something does, each tried by the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from capibara.hardware.topology import Slice, slice_by_name, slice_names
from capibara.parallel.job import Job
from capibara.parallel.mesh import MeshConfig
from capibara.parallel.plans import Fix

__all__ = ["changes_that_fit"]

_HALVINGS = 4
_LARGER = 4
# A look at whether and how well a change helps; the full search follows when the user makes it.
_BUDGET = 60


def changes_that_fit(
    job: Job, slice: Any, mesh: MeshConfig | Mapping[str, int] | None, options: Mapping[str, Any]
) -> tuple[Fix, ...]:
    """Every change that was found to fit, the cheapest (chip-seconds a token) first."""
    from capibara.parallel.search import search

    def tried(change: str, job: Job, slice: Any, mesh: Any, **more: Any) -> Fix | None:
        keywords = {**options, **more}
        best = search(job, slice, mesh=mesh, top=1, budget=_BUDGET, fixes=False, **keywords).best
        return None if best is None else Fix(change, slice, job, best.layout, best.estimate)

    found = [
        *(tried(*one) for one in _other_knobs(job, slice, mesh)),
        *(
            [tried("the optimizer's state on the host", job, slice, mesh, offload=True)]
            if not options["offload"]
            else []
        ),
        *([tried("a mesh of another shape", job, slice, None)] if mesh is not None else []),
        *(_smallest(tried, list(chain)) for chain in _smaller(job, slice, mesh)),
        _first(tried, _more_chips(job, slice, mesh)),
    ]
    if not any(found):
        # One change is not enough: more chips and a smaller batch together.
        found = [_first(tried, _together(job, slice, mesh))]
    return tuple(sorted((fix for fix in found if fix is not None), key=lambda fix: (fix.cost, fix.change)))


Try = tuple[str, Job, Any, Any]


def _first(tried: Callable[..., Fix | None], chain: Iterator[Try]) -> Fix | None:
    """The first of a chain of growing changes that fits."""
    for one in chain:
        fix = tried(*one)
        if fix is not None:
            return fix
    return None


def _smallest(tried: Callable[..., Fix | None], chain: list[Try]) -> Fix | None:
    """The smallest of a chain of growing changes that fits; when the largest does not, no other is tried."""
    last = tried(*chain[-1]) if chain else None
    if last is None or len(chain) == 1:
        return last
    return _first(tried, iter(chain[:-1])) or last


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
    """The next larger slices of the same chip, by doubling; a given mesh grows along its data axis."""
    if not isinstance(slice, Slice) or slice.chip.platform != "tpu":
        return  # Only TPUs come in slices with names.
    sizes = {one.chips: one for one in map(slice_by_name, slice_names(slice.chip))}
    for times in range(1, _LARGER + 1):
        larger = sizes.get(slice.chips * 2**times)
        if larger is None:
            continue
        grown = mesh
        if mesh is not None:
            axes = mesh.axes if isinstance(mesh, MeshConfig) else dict(mesh)
            grown = {**axes, "data": axes.get("data", 1) * 2**times}
        yield f"{larger}", job, larger, grown


def _together(job: Job, slice: Any, mesh: Any) -> Iterator[Try]:
    for text, _, larger, grown in _more_chips(job, slice, mesh):
        for change in job.smaller:
            for words, smaller, _, _ in _halved(change, job, slice, mesh):
                yield f"{text} and {words}", smaller, larger, grown
