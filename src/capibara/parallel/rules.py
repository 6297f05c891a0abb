"""Logical axis names, the one table that puts them on mesh axes, and constraints written with them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from capibara.errors import rule_error, unknown_name
from capibara.parallel import context

__all__ = ["RULES", "partition_spec", "with_sharding_constraint"]

_log = logging.getLogger(__name__)

RULES: Mapping[str, str] = MappingProxyType(
    {
        "batch": "data",
        "hidden": "model",
        "heads": "model",
        "mlp": "model",
        "vocab": "model",
        "expert": "expert",
        "sequence": "sequence",
        "stage": "pipeline",
    }
)
"""Logical axis -> mesh axis. To lay a model out differently, pass another table as `rules`."""


def partition_spec(
    names: Sequence[str | None],
    axis_sizes: Mapping[str, int],
    shape: Sequence[int] | None = None,
    rules: Mapping[str, str] = RULES,
) -> PartitionSpec:
    """The PartitionSpec of these logical names on a mesh with these axes.

    A name whose mesh axis is absent leaves its dimension whole, and so does, when `shape` is given, an axis
    that does not divide the dimension. None leaves a dimension whole, and so are those after the last name.

    Examples:
        >>> tuple(partition_spec(("batch", None, "hidden"), {"data": 4, "model": 8}))
        ('data', None, 'model')
    """
    return PartitionSpec(*_entries(names, axis_sizes, shape, rules))


def with_sharding_constraint(
    x: Any,
    axes: Sequence[str | None] | PartitionSpec | Sharding | None,
    *,
    rules: Mapping[str, str] = RULES,
) -> Any:
    """Ask that `x` is laid out so; `x` itself when no mesh is active.

    `axes` names a logical axis for each dimension (`("batch", "hidden")`), or is a PartitionSpec for the
    active mesh, or a Sharding, which is jax's own call. `x` may be a pytree whose leaves all take these axes.
    """
    if isinstance(axes, Sharding):
        return jax.lax.with_sharding_constraint(x, axes)
    if isinstance(axes, PartitionSpec):
        return jax.tree.map(lambda leaf: _constrain(leaf, axes), x)
    return jax.tree.map(lambda leaf: _constrain_logical(leaf, axes, rules), x)


def _constrain_logical(leaf: Any, names: Any, rules: Mapping[str, str]) -> Any:
    names, shape = _checked(names, rules), jax.numpy.shape(leaf)
    if len(names) > len(shape):
        raise rule_error(
            "There is at most one axis name a dimension",
            f"{len(names)} names {names} for an array of shape {shape}",
            "drop the names that are too many",
        )
    axis_sizes = _mesh_axes()
    entries = _entries(names, axis_sizes, shape, rules)
    if not axis_sizes or (any(names) and not any(entries)):
        # Nothing of what was asked exists on this mesh: to force a whole copy on every device is not it.
        return leaf
    return _constrain(leaf, PartitionSpec(*entries))


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
    names: Any, axis_sizes: Mapping[str, int], shape: Sequence[int] | None, rules: Mapping[str, str]
) -> tuple[str | None, ...]:
    entries: list[str | None] = []
    taken: dict[str, str] = {}
    for position, name in enumerate(_checked(names, rules)):
        axis = "" if name is None else rules[name]
        if name is None or axis not in axis_sizes:
            entries.append(None)
            continue
        if axis in taken:
            raise rule_error(
                "A mesh axis can split one dimension of an array",
                f"{taken[axis]!r} and {name!r}, which both go on {axis!r}",
                f"write None for one of them, or pass rules= that put {name!r} on another axis",
            )
        taken[axis] = name
        if shape is not None and shape[position] % axis_sizes[axis]:
            _say_not_divided(name, axis, shape[position], axis_sizes[axis])
            entries.append(None)
        else:
            entries.append(axis)
    return tuple(entries)


def _checked(names: Any, rules: Mapping[str, str]) -> tuple[str | None, ...]:
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


@functools.cache
def _say_not_divided(name: str, axis: str, dimension: int, size: int) -> None:
    _log.warning(
        "logical axis %r stays whole: a dimension of %d does not divide over the %d devices of mesh axis %r",
        name,
        dimension,
        size,
        axis,
    )
