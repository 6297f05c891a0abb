"""Where a sequence-parallel call runs: on global arrays over a mesh, or on one device's shards inside shard_map."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from capibara.errors import rule_error, unknown_name

Axes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Placement:
    """`mesh` is None inside a shard_map that has taken the axis: the arrays are shards already."""

    axis: str
    devices: int
    mesh: Mesh | AbstractMesh | None = None
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def size(self, names: tuple[str, ...]) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape[name] for name in names)

    @property
    def explicit(self) -> bool:
        assert self.mesh is not None
        return any(kind == AxisType.Explicit for kind in self.mesh.axis_types)

    def spec(self, *, heads: bool, length_at: int) -> PartitionSpec:
        """The split of [batch, heads, length, ...] or, without heads, of [batch, length]."""
        entries: list[Any] = [None] * (length_at + 1)
        entries[0] = self.batch or None
        if heads:
            entries[1] = self.heads or None
        entries[length_at] = self.axis
        return PartitionSpec(*entries)


def placement(mesh: Any, axis: Any, batch_axis_name: Axes, head_axis_name: Axes) -> Placement:
    """Find the mesh, and check that the axes are its own."""
    if not isinstance(axis, str):
        raise rule_error("axis_name is one mesh axis, the one that splits the sequence", repr(axis), "pass a string")
    around = jax.sharding.get_abstract_mesh()
    if axis in around.manual_axes:
        outer = {"mesh": mesh, "batch_axis_name": batch_axis_name, "head_axis_name": head_axis_name}
        given = [name for name, value in outer.items() if value is not None]
        if given:
            raise rule_error(
                f"Inside a shard_map over {axis!r} the arrays are one device's shards, split already",
                f"{' and '.join(given)}",
                f"pass axis_name={axis!r} alone",
            )
        return Placement(axis, around.shape[axis])
    if mesh is None:
        mesh = around
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise rule_error("mesh is a jax.sharding.Mesh", type(mesh).__name__, "make one with jax.make_mesh(...)")
    if mesh.empty:
        raise rule_error(
            "Sequence-parallel attention runs on a mesh",
            "no mesh",
            "pass mesh=..., or call it under jax.set_mesh(mesh)",
        )
    if around.manual_axes:
        raise rule_error(
            "Inside a shard_map, sequence-parallel attention works on the shards of an axis that it has taken",
            f"axis_name={axis!r} inside a shard_map over {', '.join(sorted(around.manual_axes))}",
            f"take {axis!r} in the surrounding shard_map too, or call it outside",
        )
    batch, heads = _names(batch_axis_name), _names(head_axis_name)
    named = (axis, *batch, *heads)
    for name in named:
        if name not in mesh.axis_names:
            raise unknown_name("mesh axis", name, mesh.axis_names)
    if len(set(named)) < len(named):
        raise rule_error(
            "A mesh axis splits one thing: the sequence, the batch or the heads",
            f"axis_name={axis!r}, batch_axis_name={batch_axis_name!r}, head_axis_name={head_axis_name!r}",
            "name each axis once",
        )
    return Placement(axis, mesh.shape[axis], mesh, batch, heads)


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
