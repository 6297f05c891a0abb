"""The specification of paged attention: every page of a sequence gathered, every pair of token and key at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.attention.paged.rules import sizes_of
from capibara.kernels.ops.attention.reference import reference as attention_reference


def reference(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    query_starts: jax.Array | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_splits: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of each sequence's tokens over its own pages, at full precision.

    The last of a sequence's tokens stands at its context's end. `key_splits` says how the work is cut, which a
    specification does not do.
    """
    tokens, heads, depth = query.shape
    sequences, max_pages = page_table.shape
    kv_heads = sizes_of(query, key_pages, page_table).kv_heads
    pages, page_size = key_pages.shape[:2]
    length = max_pages * page_size

    def sequence(rows: jax.Array, table: jax.Array, position: jax.Array, live: jax.Array) -> Any:
        """The rows as tokens of one sequence: those that are not `live` see nothing."""
        at = jnp.clip(table, 0, max(pages - 1, 0))
        keys, values = (x[at].reshape(1, length, kv_heads, depth).swapaxes(1, 2) for x in (key_pages, value_pages))
        key = jnp.arange(length)
        allowed = live[:, None] & (key <= position[:, None])
        if window is not None:
            allowed = allowed & (key > position[:, None] - window)
        out, lse = attention_reference(
            rows.swapaxes(0, 1)[None], keys, values, mask=allowed[None, None], scale=scale, softcap=softcap,
            return_lse=True,
        )  # fmt: skip
        return out[0].swapaxes(0, 1), lse[0].swapaxes(0, 1)

    contexts = jnp.minimum(context_lengths, length)
    if query_starts is None:

        def decode(given: Any) -> Any:
            token, table, context = given
            return sequence(token[None], table, context[None] - 1, context[None] > 0)

        out, lse = jax.lax.map(decode, (query, page_table, contexts))
        out, lse = out.reshape(query.shape), lse.reshape(tokens, heads)
    else:

        def add(made: Any, given: Any) -> Any:
            table, context, start, end = given
            token = jnp.arange(tokens)
            mine = (token >= start) & (token < end)
            out, lse = sequence(query, table, context - end + token, mine)
            return (jnp.where(mine[:, None, None], out, made[0]), jnp.where(mine[:, None], lse, made[1])), None

        wide = jnp.promote_types(jnp.float32, query.dtype)
        nothing = (jnp.zeros_like(query), jnp.full((tokens, heads), -jnp.inf, wide))
        given = (page_table, contexts, query_starts[:sequences], query_starts[1:])
        (out, lse), _ = jax.lax.scan(add, nothing, given)
    return (out, lse) if return_lse else out
