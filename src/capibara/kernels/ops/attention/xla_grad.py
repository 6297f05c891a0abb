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


def xla_grad(*operands: Any, config: ChunkConfig, **params: Any) -> tuple[Any, Any, Any, Any]:
    """(dq, dk, dv, dbias); dbias is None without a bias."""
    q, k, v, bias = operands[:4]
    out, lse, d_out, d_lse = operands[9:13]
    if q.shape[0] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
        return reference_grad(*operands, **params)
    call = Chunked(operands[:9], params, config)
    wide = call.wide
    do = call.by_group(d_out)
    # What every probability's gradient is measured against; a cotangent of the lse enters the same way.
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), -1)
    delta = call.by_group(delta if d_lse is None else delta - d_lse.astype(wide))
    lse = call.by_group(jnp.where(jnp.isneginf(lse), 0, lse).astype(wide))

    def zeros(shape: tuple[int, ...], dtype: Any = wide) -> jax.Array:
        return vary_like(jnp.zeros(shape, dtype), q)

    def step(row_chunk: Any, column_chunk: Any, carry: Inner) -> Inner:
        dq, dk, dv, dbias = carry
        chunk = call.chunk(row_chunk, column_chunk, once=True)
        at = chunk.rows[0]
        cotangent = slice_of(do, at, call.cq, 3).astype(call.product)
        query = chunk.query
        p = jnp.exp(chunk.scores - slice_of(lse, at, call.cq, 3)[..., None])
        if chunk.allowed is not None and chunk.seen_rows is not None:
            p = jnp.where(chunk.allowed, p, 0)
            cotangent = jnp.where(chunk.seen_rows[..., None], cotangent, 0)
            query = jnp.where(chunk.seen_rows[..., None], query, 0)
        dp = dot("bhgtd,bhsd->bhgts", cotangent, chunk.value, wide)
        keep = call.kept(chunk)
        kept_p = p
        if keep is not None:
            dp = jnp.where(keep, dp / (1 - call.rate), 0)
            kept_p = jnp.where(keep, p / (1 - call.rate), 0)
        dv = dv + dot("bhgts,bhgtd->bhsd", kept_p.astype(call.product), cotangent, wide)
        ds = p * (dp - slice_of(delta, at, call.cq, 3)[..., None])
        if call.softcap is not None:
            ds = ds * (1 - jnp.square(chunk.scores / call.softcap))
        if chunk.allowed is not None:
            ds = jnp.where(chunk.allowed, ds, 0)  # last: a score that nothing sees may be NaN
        if dbias is not None:
            dbias = _add_tile(call, dbias, ds, chunk)
        ds = ds.astype(call.product)
        part = dot("bhgts,bhsd->bhgtd", ds, chunk.key, wide)
        dq = _add_slice(dq, part, at, 3)
        dk = dk + dot("bhgts,bhgtd->bhsd", ds, query, wide)
        return dq, dk, dv, dbias

    def columns(column_chunk: Any, carry: Any) -> Any:
        dq, dk, dv, dbias = carry

        def rows(row_chunk: Any, inner: Inner) -> Inner:
            if not call.skips:
                return step(row_chunk, column_chunk, inner)
            live = call.live(row_chunk, column_chunk)
            return jax.lax.cond(live, lambda c: step(row_chunk, column_chunk, c), lambda c: c, inner)

        nothing = zeros((call.batch, call.kv_heads, call.ck, call.depth))
        start = (dq, nothing, nothing, dbias)
        dq, dk_part, dv_part, dbias = loop(*call.query_chunks(column_chunk), rows, start)
        at = call.column_start(column_chunk)
        return dq, _add_slice(dk, dk_part, at, 2), _add_slice(dv, dv_part, at, 2), dbias

    d_bias = None
    if bias is not None:
        # Where nothing is summed, each number is written once and needs no wider type.
        summed = bias.shape[:3] != (call.batch, call.heads, call.rows)
        d_bias = zeros(bias.shape, wide if summed else bias.dtype)
    start = (zeros(call.grouped.shape), zeros(k.shape), zeros(v.shape), d_bias)
    dq, dk, dv, d_bias = loop(0, call.column_chunks, columns, start)
    dq = (dq * call.scale).astype(q.dtype).reshape(q.shape)
    dk = (dk * call.scale).astype(k.dtype)
    return dq, dk, dv.astype(v.dtype), None if bias is None else d_bias.astype(bias.dtype)


def _add_slice(x: jax.Array, part: jax.Array, at: Any, axis: int) -> jax.Array:
    """x[..., at:, ...] += part, along one axis."""
    if part.shape[axis] == x.shape[axis]:
        return x + part.astype(x.dtype)
    there = jax.lax.dynamic_slice_in_dim(x, at, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(x, there + part.astype(x.dtype), at, axis)


def _add_tile(call: Chunked, dbias: jax.Array, ds: jax.Array, chunk: Chunk) -> jax.Array:
    """Add a chunk's gradient to the bias's, summed over the axes along which the bias is shared."""
    full = ds.reshape(call.batch, call.heads, *ds.shape[3:])
    shared = [n == 1 and m != 1 for n, m in zip(dbias.shape[:3], full.shape[:3], strict=True)]
    full = full.sum([axis for axis, once in enumerate(shared) if once], keepdims=True)
    row = chunk.rows[0] if dbias.shape[2] == call.rows else 0
    start = (0, 0, row, chunk.columns[0])
    there = jax.lax.dynamic_slice(dbias, start, full.shape)
    return jax.lax.dynamic_update_slice(dbias, there + full.astype(dbias.dtype), start)


IMPLEMENTATION = Implementation(
    "xla",
    xla_grad,
    own_gradient=True,
    needs_local_types=True,
    config_type=ChunkConfig,
    default_config=default_config,
    candidates=candidates,
)
