"""The gradient of attention in plain XLA with memory linear in the length.

Scores are computed again, a chunk of keys at a time against the chunks of queries that see it; the softmax comes
from the forward pass's log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import Implementation
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.attention.chunks import (
    Chunk,
    ChunkConfig,
    Chunked,
    candidates,
    default_config,
    dot,
    loop,
    slice_of,
)
from capibara.kernels.ops.attention.reference import reference_grad

Inner = tuple[jax.Array, jax.Array, jax.Array, Any]  # dq so far, this chunk's dk and dv, dbias so far


def xla_chunked_grad(*operands: Any, config: ChunkConfig, **params: Any) -> tuple[Any, Any, Any, Any]:
    """(dq, dk, dv, dbias); dbias is None without a bias."""
    q, k, v, bias = operands[:4]
    out, lse, d_out, d_lse = operands[9:13]
    if q.shape[0] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
        return reference_grad(*operands, **params)
    whole = Chunked(operands[:9], params, config)
    wide = whole.wide
    flow = whole.by_group(d_out)
    # What every probability's gradient is measured against; a cotangent of the lse enters the same way.
    level = jnp.sum(d_out.astype(wide) * out.astype(wide), -1)
    level = whole.by_group(level if d_lse is None else level - d_lse.astype(wide))
    lse = whole.by_group(jnp.where(jnp.isneginf(lse), 0, lse).astype(wide))

    def zeros(shape: tuple[int, ...], dtype: Any = wide) -> jax.Array:
        return vary_like(jnp.zeros(shape, dtype), q)

    def step(row_chunk: Any, column_chunk: Any, carry: Inner) -> Inner:
        dq, dk, dv, dbias = carry
        chunk = whole.chunk(row_chunk, column_chunk, once=True)
        at = chunk.rows[0]
        cotangent = slice_of(flow, at, whole.cq, 3).astype(whole.product)
        query = chunk.query
        weights = jnp.exp(chunk.scores - slice_of(lse, at, whole.cq, 3)[..., None])
        if chunk.allowed is not None and chunk.seen_rows is not None:
            weights = jnp.where(chunk.allowed, weights, 0)
            cotangent = jnp.where(chunk.seen_rows[..., None], cotangent, 0)
            query = jnp.where(chunk.seen_rows[..., None], query, 0)
        d_weights = dot("bhgtd,bhsd->bhgts", cotangent, chunk.value, wide)
        keep = whole.kept(chunk)
        dropped = weights
        if keep is not None:
            d_weights = jnp.where(keep, d_weights / (1 - whole.rate), 0)
            dropped = jnp.where(keep, weights / (1 - whole.rate), 0)
        dv = dv + dot("bhgts,bhgtd->bhsd", dropped.astype(whole.product), cotangent, wide)
        d_scores = weights * (d_weights - slice_of(level, at, whole.cq, 3)[..., None])
        if whole.softcap is not None:
            d_scores = d_scores * (1 - jnp.square(chunk.scores / whole.softcap))
        if chunk.allowed is not None:
            d_scores = jnp.where(chunk.allowed, d_scores, 0)  # last: a score that nothing sees may be NaN
        if dbias is not None:
            dbias = _add_tile(whole, dbias, d_scores, chunk)
        small = d_scores.astype(whole.product)
        part = dot("bhgts,bhsd->bhgtd", small, chunk.key, wide)
        dq = _add_slice(dq, part, at, 3)
        dk = dk + dot("bhgts,bhgtd->bhsd", small, query, wide)
        return dq, dk, dv, dbias

    def columns(column_chunk: Any, carry: Any) -> Any:
        dq, dk, dv, dbias = carry

        def rows(row_chunk: Any, inner: Inner) -> Inner:
            if not whole.skips:
                return step(row_chunk, column_chunk, inner)
            live = whole.live(row_chunk, column_chunk)
            return jax.lax.cond(live, lambda c: step(row_chunk, column_chunk, c), lambda c: c, inner)

        nothing = zeros((whole.batch, whole.kv_heads, whole.ck, whole.depth))
        start = (dq, nothing, nothing, dbias)
        dq, dk_part, dv_part, dbias = loop(*whole.query_chunks(column_chunk), rows, start)
        at = whole.column_start(column_chunk)
        return dq, _add_slice(dk, dk_part, at, 2), _add_slice(dv, dv_part, at, 2), dbias

    d_bias = None
    if bias is not None:
        # Where nothing is summed, each number is written once and needs no wider type.
        summed = bias.shape[:3] != (whole.batch, whole.heads, whole.rows)
        d_bias = zeros(bias.shape, wide if summed else bias.dtype)
    start = (zeros(whole.grouped.shape), zeros(k.shape), zeros(v.shape), d_bias)
    dq, dk, dv, d_bias = loop(0, whole.column_chunks, columns, start)
    dq = (dq * whole.scale).astype(q.dtype).reshape(q.shape)
    dk = (dk * whole.scale).astype(k.dtype)
    return dq, dk, dv.astype(v.dtype), None if bias is None else d_bias.astype(bias.dtype)


def _add_slice(x: jax.Array, part: jax.Array, at: Any, axis: int) -> jax.Array:
    """x[..., at:, ...] += part, along one axis."""
    if part.shape[axis] == x.shape[axis]:
        return x + part.astype(x.dtype)
    there = jax.lax.dynamic_slice_in_dim(x, at, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(x, there + part.astype(x.dtype), at, axis)


def _add_tile(whole: Chunked, dbias: jax.Array, d_scores: jax.Array, chunk: Chunk) -> jax.Array:
    """Add a chunk's gradient to the bias's, summed over the axes along which the bias is shared."""
    full = d_scores.reshape(whole.batch, whole.heads, *d_scores.shape[3:])
    shared = [n == 1 and m != 1 for n, m in zip(dbias.shape[:3], full.shape[:3], strict=True)]
    full = full.sum([axis for axis, once in enumerate(shared) if once], keepdims=True)
    row = chunk.rows[0] if dbias.shape[2] == whole.rows else 0
    start = (0, 0, row, chunk.columns[0])
    there = jax.lax.dynamic_slice(dbias, start, full.shape)
    return jax.lax.dynamic_update_slice(dbias, there + full.astype(dbias.dtype), start)


IMPLEMENTATION = Implementation(
    "xla",
    xla_chunked_grad,
    rank=lambda call: 5,
    own_gradient=True,
    needs_local_types=True,
    config_type=ChunkConfig,
    default_config=default_config,
    candidates=candidates,
)
