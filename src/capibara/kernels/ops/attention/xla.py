"""Attention in plain XLA with memory linear in the length: a softmax carried along chunks of keys.

It runs anywhere and XLA partitions it as it stands. Chunks that causality, the window, the segments or the block mask
leave empty are not computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import Implementation
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.attention.chunks import ChunkConfig, Chunked, candidates, default_config, dot, loop
from capibara.kernels.ops.attention.reference import reference

Carry = tuple[jax.Array, jax.Array, jax.Array]  # m_i, l_i, acc


def xla(*operands: Any, config: ChunkConfig, return_lse: bool, **params: Any) -> Any:
    """The op's forward pass, a chunk of queries at a time against the chunks of keys that it may see."""
    q, k = operands[:2]
    if q.shape[0] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
        return reference(*operands, **params, return_lse=return_lse)  # nothing to cut into chunks
    call = Chunked(operands, params, config)
    shape = (call.batch, call.kv_heads, call.groups)
    zeros = vary_like(jnp.zeros((*shape, call.cq), call.wide), q)

    def step(row_chunk: Any, column_chunk: Any, carry: Carry) -> Carry:
        m_i, l_i, acc = carry
        chunk = call.chunk(row_chunk, column_chunk, once=False)
        scores = chunk.scores
        if chunk.allowed is not None:
            scores = jnp.where(chunk.allowed, scores, -jnp.inf)
        m_next = jnp.maximum(m_i, scores.max(-1))
        base = jnp.where(jnp.isneginf(m_next), 0, m_next)
        p = jnp.exp(scores - base[..., None])
        alpha = jnp.exp(m_i - base)
        l_i = l_i * alpha + p.sum(-1)
        keep = call.kept(chunk)
        if keep is not None:
            p = jnp.where(keep, p, 0)
        part = dot("bhgts,bhsd->bhgtd", p.astype(call.product), chunk.value, call.wide)
        return m_next, l_i, acc * alpha[..., None] + part

    def rows(row_chunk: Any, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = (zeros - jnp.inf, zeros, jnp.broadcast_to(zeros[..., None], (*zeros.shape, call.depth)))

        def columns(column_chunk: Any, carry: Carry) -> Carry:
            if not call.skips:
                return step(row_chunk, column_chunk, carry)
            live = call.live(row_chunk, column_chunk)
            return jax.lax.cond(live, lambda c: step(row_chunk, column_chunk, c), lambda c: c, carry)

        m_i, l_i, acc = loop(*call.key_chunks(row_chunk), columns, start)
        alive = l_i != 0  # a NaN that a query sees stays one
        safe = jnp.where(alive, l_i, 1)
        out = jnp.where(alive[..., None], acc / (safe * (1 - call.rate))[..., None], 0)
        lse = jnp.where(alive, m_i + jnp.log(safe), -jnp.inf)
        at = call.row_start(row_chunk)
        update = jax.lax.dynamic_update_slice_in_dim
        return update(results[0], out.astype(q.dtype), at, 3), update(results[1], lse, at, 3)

    empty = (jnp.zeros((*shape, call.rows, call.depth), q.dtype), jnp.zeros((*shape, call.rows), call.wide))
    empty = (vary_like(empty[0], q), vary_like(empty[1], q))
    out, lse = loop(0, call.row_chunks, rows, empty)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:3])
    return (out, lse) if return_lse else out


IMPLEMENTATION = Implementation(
    "xla",
    xla,
    own_gradient=True,
    needs_local_types=True,
    config_type=ChunkConfig,
    default_config=default_config,
    candidates=candidates,
)
