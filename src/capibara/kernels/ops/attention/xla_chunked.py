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

Carry = tuple[jax.Array, jax.Array, jax.Array]


def xla_chunked(*operands: Any, config: ChunkConfig, return_lse: bool, **params: Any) -> Any:
    """The op's forward pass, a chunk of queries at a time against the chunks of keys that it may see."""
    q, k = operands[:2]
    if q.shape[0] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
        return reference(*operands, **params, return_lse=return_lse)  # nothing to cut into chunks
    whole = Chunked(operands, params, config)
    shape = (whole.batch, whole.kv_heads, whole.groups)
    nothing = vary_like(jnp.zeros((*shape, whole.cq), whole.wide), q)

    def step(row_chunk: Any, column_chunk: Any, carry: Carry) -> Carry:
        highest, total, summed = carry
        chunk = whole.chunk(row_chunk, column_chunk, once=False)
        scores = chunk.scores
        if chunk.allowed is not None:
            scores = jnp.where(chunk.allowed, scores, -jnp.inf)
        risen = jnp.maximum(highest, scores.max(-1))
        base = jnp.where(jnp.isneginf(risen), 0, risen)
        weights = jnp.exp(scores - base[..., None])
        fade = jnp.exp(highest - base)
        total = total * fade + weights.sum(-1)
        keep = whole.kept(chunk)
        if keep is not None:
            weights = jnp.where(keep, weights, 0)
        part = dot("bhgts,bhsd->bhgtd", weights.astype(whole.product), chunk.value, whole.wide)
        return risen, total, summed * fade[..., None] + part

    def rows(row_chunk: Any, made: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = (nothing - jnp.inf, nothing, jnp.broadcast_to(nothing[..., None], (*nothing.shape, whole.depth)))

        def columns(column_chunk: Any, carry: Carry) -> Carry:
            if not whole.skips:
                return step(row_chunk, column_chunk, carry)
            live = whole.live(row_chunk, column_chunk)
            return jax.lax.cond(live, lambda c: step(row_chunk, column_chunk, c), lambda c: c, carry)

        highest, total, summed = loop(*whole.key_chunks(row_chunk), columns, start)
        alive = total != 0  # a NaN that a query sees stays one
        safe = jnp.where(alive, total, 1)
        out = jnp.where(alive[..., None], summed / (safe * (1 - whole.rate))[..., None], 0)
        lse = jnp.where(alive, highest + jnp.log(safe), -jnp.inf)
        at = whole.row_start(row_chunk)
        update = jax.lax.dynamic_update_slice_in_dim
        return update(made[0], out.astype(q.dtype), at, 3), update(made[1], lse, at, 3)

    empty = (jnp.zeros((*shape, whole.rows, whole.depth), q.dtype), jnp.zeros((*shape, whole.rows), whole.wide))
    empty = (vary_like(empty[0], q), vary_like(empty[1], q))
    out, lse = loop(0, whole.row_chunks, rows, empty)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:3])
    return (out, lse) if return_lse else out


IMPLEMENTATION = Implementation(
    "xla",
    xla_chunked,
    rank=lambda call: 5,
    own_gradient=True,
    needs_local_types=True,
    config_type=ChunkConfig,
    default_config=default_config,
    candidates=candidates,
)
