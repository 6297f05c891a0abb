"""The batching rules and the mesh rules of the grouped products.

On a mesh K and N are split freely, and a split K is summed. Rows are whole on every device, since the sizes count all
of them, and so are groups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.layers.grouped.reference import gated, wide_type
from capibara.kernels.ops.layers.grouped.tiles import group_ends

Params = dict[str, Any]


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap of a product: `size` calls as one.

    Where the weights differ from element to element, every element's groups follow the last one's. Where they are
    shared, copying them would cost more than sorting the rows of all elements by group.
    """
    lhs, *weights, group_sizes = (
        x if of_each or 0 < at < len(arrays) - 1 else jnp.broadcast_to(x, (size, *x.shape))
        for at, (x, of_each) in enumerate(zip(arrays, batched, strict=True))
    )
    if not any(batched[1:-1]):
        return _sorted_rows(op, lhs, weights, group_sizes, params, prefer)
    of_each = batched[1:-1]
    full = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(weights, of_each, strict=True)]
    rows = lhs.shape[1]
    covered, live = _cover(group_sizes, rows)
    made = run(op, (_fold(lhs), *map(_fold, full), _fold(covered)), params, prefer=prefer)

    def unfold(x: jax.Array) -> jax.Array:
        return jnp.where(live[..., None], x.reshape(size, rows, x.shape[-1]), 0)

    return jax.tree.map(unfold, made)


def batch_weights(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer
) -> Any:
    """vmap of grouped_gemm_weights: every element's groups follow the last one's."""
    lhs, d_out, group_sizes = (
        x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched, strict=True)
    )
    covered, live = _cover(group_sizes, lhs.shape[1])
    # The rows that no group has are now in their element's last one, where they must count nothing.
    rows = [_fold(jnp.where(live[..., None], x, 0)) for x in (lhs, d_out)]
    made = run(op, (*rows, _fold(covered)), params, prefer=prefer)
    return made.reshape(size, group_sizes.shape[1], *made.shape[1:])


def _fold(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # a -1 has no value where an axis is empty


def _cover(group_sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Sizes [batch, groups] whose last groups reach to the last row, and which rows were in a group before."""
    ends = jax.vmap(lambda one: group_ends(one, rows))(group_sizes)
    live = jnp.arange(rows) < ends[:, -1:]
    covered = jnp.diff(ends.at[:, -1].set(rows), prepend=0, axis=1)
    return covered.astype(jnp.int32), live


def _sorted_rows(op: Op, lhs: jax.Array, weights: Any, group_sizes: jax.Array, params: Params, prefer: Prefer) -> Any:
    size, rows = lhs.shape[:2]
    ends = jax.vmap(lambda one: group_ends(one, rows))(group_sizes)
    group = (ends[:, None, :] <= jnp.arange(rows)[None, :, None]).sum(-1, dtype=jnp.int32)
    order = jnp.argsort(group.reshape(-1), stable=True)
    # Rows that no group has sort behind all others, and are again past the last group.
    total = jnp.diff(ends, prepend=0, axis=1).sum(0).astype(jnp.int32)
    made = run(op, (_fold(lhs)[order], *weights, total), params, prefer=prefer)
    back = jnp.argsort(order)
    return jax.tree.map(lambda x: x[back].reshape(size, rows, x.shape[1]), made)


def rule(call: Call) -> str:
    return f"m k, {'g n k' if call.params['transpose_rhs'] else 'g k n'}, g -> m n"


def rule_weights(call: Call) -> str:
    return f"m k, m n, g -> {'g n k' if call.params['transpose'] else 'g k n'}"


def rule_gated(call: Call) -> str:
    results = 3 if call.params["return_products"] else 1
    return f"m k, g k n, g k n, g -> {', '.join(['m n'] * results)}"


def combine(op: Op, arrays: tuple[Any, ...], params: Params, axes: tuple[str, ...], prefer: Prefer) -> Any:
    """K is split over `axes`: the local part in float32, summed, then rounded."""
    lhs, rhs, _ = arrays
    wide = params | {"out_dtype": wide_type(lhs, rhs).name}
    total = jax.lax.psum(run(op, arrays, wide, prefer=prefer, local=True), axes)
    return total.astype(params["out_dtype"] or jnp.result_type(lhs, rhs))


def combine_gated(
    gemm: Op, op: Op, arrays: tuple[Any, ...], params: Params, axes: tuple[str, ...], prefer: Prefer
) -> Any:
    """K is split over `axes`: both products must be whole before the activation sees them."""
    lhs, gate, up, group_sizes = arrays
    wide = wide_type(lhs, gate, up).name
    local = [run(gemm, (lhs, w, group_sizes), {"out_dtype": wide}, prefer=prefer, local=True) for w in (gate, up)]
    products = jax.lax.psum(local, axes)
    out = jnp.result_type(lhs, gate, up)
    y = gated(params["activation"], *products).astype(out)
    return (y, *(p.astype(out) for p in products)) if params["return_products"] else y


def _whole(call: Call) -> tuple[str, ...]:
    return ("m", "g")


# Rows, columns or the contraction: only the caller knows which of them is split.
PARTITION = Partition(rule, reduced=("k",), combine=combine, replicated=_whole, logical={})
PARTITION_WEIGHTS = Partition(rule_weights, replicated=_whole, logical={})


def partition_gated(gemm: Op) -> Partition:
    combined = functools.partial(combine_gated, gemm)
    return Partition(rule_gated, reduced=("k",), combine=combined, replicated=_whole, logical={})
