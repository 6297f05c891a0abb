"""Where each choice of a token goes: choices sorted by group, or given places in buffers of a fixed size.

A group is an expert, or the device that holds it. Both directions are kept, which row a choice has and which choice a
row has, so that rows are gathered whichever way they move and nothing is ever scattered but the small integers here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from capibara.kernels.core.context import current_target

PACKED_BELOW = 2**31  # group and choice together fit a 32-bit integer
COMPARED_BELOW = 2**26  # pairs of group and choice: some 60 us of a GPU, as long as the twenty rounds of a search


class Permutation(NamedTuple):
    """Which choice each row holds, and which row each choice has.

    A choice is a number token · top_k + place. An empty row's source, and a dropped choice's slot, is past the end.
    """

    source: Int[Array, " rows"]
    slot: Int[Array, "tokens top_k"]


class Arranged(NamedTuple):
    permutation: Permutation
    group_sizes: Int[Array, " groups"]
    """Rows of each group that hold something."""


def by_group(groups: Int[Array, "tokens top_k"], count: int, priority: jax.Array | None = None) -> Arranged:
    """Choices sorted by group, in the order of tokens within one; a group number of `count` or more comes last.

    `priority` [tokens, top_k] orders the choices of a group instead, the highest first, ties in the order of tokens.
    """
    flat = groups.reshape(-1)
    total = flat.shape[0]
    number = jnp.arange(total, dtype=jnp.int32)
    edges = jnp.arange(count + 1, dtype=jnp.int32)
    if priority is None and (count + 1) * total < PACKED_BELOW:
        # Group and choice in one integer: one array is sorted, and no order among equals is needed. Measured on a CPU,
        # 65536 choices of 32 experts: 4 ms, where a stable argsort takes 23 and a cumulative sum over experts 9.
        packed = lax.sort(jnp.minimum(flat, count) * total + number, is_stable=False)
        source = lax.rem(packed, jnp.int32(max(total, 1)))
        starts = _first_at(packed, edges * total)
    else:
        keys = (flat,) if priority is None else (flat, -lax.stop_gradient(priority).reshape(-1))
        ordered, *_, source = lax.sort((*keys, number), num_keys=len(keys), is_stable=True)
        starts = _first_at(ordered, edges.astype(ordered.dtype))
    slot = jnp.zeros(total, jnp.int32).at[source].set(number, unique_indices=True, mode="promise_in_bounds")
    return Arranged(Permutation(source, slot.reshape(groups.shape)), jnp.diff(starts))


def _first_at(ordered: jax.Array, values: jax.Array) -> jax.Array:
    """Where each value would go in: by a search, or on a GPU, where each round of one is programs, by comparing all."""
    compared = current_target().platform == "gpu" and ordered.size * values.size < COMPARED_BELOW
    return jnp.searchsorted(ordered, values, method="compare_all" if compared else "scan").astype(jnp.int32)


def in_buffers(
    groups: Int[Array, "tokens top_k"], count: int, capacity: int, priority: jax.Array | None = None
) -> Arranged:
    """Choices in buffers [count, capacity], a buffer a group, filled from the front; what does not fit is dropped.

    Kept are the first tokens of a group, or those of the highest `priority`. A group number of `count` or more is
    dropped.
    """
    (order, place), sizes = by_group(groups, count, priority)
    total = order.shape[0]
    starts = jnp.cumsum(sizes) - sizes
    kept = jnp.minimum(sizes, capacity)
    column = jnp.arange(capacity, dtype=jnp.int32)
    filled = column < kept[:, None]
    source = order.at[jnp.where(filled, starts[:, None] + column, total)].get(mode="fill", fill_value=total)
    group = jnp.clip(groups, 0, count - 1)
    within = place - starts[group]
    fits = (groups < count) & (within < capacity)
    slot = jnp.where(fits, group * capacity + within, count * capacity).astype(jnp.int32)
    return Arranged(Permutation(source.reshape(-1), slot), kept)
