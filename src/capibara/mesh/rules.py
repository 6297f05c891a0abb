"""Constraints and layouts written with logical axis names; `capibara.axes` has the table that places them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from capibara.axes import RULES, MeshAxes, Rules, checked_rules, current_rules, mesh_axes_of, use_rules
from capibara.errors import rule_error, say_once, unknown_name
from capibara.mesh import context
from capibara.mesh.mesh import MeshConfig

__all__ = [
    "RULES",
    "Rules",
    "current_rules",
    "logical_sharding",
    "partition_spec",
    "shard_params",
    "use_rules",
    "with_sharding_constraint",
]

Tree = TypeVar("Tree")

_log = logging.getLogger(__name__)

_Recorder: TypeAlias = Callable[[Any, tuple[str | None, ...]], Any]
RECORDER: ContextVar[_Recorder | None] = ContextVar("capibara_recorder", default=None)
"""While set, a constraint by logical names is given to it (leaf, names) instead of being laid on a mesh: a planner
writes the names down and tries tables of rules on them afterwards."""


def partition_spec(
    names: Sequence[str | None],
    axis_sizes: Mapping[str, int],
    shape: Sequence[int] | None = None,
    rules: Rules | None = None,
) -> PartitionSpec:
    """The PartitionSpec of these logical names on a mesh with these axes, by `rules` or the table in force.

    A name whose mesh axis is absent leaves its dimension whole, and so does, when `shape` is given, an axis that does
    not divide the dimension; of several axes the first ones that do are kept. None leaves a dimension whole, and so
    are those after the last name.

    Examples:
        >>> tuple(partition_spec(("batch", None, "hidden"), {"data": 4, "model": 8}))
        ('data', None, 'model')
        >>> tuple(partition_spec(("batch",), {"data": 4, "expert": 2}, rules={"batch": ("data", "expert")}))
        (('data', 'expert'),)
    """
    return PartitionSpec(*_entries(names, axis_sizes, shape, _table(rules)))


def logical_sharding(
    mesh: Mesh | MeshConfig,
    names: Sequence[str | None] | None,
    shape: Sequence[int] | None = None,
    rules: Rules | None = None,
) -> NamedSharding:
    """The sharding of an array with these logical names; no names at all: a whole copy on every device."""
    built = mesh.build() if isinstance(mesh, MeshConfig) else mesh
    if not isinstance(built, Mesh | AbstractMesh):
        raise rule_error("mesh is a jax Mesh or a MeshConfig", type(mesh).__name__, "build one over the devices")
    if shape is not None and names is not None:
        _at_most_one_name_a_dimension(tuple(names), tuple(shape))
    return NamedSharding(built, partition_spec(names or (), dict(built.shape), shape, rules))


def shard_params(tree: Tree, logical_tree: Any, mesh: Mesh | MeshConfig, rules: Rules | None = None) -> Tree:
    """The tree with every leaf laid out by its logical names.

    `logical_tree` has the tree's structure with a tuple of names, or None, at each leaf. A ShapeDtypeStruct gets the
    sharding and stays one, so that a model can be laid out before it exists.
    """
    leaves: list[Any]
    structure: Any  # jax's stubs give it no methods
    leaves, structure = jax.tree.flatten(tree)
    try:
        names = structure.flatten_up_to(logical_tree)
    except (ValueError, TypeError) as mismatch:
        raise rule_error(
            "logical_tree has a tuple of names for each leaf of the tree",
            f"another structure ({mismatch})",
            "give it the tree's own structure, with None where a leaf stays whole",
        ) from mismatch
    built = mesh.build() if isinstance(mesh, MeshConfig) else mesh
    table = _table(rules)
    return structure.unflatten(_put(leaf, one, built, table) for leaf, one in zip(leaves, names, strict=True))


def _put(leaf: Any, names: Any, mesh: Mesh, rules: Rules) -> Any:
    sharding = logical_sharding(mesh, names, jax.numpy.shape(leaf), rules)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    return jax.device_put(leaf, sharding)


def with_sharding_constraint(
    x: Tree,
    names: Sequence[str | None] | PartitionSpec | Sharding | None,
    *,
    rules: Rules | None = None,
) -> Tree:
    """Ask that `x` is laid out so; `x` itself when no mesh is active.

    `names` has a logical axis for each dimension (`("batch", "hidden")`), placed by `rules` or by the table in force
    (`use_rules`). Or it is a PartitionSpec for the active mesh, or a Sharding, which is jax's own call. `x` may be a
    pytree whose leaves all take these names.
    """
    if isinstance(names, Sharding):
        return jax.lax.with_sharding_constraint(x, names)
    if isinstance(names, PartitionSpec):
        return jax.tree.map(lambda leaf: _constrain(leaf, names), x)
    table = _table(rules)
    return jax.tree.map(lambda leaf: _constrain_logical(leaf, names, table), x)


def _table(rules: Rules | None) -> Rules:
    return current_rules() if rules is None else checked_rules(rules)


def _constrain_logical(leaf: Any, names: Any, rules: Rules) -> Any:
    names, shape = _checked(names, rules), jax.numpy.shape(leaf)
    _at_most_one_name_a_dimension(names, shape)
    recorder = RECORDER.get()
    if recorder is not None:
        return recorder(leaf, names)
    axis_sizes = _mesh_axes()
    entries = _entries(names, axis_sizes, shape, rules)
    split = any(name is not None and mesh_axes_of(rules[name]) for name in names)
    if not axis_sizes or (split and not any(entries)):
        # Nothing of what was asked exists on this mesh: to force a whole copy on every device is not it. Names whose
        # rules say None do ask for that.
        return leaf
    return _constrain(leaf, PartitionSpec(*entries))


def _at_most_one_name_a_dimension(names: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    if len(names) > len(shape):
        raise rule_error(
            "There is at most one axis name a dimension",
            f"{len(names)} names {names} for an array of shape {shape}",
            "drop the names that are too many",
        )


def _constrain(leaf: Any, spec: PartitionSpec) -> Any:
    held = context.task_mesh()
    if held is not None:
        return jax.device_put(leaf, NamedSharding(held, spec))
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return leaf if _legacy_mesh() is None else jax.lax.with_sharding_constraint(leaf, spec)
    if AxisType.Explicit in mesh.axis_types:
        # On such a mesh the layout is part of the type, and jax's constraint only asserts it.
        return jax.sharding.reshard(leaf, spec)
    if isinstance(leaf, jax.core.Tracer):
        return _constrain_traced(leaf, spec)
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # a constant inside of a trace
        return _constrain_traced(leaf, spec)
    return jax.device_put(leaf, NamedSharding(concrete, spec))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _constrain_traced(leaf: Any, spec: PartitionSpec) -> Any:
    # In a jit of its own, so that it also works under a grad or vmap that nobody jitted.
    return jax.lax.with_sharding_constraint(leaf, spec)


def _entries(
    names: Any, axis_sizes: Mapping[str, int], shape: Sequence[int] | None, rules: Rules
) -> tuple[MeshAxes, ...]:
    entries: list[MeshAxes] = []
    taken: dict[str, str] = {}
    for position, name in enumerate(_checked(names, rules)):
        wanted = () if name is None else tuple(axis for axis in mesh_axes_of(rules[name]) if axis in axis_sizes)
        for axis in wanted:
            if axis in taken:
                raise rule_error(
                    "A mesh axis can split one dimension of an array",
                    f"{taken[axis]!r} and {name!r}, which both go on {axis!r}",
                    f"write None for one of them, or pass rules= that put {name!r} on another axis",
                )
            taken[axis] = str(name)
        if shape is not None:
            wanted = _that_divide(str(name), wanted, shape[position], axis_sizes)
        entries.append(None if not wanted else wanted[0] if len(wanted) == 1 else wanted)
    return tuple(entries)


def _that_divide(name: str, wanted: tuple[str, ...], dimension: int, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The first of the wanted mesh axes, as many as divide the dimension together."""
    kept = wanted
    while kept and dimension % math.prod(axis_sizes[axis] for axis in kept):
        devices = math.prod(axis_sizes[axis] for axis in kept)
        text = "logical axis %r stays whole: a dimension of %d does not divide over the %d devices of mesh axis %r"
        values: tuple[object, ...] = (name, dimension, devices, *kept)
        if len(kept) > 1:
            text = (
                "logical axis %r is not split over %r: a dimension of %d does not divide over the %d devices of mesh "
                "axes %s"
            )
            values = (name, kept[-1], dimension, devices, kept)
        say_once(_log, values, text, *values)
        kept = kept[:-1]
    return kept


def _checked(names: Any, rules: Rules) -> tuple[str | None, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise rule_error(
            "Axes are a tuple with a logical name or None for each dimension, a PartitionSpec or a Sharding",
            repr(names),
            'use ("batch", "hidden")',
        )
    for name in names:
        if name is not None and name not in rules:
            raise unknown_name("logical axis", name, rules)
    return tuple(names)


def is_placing() -> bool:
    """Whether logical names are put to use here: on a mesh of several devices, or by a planner that notes them."""
    return RECORDER.get() is not None or math.prod(_mesh_axes().values()) > 1


def _mesh_axes() -> dict[str, int]:
    """Axes of the active mesh that a constraint may use, from whichever way it was set."""
    held = context.task_mesh()
    if held is not None:
        return dict(held.shape)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        legacy = _legacy_mesh()
        return {} if legacy is None else dict(legacy.shape)
    # Inside shard_map the array is already the part of the axes that are manual there.
    return {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}


def _legacy_mesh() -> Any:
    """The mesh of a bare `with mesh:`, which jax deprecates and still supports; only its inside knows it."""
    from jax._src import mesh as internal

    resources = getattr(internal, "thread_resources", None)
    found = None if resources is None else resources.env.physical_mesh
    return None if found is None or found.empty else found
