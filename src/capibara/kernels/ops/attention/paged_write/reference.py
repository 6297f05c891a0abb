"""The specification of paged_write: heads cut apart, queries and keys turned, rows of the pools set."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.ops.attention.paged_write.rules import sizes_of
from capibara.kernels.ops.attention.rope import rotated_by


def cut_and_turned(
    projected: jax.Array, key_pages: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(queries, keys, values), each [tokens, heads, head_dim], the first two turned."""
    n = sizes_of(projected, key_pages, cos)
    if projected.ndim == 4:
        projected = projected.sum(0).astype(key_pages.dtype)
    q, k, v = jnp.split(projected, (n.heads, n.heads + n.kv_heads), axis=1)
    cos, sin = cos[:, None], sin[:, None]
    return rotated_by(q, cos, sin), rotated_by(k, cos, sin), v


def places(pool: jax.Array, page: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(page, slot) of tokens; a page past the pool for those that are written nowhere."""
    pages, page_size = pool.shape[:2]
    inside = (page >= 0) & (page < pages) & (slot >= 0) & (slot < page_size)
    return jnp.where(inside, page, pages), jnp.where(inside, slot, 0)


def reference(
    projected: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    page: jax.Array,
    slot: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(turned queries, key pages, value pages); a token whose page or slot is not in the pools is written nowhere."""
    q, k, v = cut_and_turned(projected, key_pages, cos, sin)
    at = places(key_pages, page, slot)

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[at].set(new.reshape(new.shape[0], *pool.shape[2:]), mode="drop")

    return q, put(key_pages, k), put(value_pages, v)
