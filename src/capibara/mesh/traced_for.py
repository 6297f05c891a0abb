"""The mesh that a function is traced for: jax's own, or that of a plan, whose chips are not there.

A function that writes a shard_map asks `mesh_in_force` for its mesh. A planner traces once for all meshes as long as
nobody asks; of a function that does, each mesh has a trace of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax
from jax.sharding import AbstractMesh, AxisType

__all__ = ["TracedFor", "mesh_in_force", "traced_for"]


@dataclass
class TracedFor:
    """A trace without devices."""

    mesh: AbstractMesh | None
    """Of the plan; None while nothing is laid out yet."""
    asked: bool = False
    """Whether the function wanted to know: then another mesh is another trace."""
    places: set[str] | None = field(default_factory=set)
    """Logical axes whose rules it goes by, so that other rules for them are another trace; None for all."""


_PLANNED: ContextVar[TracedFor | None] = ContextVar("capibara_traced_for", default=None)


def mesh_in_force(places: Iterable[str] | None = None) -> AbstractMesh:
    """The mesh of the code that calls, in a shard_map with the axes that it has taken; an empty one where none is.

    `places` are the logical axes whose rules the caller goes by then; all of them where it does not say.
    """
    around = jax.sharding.get_abstract_mesh()
    planned = _PLANNED.get()
    if planned is None or not around.empty:
        return around
    planned.asked = True
    if places is None or planned.places is None:
        planned.places = None
    else:
        planned.places.update(places)
    return around if planned.mesh is None else planned.mesh


@contextlib.contextmanager
def traced_for(axis_sizes: Mapping[str, int] | None) -> Iterator[TracedFor]:
    """Inside, functions are traced for a mesh with these axes, which needs no devices; None is for no mesh yet."""
    mesh = None
    if axis_sizes is not None:
        names = tuple(axis_sizes)
        mesh = AbstractMesh(tuple(axis_sizes[a] for a in names), names, axis_types=(AxisType.Auto,) * len(names))
    token = _PLANNED.set(made := TracedFor(mesh))
    try:
        yield made
    finally:
        _PLANNED.reset(token)
