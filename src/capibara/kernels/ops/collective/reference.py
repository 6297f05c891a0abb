"""What the collectives compute, by XLA's own: their specification, and the implementation named "xla".

Each takes one device's operand inside shard_map. `devices` is the number of devices on the axes together.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.ops.collective.axes import vary_over

Axes = tuple[str, ...]


def all_reduce(x: Any, *, axis_name: Axes, devices: int, op: str) -> Any:
    """Every device's x, added up (or averaged, or the largest, or the smallest), on every device."""
    if op in ("max", "min"):
        return _extreme(x, axis_name, op)
    total = lax.psum(x, axis_name)
    return total if op == "sum" else _divided(total, devices)


def reduce_scatter(x: Any, *, axis_name: Axes, devices: int, op: str, axis: int) -> Any:
    """Device i has part i, along `axis`, of what `all_reduce` gives."""
    x = vary_over(x, axis_name)
    if op in ("sum", "mean"):
        total = _scattered(x, axis_name, devices, axis)
        return total if op == "sum" else _divided(total, devices)
    # XLA scatters sums only: every device gets the others' candidates for its part, and takes the best of them.
    parts = x.reshape(*x.shape[:axis], devices, x.shape[axis] // devices, *x.shape[axis + 1 :])
    parts = lax.all_to_all(parts, axis_name, axis, axis)
    return (jnp.max if op == "max" else jnp.min)(parts, axis=axis)


def all_gather(x: Any, *, axis_name: Axes, devices: int, axis: int, tiled: bool) -> Any:
    """Every device's x, one after the other along `axis` (tiled), or stacked on a new axis there."""
    return _gathered(vary_over(x, axis_name), axis_name, devices, axis, tiled)


def all_to_all(x: Any, *, axis_name: Axes, devices: int, split_axis: int, concat_axis: int) -> Any:
    """Part j along `split_axis` goes to device j; what arrives is put together along `concat_axis`."""
    x = vary_over(x, axis_name)
    return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)


def permute(x: Any, *, axis_name: Axes, devices: int, pairs: tuple[tuple[int, int], ...]) -> Any:
    """x of the device that sends here, or zeros where none does."""
    return lax.ppermute(vary_over(x, axis_name), axis_name, pairs)


def all_gather_matmul(x: Any, w: Any, *, axis_name: Axes, devices: int) -> Any:
    """all_gather(x, rows) @ w."""
    x, w = vary_over(x, axis_name), vary_over(w, axis_name)
    whole = _gathered(x, axis_name, devices, x.ndim - 2, tiled=True)
    return product(whole, w).astype(jnp.result_type(x, w))


def matmul_reduce_scatter(x: Any, w: Any, *, axis_name: Axes, devices: int) -> Any:
    """Device i has part i of the rows of the sum, over the devices, of x @ w."""
    x, w = vary_over(x, axis_name), vary_over(w, axis_name)
    made = product(x, w).astype(jnp.result_type(x, w))
    return _scattered(made, axis_name, devices, x.ndim - 2)


def _scattered(x: Any, axis_name: Axes, devices: int, axis: int) -> Any:
    if not x.size:  # XLA scatters and gathers no empty axis
        return lax.slice_in_dim(x, 0, x.shape[axis] // devices, axis=axis)
    return lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)


def _gathered(x: Any, axis_name: Axes, devices: int, axis: int, tiled: bool) -> Any:
    if not x.size:
        return (jnp.concatenate if tiled else jnp.stack)([x] * devices, axis=axis)
    return lax.all_gather(x, axis_name, axis=axis, tiled=tiled)


def product(x: Any, w: Any) -> Any:
    """x @ w, summed in float32 where the operands are narrower."""
    return jnp.matmul(x, w, preferred_element_type=sum_type(jnp.result_type(x, w)))


def sum_type(dtype: Any) -> Any:
    """The type that numbers of `dtype` are added in."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype


def _divided(total: Any, devices: int) -> Any:
    return (total.astype(sum_type(total.dtype)) / devices).astype(total.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: Any, axis_name: Axes, op: str) -> Any:
    """JAX does not differentiate pmax: like a maximum over an array, its gradient goes to all that attain it, alike."""
    return (lax.pmax if op == "max" else lax.pmin)(x, axis_name)


@_extreme.defjvp
def _extreme_jvp(axis_name: Axes, op: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    best = _extreme(x, axis_name, op)
    attained = x == best
    many = lax.psum(attained.astype(sum_type(x.dtype)), axis_name)
    share = jnp.where(attained, dx.astype(many.dtype) / many, 0).astype(dx.dtype)
    return best, lax.psum(share, axis_name)
