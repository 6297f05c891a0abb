"""Collectives on global arrays: a leading axis with one row a device stands for what each device has.

The rows are put one on each device of the mesh, all of its axes together, and the collective runs in a shard_map. An
array without such an axis is taken as already the same everywhere. With no mesh, or on one device, nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.errors import rule_error
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.collective.axes import read_dimension


@dataclasses.dataclass(frozen=True)
class Local:
    """What one device does: a public function with its keywords, still without the axes."""

    fn: Callable[..., Any]
    given: tuple[tuple[str, Any], ...]

    def over(self, mesh: Any) -> Callable[..., Any]:
        return functools.partial(self.fn, axis_name=tuple(mesh.axis_names), **dict(self.given))

    @property
    def name(self) -> str:
        return self.fn.__name__

    def checked(self) -> bool:
        """Rings and kernels do not tell shard_map that what they return is equal everywhere."""
        return dict(self.given).get("implementation") in (None, "xla")


def each_device(fn: Callable[..., Any], mesh: Any, check_vma: bool = True) -> Callable[..., Any]:
    """`fn` of one device's arrays, as a function of arrays with a leading axis of one row a device of the mesh."""
    rows = P(mesh.axis_names)

    def one(*stacked: Any) -> Any:
        return jax.tree.map(lambda y: y[None], fn(*(x.squeeze(0) for x in stacked)))

    return jax.shard_map(one, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)


def active_mesh(mesh: Any) -> Mesh | AbstractMesh | None:
    """The mesh given, or jax's own active one; None where there is none or it has one device."""
    active = jax.sharding.get_abstract_mesh()
    if active.manual_axes:
        raise rule_error(
            "Without axis_name a collective is over a mesh, on global arrays",
            f"a call inside a shard_map over {', '.join(map(repr, active.manual_axes))}",
            "pass axis_name",
        )
    if mesh is None:
        mesh = active
        if mesh.empty:
            return None
    elif not isinstance(mesh, Mesh | AbstractMesh):
        raise rule_error("mesh is a jax Mesh", type(mesh).__name__, "pass one, or None for the active one")
    return mesh if mesh.size > 1 else None


def expect_none(who: str, mesh: Any) -> None:
    """With axis_name there is no mesh to be given."""
    if mesh is not None:
        raise rule_error(
            f"{who} with axis_name is inside shard_map, where the mesh is given",
            "axis_name and mesh",
            "pass one of them",
        )


def has_rows(x: Any, mesh: Any) -> bool:
    return x.ndim > 0 and x.shape[0] == mesh.size


def reduce_rows(local: Local, x: Any, mesh: Any) -> Any:
    mesh = active_mesh(mesh)
    if mesh is None or not has_rows(x, mesh):
        return _everywhere(x, mesh)
    return _on_rows(local, mesh, P(), local.checked())(x)


def gather_rows(local: Local, x: Any, mesh: Any, axis: int, tiled: bool) -> Any:
    mesh = active_mesh(mesh)
    if mesh is None or not has_rows(x, mesh):
        read_dimension(local.name, "axis", axis, x.ndim if tiled and x.ndim else x.ndim + 1)
        return _everywhere(x, mesh)
    # A gather's result is not marked as equal everywhere, whichever way it was made.
    return _on_rows(local, mesh, P(), False)(x)


def scatter_rows(local: Local, x: Any, mesh: Any, axis: int) -> Any:
    mesh = active_mesh(mesh)
    if mesh is None:
        read_dimension(local.name, "axis", axis, x.ndim)
        return x
    rest = x.ndim - (1 if has_rows(x, mesh) else 0)
    place = read_dimension(local.name, "axis", axis, rest)
    split = P(*[None] * place, mesh.axis_names)
    if has_rows(x, mesh):
        return _on_rows(local, mesh, split, local.checked())(x)
    if x.shape[place] % mesh.size:
        raise rule_error(
            f"{local.name} splits axis {place} of x evenly over the {mesh.size} devices of the mesh",
            describe(x),
            f"pad it to {-(-x.shape[place] // mesh.size) * mesh.size}",
        )
    return _placed(x, mesh, split)


