"""The linear recurrence with time split over devices.

Each device has a piece of time. What a piece does to the state that enters it is a product and a sum: (product of its
decays, its last state from a start at zero). Devices combine those pairs in log2(devices) exchanges with neighbours
1, 2, 4, ... away, after which each knows the state that enters its piece and computes it. Two passes over the piece,
and exchanges of one step's size.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Inexact

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.varying import vary_alike
from capibara.kernels.ops.scan.recurrence.api import LINEAR_RECURRENCE, LINEAR_RECURRENCE_GRAD
from capibara.kernels.ops.scan.recurrence.layout import read_flag, read_operands
from capibara.kernels.ops.scan.recurrence.reference import state_type


@overload
def sequence_parallel_recurrence(
    a: Array, b: Array, initial_state: Array | None = None, *, axis_name: str, mesh: Mesh | None = None,
    spec: PartitionSpec | None = None, reverse: bool = False, axis: int = 1, return_state: Literal[False] = False,
    implementation: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def sequence_parallel_recurrence(
    a: Array, b: Array, initial_state: Array | None = None, *, axis_name: str, mesh: Mesh | None = None,
    spec: PartitionSpec | None = None, reverse: bool = False, axis: int = 1, return_state: Literal[True],
    implementation: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def sequence_parallel_recurrence(
    a: Array, b: Array, initial_state: Array | None = None, *, axis_name: str, mesh: Mesh | None = None,
    spec: PartitionSpec | None = None, reverse: bool = False, axis: int = 1, return_state: bool,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def sequence_parallel_recurrence(
    a: Inexact[Array, "*decays"],
    b: Inexact[Array, "*terms"],
    initial_state: Inexact[Array, "*state"] | None = None,
    *,
    axis_name: str,
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
    reverse: bool = False,
    axis: int = 1,
    return_state: bool = False,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """`linear_recurrence` over a sequence that is split over the devices of a mesh axis.

    Without `mesh` it is called inside `jax.shard_map`: a and b are this device's piece of time, and `initial_state` is
    the state before the whole sequence, the same on every device (the first in time uses it). With `mesh` the arrays
    are whole ones, split here. It differentiates: the gradient runs the other way, over the devices too.

    Args:
      a, b, initial_state, reverse, axis, implementation: as `linear_recurrence` takes them.
      axis_name: the mesh axis that time is split over. Pieces follow each other in the order of its devices.
      mesh: the mesh, for whole arrays. Time need not divide: it is padded, and cut again.
      spec: how whole arrays are split, one entry for each of b's axes, with `axis_name` at that of time; by default
        time alone is split. Needs `mesh`.
      return_state: return (h, final); the final state is the same on every device.

    >>> from jax.sharding import AxisType
    >>> mesh = jax.make_mesh((2,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    >>> a, b = jnp.full((1, 4, 1), 0.5), jnp.ones((1, 4, 1))
    >>> sequence_parallel_recurrence(a, b, axis_name="time", mesh=mesh)[0, :, 0].tolist()
    [1.0, 1.5, 1.75, 1.875]
    """
    a, b, initial_state, layout = read_operands("sequence_parallel_recurrence", a, b, initial_state, axis)
    reverse, return_state = read_flag("reverse", reverse), read_flag("return_state", return_state)

    def local(a: Any, b: Any, initial_state: Any) -> Any:
        a, b, initial_state, layout = read_operands("sequence_parallel_recurrence", a, b, initial_state, axis)
        operands = vary_alike((layout.flatten(a), layout.flatten(b), layout.flatten_state(initial_state)))
        h, final = _scan(axis_name, reverse, implementation)(*operands)
        if not return_state:
            return layout.restore(h)
        # Every device but the last in time has zeros.
        return layout.restore(h), layout.restore_state(lax.psum(final, axis_name))

    if mesh is None:
        if spec is not None:
            raise rule_error("spec says how whole arrays are split", "spec without mesh", "pass mesh, or leave it out")
        try:
            lax.axis_size(axis_name)
        except NameError as error:
            raise rule_error(
                f"Without mesh it is called inside jax.shard_map over the axis {axis_name!r}",
                "a call where no mesh axis has that name",
                "pass mesh= for whole arrays, or call it inside jax.shard_map",
            ) from error
        return local(a, b, initial_state)
    if axis_name not in mesh.shape:
        raise unknown_name("mesh axis", axis_name, mesh.axis_names)
    entries = list(spec if spec is not None else ()) + [None] * (b.ndim - len(spec or ()))
    if spec is None:
        entries[layout.axis] = axis_name
    if len(entries) != b.ndim or entries[layout.axis] != axis_name:
        raise rule_error(
            f"spec has an entry for each of b's {b.ndim} axes, and {axis_name!r} at that of time, {layout.axis}",
            str(spec),
            "put it there, or leave spec out",
        )
    over, at_one_step = PartitionSpec(*entries), PartitionSpec(*entries[: layout.axis], *entries[layout.axis + 1 :])
    length = b.shape[layout.axis]
    missing = -length % mesh.shape[axis_name]
    if missing:
        # Steps that change nothing, at the end of time: they keep the state, whichever way it runs.
        padding = [(0, missing if i == layout.axis else 0) for i in range(b.ndim)]
        a, b = jnp.pad(a, padding, constant_values=1), jnp.pad(b, padding)
    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(over, over, None if initial_state is None else at_one_step),
        out_specs=(over, at_one_step) if return_state else over,
    )
    made = split(a, b, initial_state)
    h = made[0] if return_state else made
    h = lax.slice_in_dim(h, 0, length, axis=layout.axis) if missing else h
    return (h, made[1]) if return_state else h


def _scan(axis_name: str, reverse: bool, implementation: str | None) -> Any:
    """(a, b, initial) -> (h, final) on one device's piece, [batch, time, channels]; final is 0 on all but the last."""

    def last_state(a: Any, b: Any, reverse: bool) -> Any:
        params: dict[str, Hashable] = {"reverse": reverse, "return_final": True}
        return run(LINEAR_RECURRENCE, (a, b), params, implementation=implementation)[1]

    def product(a: Any, like: Any) -> Any:
        return jnp.prod(a.astype(state_type(like)), axis=1)

    def forward(a: Any, b: Any, initial: Any) -> tuple[Any, Any]:
        start, final = _linked(product(a, b), last_state(a, b, reverse), initial, axis_name, reverse)
        h = run(LINEAR_RECURRENCE, (a, b, start), {"reverse": reverse}, implementation=implementation)
        # Only the type of the initial state is needed further.
        like = None if initial is None else jnp.zeros_like(initial, shape=(0,))
        return (h, final), (a, h, start, like)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        a, h, start, like = residuals
        d_h, d_final = cotangents
        # What leaves the piece backwards is a · G of its first step: a recurrence of a · d_h.
        added = a.astype(start.dtype) * d_h.astype(start.dtype)
        leaving = last_state(a, added, not reverse)
        entering, d_initial = _linked(product(a, h), leaving, d_final, axis_name, not reverse)
        operands = (a, h, start, d_h, entering)
        da, db, _ = run(LINEAR_RECURRENCE_GRAD, operands, {"reverse": reverse}, implementation=implementation)
        return da, db, None if like is None else d_initial.astype(like.dtype)

    @jax.custom_vjp
    def scan(a: Any, b: Any, initial: Any) -> tuple[Any, Any]:
        return forward(a, b, initial)[0]

    scan.defvjp(forward, backward)
    return scan


def _linked(product: Any, end: Any, initial: Any, axis_name: str, reverse: bool) -> tuple[Any, Any]:
    """(the state that enters this device's piece, the state that leaves the last one or 0 on every other device).

    `end` is what leaves this piece when zero enters it; `initial` is taken from the device that is first in time.
    """
    devices = lax.axis_size(axis_name)
    index = lax.axis_index(axis_name)
    place = devices - 1 - index if reverse else index  # in the order in which time runs
    initial = jnp.zeros_like(end) if initial is None else initial.astype(end.dtype)

    def from_before(x: Any, distance: int) -> Any:
        pairs = [(i, i + distance) for i in range(devices - distance)]
        return lax.ppermute(x, axis_name, [(j, i) for i, j in pairs] if reverse else pairs)

    end = jnp.where(place == 0, product * initial + end, end)
    distance = 1
    while distance < devices:
        earlier_product, earlier_end = from_before((product, end), distance)
        linked = place >= distance
        end = jnp.where(linked, product * earlier_end + end, end)
        product = jnp.where(linked, product * earlier_product, product)
        distance *= 2
    entering = jnp.where(place == 0, initial, from_before(end, 1))
    return entering, jnp.where(place == devices - 1, end, 0)
