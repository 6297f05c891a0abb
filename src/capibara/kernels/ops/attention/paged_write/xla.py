"""paged_write by XLA: a fusion that turns the queries, and one for each pool that a row is written to."""

from __future__ import annotations

from typing import Any

import jax

from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.attention.paged_write.reference import cut_and_turned, places


def put_rows(pool: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array, *, spare_page: bool) -> jax.Array:
    """The pool [pages, page_size, ...] with new [tokens, ...] in its places: no two in one, none where `page` is past
    the pool. A spare page, its last, is for what is written nowhere."""
    if spare_page and new.shape[0] == 1:
        # A slice has to lie somewhere: one past the pool is moved to its last page. XLA makes of a scatter of one row
        # what was there, chosen or not, and then the slice: a pass more in each layer of a lone sequence's token.
        where: tuple[Any, ...] = (page[0], slot[0], *(0,) * (pool.ndim - 2))
        return jax.lax.dynamic_update_slice(pool, new[None], where)
    return pool.at[page, slot].set(new, mode="drop", unique_indices=True)


def xla(
    projected: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    *,
    spare_page: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = cut_and_turned(projected, key_pages, cos, sin)
    at = places(key_pages, page, slot)
    pools = (
        put_rows(pool, new.reshape(new.shape[0], *pool.shape[2:]), *at, spare_page=spare_page)
        for pool, new in ((key_pages, k), (value_pages, v))
    )
    return q, next(pools), next(pools)


IMPLEMENTATION = Implementation("xla", xla, hints=("spare_page",))
