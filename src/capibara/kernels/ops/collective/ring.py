"""Collectives as rings: n - 1 steps in which every device sends to its neighbour alone.

One way, all send to the right. Two ways, one half of the data travels to the right and the other to the left, so that
both directions of the links carry something. Steps are written out, not looped, so that the compiler may overlap
each with whatever else is ready.

Partial sums travel in the operand's type and are added in float32. What a ring returns is the same on every device
where `all_reduce` is, but shard_map does not know that: it takes `out_specs` that say so under check_vma=False only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.collective.axes import neighbours, vary_over
from capibara.kernels.ops.collective.reference import sum_type

Axes = tuple[str, ...]


def all_gather(x: Any, *, axis_name: Axes, devices: int, axis: int, tiled: bool, two_way: bool) -> Any:
    """`reference.all_gather` by a ring."""
    x = vary_over(x, axis_name)
    index = lax.axis_index(axis_name)
    stacked = vary_like(jnp.zeros((devices, *x.shape), x.dtype), x)
    for start, part, way in _ways(x, two_way):
        for step in range(devices):
            place = jnp.mod(index - way * step, devices)  # whose part has arrived
            begin = [place, *(jnp.zeros_like(place) + (start if d == _cut(x) else 0) for d in range(x.ndim))]
            stacked = lax.dynamic_update_slice(stacked, part[None], begin)
            if step < devices - 1:
                part = lax.ppermute(part, axis_name, neighbours(devices, way))
    moved = jnp.moveaxis(stacked, 0, axis)
    return moved.reshape(*x.shape[:axis], devices * x.shape[axis], *x.shape[axis + 1 :]) if tiled else moved


def reduce_scatter(x: Any, *, axis_name: Axes, devices: int, op: str, axis: int, two_way: bool) -> Any:
    """`reference.reduce_scatter` by a ring: a device's part comes to it, added up on the way."""
    x = vary_over(x, axis_name)
    index = lax.axis_index(axis_name)
    length = x.shape[axis] // devices
    combine = _combine(op)
    like = jax.ShapeDtypeStruct((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)

    def own(step: int, start: int, size: int, way: int) -> Any:
        place = jnp.mod(index - way * (step + 1), devices)
        part = lax.dynamic_slice_in_dim(x, place * length, length, axis)
        return lax.slice_in_dim(part, start, start + size, axis=_cut(like)) if like.shape else part

    arrived = []
    for start, size, way in _spans(like, two_way):
        partial = own(0, start, size, way)
        for step in range(1, devices):
            partial = lax.ppermute(partial, axis_name, neighbours(devices, way))
            partial = combine(partial, own(step, start, size, way))
        arrived.append(partial)
    total = jnp.concatenate(arrived, axis=_cut(like)) if len(arrived) > 1 else arrived[0]
    return total if op != "mean" else (total.astype(sum_type(total.dtype)) / devices).astype(total.dtype)


def all_reduce(x: Any, *, axis_name: Axes, devices: int, op: str, two_way: bool) -> Any:
    """`reference.all_reduce` as a ring of partial sums and a ring of the sums."""
    flat, cut = in_parts(x, devices)
    part = reduce_scatter(flat, axis_name=axis_name, devices=devices, op=op, axis=0, two_way=two_way)
    whole = all_gather(part, axis_name=axis_name, devices=devices, axis=0, tiled=True, two_way=two_way)
    return cut(whole)


def in_parts(x: Any, devices: int) -> tuple[Any, Callable[[Any], Any]]:
    """x with a leading axis that splits over the devices, padded if it must be; and the way back."""
    if x.ndim and x.shape[0] % devices == 0:
        return x, lambda whole: whole
    size = math.prod(x.shape)
    flat = jnp.pad(x.reshape(size), (0, -size % devices))
    return flat, lambda whole: whole[:size].reshape(x.shape)


def _combine(op: str) -> Callable[[Any, Any], Any]:
    if op in ("max", "min"):
        return jnp.maximum if op == "max" else jnp.minimum

    def add(a: Any, b: Any) -> Any:
        wide = sum_type(a.dtype)
        return (a.astype(wide) + b.astype(wide)).astype(a.dtype)

    return add


def _cut(x: Any) -> int:
    """The dimension that is halved for two ways: the first that can be."""
    return next((d for d, length in enumerate(x.shape) if length > 1), 0)


def _spans(x: Any, two_way: bool) -> list[tuple[int, int, int]]:
    """(start, size, way) along the cut of each part that travels by itself: to the right 1, to the left -1."""
    length = x.shape[_cut(x)] if x.shape else 1
    if not two_way or length < 2:
        return [(0, length, 1)]
    half = (length + 1) // 2
    return [(0, half, 1), (half, length - half, -1)]


def _ways(x: Any, two_way: bool) -> list[tuple[int, Any, int]]:
    """(start, part, way) of each part of x that travels by itself."""
    if not x.ndim:
        return [(0, x, 1)]
    spans = _spans(x, two_way)
    return [(start, lax.slice_in_dim(x, start, start + size, axis=_cut(x)), way) for start, size, way in spans]
