"""Products overlapped with a collective: a part travels to the next device while the one before it is multiplied.

`all_gather_matmul` sends rows of x round the ring and multiplies what it has. `matmul_reduce_scatter` sends partial
sums round and adds the product of the rows that they are for. Each is what the other's gradient is made of. Two ways:
halves of the rows travel in opposite directions.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Gradient
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.collective.axes import neighbours, vary_over
from capibara.kernels.ops.collective.reference import product, sum_type

Axes = tuple[str, ...]


def all_gather_matmul(x: Any, w: Any, *, axis_name: Axes, devices: int, two_way: bool) -> Any:
    """`reference.all_gather_matmul` by a ring."""
    x, w = vary_over(x, axis_name), vary_over(w, axis_name)
    rows, dtype = x.shape[-2], jnp.result_type(x, w)
    index = lax.axis_index(axis_name)
    out = vary_like(jnp.zeros((*x.shape[:-2], devices * rows, w.shape[-1]), dtype), x)
    for step, parts in _travelling(x, axis_name, devices, two_way):
        for start, part, way in parts:
            place = jnp.mod(index - way * step, devices)
            made = product(part, w).astype(dtype)
            out = lax.dynamic_update_slice_in_dim(out, made, place * rows + start, x.ndim - 2)
    return out


def matmul_reduce_scatter(x: Any, w: Any, *, axis_name: Axes, devices: int, two_way: bool) -> Any:
    """`reference.matmul_reduce_scatter` by a ring."""
    x, w = vary_over(x, axis_name), vary_over(w, axis_name)
    rows, dtype, dim = x.shape[-2] // devices, jnp.result_type(x, w), x.ndim - 2
    index = lax.axis_index(axis_name)
    arrived = []
    for start, size, way in _halves(rows, two_way):
        partial: Any = None
        for step in range(devices):
            place = jnp.mod(index - way * (step + 1), devices)
            made = product(lax.dynamic_slice_in_dim(x, place * rows + start, size, dim), w)
            if partial is not None:
                # Sent in the result's type, as XLA's own reduction is; added in the product's.
                made = lax.ppermute(partial, axis_name, neighbours(devices, way)).astype(made.dtype) + made
            partial = made.astype(dtype)
        arrived.append(partial)
    return jnp.concatenate(arrived, axis=dim) if len(arrived) > 1 else arrived[0]


def gathered_contraction(part: Any, whole: Any, *, axis_name: Axes, devices: int, two_way: bool) -> Any:
    """all_gather(part, rows) transposed, times `whole`, by a ring: what the gradients of the weights are.

    part [*batch, rows, k] and whole [*batch, devices * rows, n] give [k, n], which is summed over the batch.
    """
    rows = part.shape[-2]
    index = lax.axis_index(axis_name)
    wide = sum_type(jnp.result_type(part, whole))
    total = None
    for step, parts in _travelling(part, axis_name, devices, two_way):
        for start, piece, way in parts:
            place = jnp.mod(index - way * step, devices)
            beside = lax.dynamic_slice_in_dim(whole, place * rows + start, piece.shape[-2], whole.ndim - 2)
            made = jnp.einsum("...mk,...mn->kn", piece, beside, preferred_element_type=wide)
            total = made if total is None else total + made
    return total


def _halves(rows: int, two_way: bool) -> list[tuple[int, int, int]]:
    """(start, size, way) of what travels by itself: to the right 1, to the left -1."""
    if not two_way or rows < 2:
        return [(0, rows, 1)]
    half = (rows + 1) // 2
    return [(0, half, 1), (half, rows - half, -1)]


def _travelling(x: Any, axis_name: Axes, devices: int, two_way: bool) -> Any:
    """For each step, (start, part, way) of the rows that are here then; the next are sent before these are used."""
    parts = [
        (start, lax.slice_in_dim(x, start, start + size, axis=x.ndim - 2), way)
        for start, size, way in _halves(x.shape[-2], two_way)
    ]
    for step in range(devices):
        here = parts
        if step < devices - 1:
            parts = [(s, lax.ppermute(p, axis_name, neighbours(devices, way)), way) for s, p, way in here]
        yield step, here


def gradients(gather: Op, scatter: Op) -> tuple[Gradient, Gradient]:
    """The gradients of the two ops, each in terms of the other, for implementations that JAX does not look into."""

    def forward(op: Op, arrays: Any, params: Any, prefer: Any) -> Any:
        return run(op, arrays, params, prefer=prefer), arrays

    def two_way(prefer: Any) -> bool:
        name = getattr(prefer, "implementation", prefer)
        return name != "xla_ring"

    def of_gather(residuals: Any, cotangent: Any, params: Any, prefer: Any) -> Any:
        x, w = residuals
        dx = run(scatter, (cotangent, w.T), params, prefer=prefer)
        dw = gathered_contraction(x, cotangent, two_way=two_way(prefer), **params)
        return dx.astype(x.dtype), dw.astype(w.dtype)

    def of_scatter(residuals: Any, cotangent: Any, params: Any, prefer: Any) -> Any:
        x, w = residuals
        dx = run(gather, (cotangent, w.T), params, prefer=prefer)
        dw = gathered_contraction(cotangent, x, two_way=two_way(prefer), **params).T
        return dx.astype(x.dtype), dw.astype(w.dtype)

    return Gradient(forward, of_gather), Gradient(forward, of_scatter)
