"""`jax.experimental.maps.xmap`, which jax removed: axes by their names, as nested `jax.vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from capibara.errors import rule_error

Axes = dict[int, Hashable]
"""Which dimension of an array has which name."""


def xmap(
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    *,
    axis_sizes: Mapping[Hashable, int] | None = None,
    axis_resources: Mapping[Hashable, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    backend: str | None = None,
) -> Callable[..., Any]:
    """Run `fun` for every index of the named axes; collectives inside it know the names.

    Each named axis is a `jax.vmap` with that name, and the whole is jitted. Inside `with mesh:`, the arguments and
    results lie over the mesh axes that `axis_resources` gives their names; XLA then splits the work as they lie.

    Args:
        in_axes: A dict of dimension -> name, or names in the order of the dimensions with `...` behind them, for each
            argument; one stands for all arrays below it.
        out_axes: The same of the results.
        axis_sizes: Of names that no argument has.
        axis_resources: Name -> axis of the mesh, or a tuple of them.
        donate_argnums: As of `jax.jit`.
        backend: As of `jax.jit`.
    """
    sizes, resources = dict(axis_sizes or {}), dict(axis_resources or {})
    for name, where in resources.items():
        for one in where if isinstance(where, tuple) else (where,):
            if not isinstance(one, str):
                raise rule_error(
                    "axis_resources of xmap are axes of a mesh", f"{name!r}: {one!r}", "name an axis, or leave it out"
                )

    def mapped(*args: Any) -> Any:
        given = _spread(in_axes, args, "in_axes")
        wanted = jax.tree.map(_parse, out_axes, is_leaf=_is_axes)
        names = list(dict.fromkeys(name for axes in given for name in axes.values()))
        names += [name for name in sizes if name not in names]
        leaves, structure = jax.tree.flatten(args)
        leaves = [_laid(leaf, axes, resources) for leaf, axes in zip(leaves, given, strict=True)]

        def inner(*flat: Any) -> Any:
            return fun(*jax.tree.unflatten(structure, flat))

        # From the inside out: the axes that come after this one are gone when it is mapped, and those before are not.
        for number in reversed(range(len(names))):
            outer, name = names[:number], names[number]
            inner = jax.vmap(
                inner,
                in_axes=tuple(_position(axes, name, outer) for axes in given),
                out_axes=jax.tree.map(functools.partial(_position, name=name, outer=outer), wanted, is_leaf=_is_axes),
                axis_name=name,
                axis_size=sizes.get(name),
            )
        result = inner(*leaves)
        results, structure_out = jax.tree.flatten(result)
        places = _spread(wanted, result, "out_axes")
        laid = [_laid(leaf, axes, resources) for leaf, axes in zip(results, places, strict=True)]
        return jax.tree.unflatten(structure_out, laid)

    where = {} if backend is None else {"backend": backend}  # jax warns of the argument
    return jax.jit(mapped, donate_argnums=donate_argnums, **where)


def _is_axes(entry: Any) -> bool:
    """A dict of dimension -> name, or names that end in `...`; a plain tuple is a tree of them."""
    if isinstance(entry, dict):
        return all(isinstance(key, int) for key in entry)
    return isinstance(entry, tuple | list) and bool(entry) and entry[-1] is ...


def _parse(entry: Any) -> Axes:
    if not _is_axes(entry):
        raise rule_error(
            "in_axes and out_axes of xmap are dicts of dimension -> name, or names with ... behind them",
            repr(entry),
            'write {0: "x"} or ["x", ...]',
        )
    if isinstance(entry, dict):
        if any(position < 0 for position in entry):
            raise rule_error("Dimensions of xmap count from the first", repr(entry), "use 0, 1, …")
        return dict(entry)
    return {position: name for position, name in enumerate(entry[:-1]) if name is not None}


def _spread(prefix: Any, tree: Any, what: str) -> list[Axes]:
    """For every leaf of a tree, the axes that its place in the prefix has."""
    parsed = jax.tree.map(_parse, prefix, is_leaf=_is_axes)
    try:
        spread = jax.tree.map(lambda axes, below: [axes] * len(jax.tree.leaves(below)), parsed, tree, is_leaf=_is_axes)
    except ValueError as error:
        raise rule_error(
            f"{what} of xmap has the structure of what it is of", repr(prefix), "give each its own"
        ) from error
    found = jax.tree.leaves(spread, is_leaf=lambda one: isinstance(one, list))
    return [axes for several in found for axes in several]


def _position(axes: Axes, name: Hashable, outer: Sequence[Hashable]) -> int | None:
    """Where an axis is while only those in `outer` are gone from the array; None where the array has it not."""
    for position, own in axes.items():
        if own == name:
            return position - sum(other < position and before in outer for other, before in axes.items())
    return None


def _laid(leaf: Any, axes: Axes, resources: Mapping[Hashable, Any]) -> Any:
    """A whole array, laid over the mesh axes of its named dimensions, inside `with mesh:`."""
    if not any(name in resources for name in axes.values()):
        return leaf
    from jax._src.mesh import thread_resources  # what `with mesh:` sets; jax.set_mesh sets another thing

    mesh = thread_resources.env.physical_mesh
    if mesh.empty:
        return leaf
    spec = [resources.get(axes[position]) if position in axes else None for position in range(max(axes) + 1)]
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