def exchange_rows(local: Local, x: Any, mesh: Any, split_axis: int, concat_axis: int) -> Any:
    mesh = active_mesh(mesh)
    if mesh is None:
        for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis)):
            read_dimension(local.name, name, axis, x.ndim)
        return x
    if not has_rows(x, mesh):
        raise rule_error(
            f"{local.name} of a global array exchanges the rows of a leading axis, one a device of {mesh.size}",
            describe(x),
            f"reshape it to ({mesh.size}, ...), or call it inside shard_map with axis_name",
        )
    return _on_rows(local, mesh, P(mesh.axis_names), True, keep_row=True)(x)


def gather_then_multiply(local: Local, x: Any, w: Any, mesh: Any) -> Any:
    """x is split along its rows and w along its columns; so is the result."""
    return _multiply(local, x, w, mesh, x_axis=x.ndim - 2, w_axis=1, out_axis=x.ndim - 1)


def multiply_then_scatter(local: Local, x: Any, w: Any, mesh: Any) -> Any:
    """x is split along its columns and w along its rows: the contraction. The result is split along its rows."""
    return _multiply(local, x, w, mesh, x_axis=x.ndim - 1, w_axis=0, out_axis=x.ndim - 2)


def _multiply(local: Local, x: Any, w: Any, mesh: Any, *, x_axis: int, w_axis: int, out_axis: int) -> Any:
    mesh = active_mesh(mesh)
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise rule_error(
            f"{local.name} takes x [..., rows, k] and w [k, columns]",
            f"{describe(x)} and {describe(w)}",
            "transpose or reshape them so that k agrees",
        )
    if mesh is None:
        from capibara.kernels.ops.collective.reference import product

        return product(x, w).astype(jax.numpy.result_type(x, w))
    for name, array, axis in (("x", x, x_axis), ("w", w, w_axis)):
        if array.shape[axis] % mesh.size:
            raise rule_error(
                f"{local.name} splits axis {axis} of {name} evenly over the {mesh.size} devices of the mesh",
                describe(array),
                f"pad it to {-(-array.shape[axis] // mesh.size) * mesh.size}",
            )
    return _product_over(local, mesh, x_axis, w_axis, out_axis)(x, w)


@functools.lru_cache(maxsize=256)
def _product_over(local: Local, mesh: Any, x_axis: int, w_axis: int, out_axis: int) -> Callable[..., Any]:
    x_spec, w_spec, out = (P(*[None] * axis, mesh.axis_names) for axis in (x_axis, w_axis, out_axis))

    def on_global(x: Any, w: Any) -> Any:
        x, w = resharded(x, mesh, x_spec), resharded(w, mesh, w_spec)
        return jax.shard_map(local.over(mesh), mesh=mesh, in_specs=(x_spec, w_spec), out_specs=out)(x, w)

    return on_mesh(on_global, mesh)


@functools.lru_cache(maxsize=256)
def _on_rows(local: Local, mesh: Any, out: P, checked: bool, keep_row: bool = False) -> Callable[..., Any]:
    """The jitted function of a global array; kept, so that calls outside of jit trace once."""
    rows = P(mesh.axis_names)
    run = local.over(mesh)

    def one(row: Any) -> Any:
        made = run(row.squeeze(0))
        return made[None] if keep_row else made

    def on_global(x: Any) -> Any:
        x = resharded(x, mesh, rows)
        return jax.shard_map(one, mesh=mesh, in_specs=rows, out_specs=out, check_vma=checked)(x)

    return on_mesh(on_global, mesh)


def on_mesh(fn: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """`fn`, jitted, with this mesh as the active one: a shard_map takes no other."""
    jitted = jax.jit(fn)
    own = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh

    def run(*given: Any) -> Any:
        with jax.sharding.use_abstract_mesh(own):
            return jitted(*given)

    return run


def resharded(x: Any, mesh: Any, spec: P) -> Any:
    explicit = any(kind == AxisType.Explicit for kind in mesh.axis_types)
    return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if explicit else x


def _everywhere(x: Any, mesh: Any) -> Any:
    return x if mesh is None else _placed(x, mesh, P())


def _placed(x: Any, mesh: Any, spec: P) -> Any:
    """x in this layout: a promise under jit, a copy outside of it."""
    if isinstance(x, jax.core.Tracer) or isinstance(mesh, AbstractMesh):
        explicit = any(kind == AxisType.Explicit for kind in mesh.axis_types)
        place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        return place(x, NamedSharding(mesh, spec))
    return jax.device_put(x, NamedSharding(mesh, spec))
