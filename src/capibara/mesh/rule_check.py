"""A table of rules held against a mesh: what is dropped, what excludes what, which mesh axes nothing uses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.axes import Rules, checked_rules, mesh_axes_of
from capibara.errors import rule_error, unknown_name

__all__ = ["RuleCheck", "check_rules"]


@dataclass(frozen=True)
class RuleCheck:
    """What `check_rules` found; `str` of it is the same in words."""

    exclusive: tuple[tuple[str, str, str], ...]
    """Two logical axes and the mesh axis both go on: no array can have both, and one that does is refused."""
    absent: tuple[tuple[str, str], ...]
    """A logical axis and a mesh axis of its rule that the mesh does not have: that part of the rule is dropped."""
    unused: tuple[str, ...]
    """Mesh axes of more than one device that no rule uses: along them arrays are copied, not split."""

    def __str__(self) -> str:
        lines = [f"{a!r} and {b!r} cannot be in one array: both go on {axis!r}" for a, b, axis in self.exclusive]
        lines += [f"{name!r} is not split over {axis!r}: the mesh has no such axis" for name, axis in self.absent]
        lines += [f"no rule uses the mesh axis {axis!r}" for axis in self.unused]
        return "\n".join(lines) or "every rule finds its mesh axis, and no two share one"


def check_rules(rules: Rules, mesh: Any, *, strict: bool = False) -> RuleCheck:
    """What these rules do on a mesh (a jax Mesh, a MeshConfig, or a mapping of axis names to sizes).

    Two names of one array on one mesh axis are an error where they are used, by name; this finds the pairs beforehand.
    A mesh axis that is absent drops its rule, which is how one table serves every mesh; with `strict` it is an error
    that names the nearest axis.

    Examples:
        >>> check_rules({"batch": "data", "mlp": "model"}, {"data": 4, "model": 8}).exclusive
        ()
        >>> print(check_rules({"heads": "model", "mlp": "model"}, {"model": 8}))
        'heads' and 'mlp' cannot be in one array: both go on 'model'
    """
    table = {name: mesh_axes_of(value) for name, value in checked_rules(rules).items()}
    sizes = _axis_sizes(mesh)
    absent = tuple((name, axis) for name, axes in table.items() for axis in axes if axis not in sizes)
    if strict and absent:
        raise unknown_name(f"mesh axis, in the rule for {absent[0][0]!r}:", absent[0][1], sizes)
    exclusive = tuple(
        (first, second, axis)
        for first, second in itertools.combinations(table, 2)
        for axis in table[first]
        if axis in table[second] and axis in sizes
    )
    used = {axis for axes in table.values() for axis in axes}
    return RuleCheck(exclusive, absent, tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used))


def _axis_sizes(mesh: Any) -> dict[str, int]:
    # A MeshConfig's shape is a tuple and its axes a mapping; of a jax mesh the shape is the mapping.
    for found in (mesh, getattr(mesh, "axes", None), getattr(mesh, "shape", None)):
        if isinstance(found, Mapping):
            return dict(found)
    raise rule_error("A mesh is a jax Mesh, a MeshConfig or a mapping of axis names to sizes", repr(mesh), "pass one")
