"""The specification of attention, in plain JAX at full precision: every pair of query and key, all at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.attention.masking import Window, both, by_position, expand_blocks
from capibara.kernels.pallas import prng


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    block_mask: jax.Array | None = None,
    dropout_seed: jax.Array | None = None,
    *,
    causal: bool = False,
    q_offset: int = 0,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    block_size: tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(softcap(scale · q kᵀ + bias)) v over the keys that each query may see, in float32 or wider.

    A query that may see no key gives zeros, and a log-sum-exp of minus infinity; a key that no query may see takes
    no part at all, whatever its value.
    """
    batch, heads, rows, depth = q.shape
    kv_heads, columns = k.shape[1:3]
    groups = heads // kv_heads
    wide = jnp.promote_types(jnp.float32, q.dtype)
    allowed = pairs_allowed(
        rows, columns, mask, q_segments, kv_segments, block_mask, causal, q_offset, window, block_size
    )

    # A product with zero would keep a NaN alive, here and in the gradient, so what nothing sees is put to zero.
    # Selecting zero also makes its gradient zero.
    query, key, value = q.astype(wide), k.astype(wide), v.astype(wide)
    if allowed is not None:
        query = jnp.where(allowed.any(-1)[..., None], query, 0)
        seen = allowed.any(-2)  # [B|1, H|1, S]
        if seen.shape[1] == heads:
            seen = seen.reshape(seen.shape[0], kv_heads, groups, columns).any(2)
        key, value = (jnp.where(seen[..., None], x, 0) for x in (key, value))
    query = query.reshape(batch, kv_heads, groups, rows, depth)

    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhgtd,bhsd->bhgts", query, key, precision=exact).reshape(batch, heads, rows, columns)
    scores = scores * (depth**-0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.astype(wide)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)

    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    # The inner select keeps minus infinity out of the arithmetic that is differentiated.
    finite = jnp.where(jnp.isneginf(scores), highest, scores)
    weights = jnp.where(jnp.isneginf(scores), 0, jnp.exp(finite - highest))
    total = weights.sum(-1, keepdims=True)
    alive = total != 0  # a NaN that a query sees stays one
    probabilities = weights / jnp.where(alive, total, 1)
    lse = jnp.where(alive, jnp.log(jnp.where(alive, total, 1)) + highest, -jnp.inf)[..., 0]

    if dropout_rate > 0:
        keep = dropped_out(dropout_seed, batch, heads, rows, columns, dropout_rate)
        probabilities = jnp.where(keep, probabilities / (1 - dropout_rate), 0)
    grouped = probabilities.reshape(batch, kv_heads, groups, rows, columns)
    out = jnp.einsum("bhgts,bhsd->bhgtd", grouped, value, precision=exact)
    out = out.reshape(batch, heads, rows, depth).astype(q.dtype)
    return (out, lse) if return_lse else out


def pairs_allowed(
    rows: int,
    columns: int,
    mask: jax.Array | None,
    q_segments: jax.Array | None,
    kv_segments: jax.Array | None,
    block_mask: jax.Array | None,
    causal: bool,
    q_offset: int,
    window: Window,
    block_size: tuple[int, int] | None,
) -> jax.Array | None:
    """Every rule at once as [B|1, H|1, T, S]; None when every query may see every key."""
    i, j = jnp.arange(rows), jnp.arange(columns)
    allowed = by_position(i[:, None], j[None, :], causal, q_offset, window)
    allowed = None if allowed is None else allowed[None, None]
    allowed = both(allowed, mask)
    if q_segments is not None and kv_segments is not None:
        allowed = both(allowed, (q_segments[:, :, None] == kv_segments[:, None, :])[:, None])
    if block_mask is not None and block_size is not None:
        allowed = both(allowed, expand_blocks(block_mask, i, j, block_size))
    if allowed is None:
        return None
    return jnp.broadcast_to(allowed, (*allowed.shape[:2], rows, columns))


def dropped_out(seed: jax.Array | None, batch: int, heads: int, rows: int, columns: int, rate: float) -> jax.Array:
    """Which probabilities dropout keeps, [B, H, T, S]: row (b·H + h)·T + i of the counter PRNG, column j."""
    flat = jnp.arange(batch * heads * rows, dtype=jnp.uint32).reshape(batch, heads, rows, 1)
    return prng.keep_mask(seed, flat, jnp.arange(columns, dtype=jnp.uint32), rate)


def reference_grad(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    q_segments: jax.Array | None,
    kv_segments: jax.Array | None,
    block_mask: jax.Array | None,
    dropout_seed: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None = None,
    **params: Any,
) -> tuple[Any, Any, Any, Any]:
    """(dq, dk, dv, dbias) by differentiating the reference; dbias is None without a bias.

    `out` and `lse` are what the forward pass returned: implementations save work with them, the specification does
    not need them.
    """
    rest = (mask, q_segments, kv_segments, block_mask, dropout_seed)

    def forward(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return reference(q, k, v, bias, *rest, **params, return_lse=True)

    (made, made_lse), pull = jax.vjp(forward, q, k, v, bias)
    flow_lse = jnp.zeros_like(made_lse) if d_lse is None else d_lse.astype(made_lse.dtype)
    return pull((d_out.astype(made.dtype), flow_lse))
