"""How many rows each code has, and their sum: what a moving average of the codes needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.context import current_target
from capibara.kernels.core.varying import vary_like

PARTS = 3  # bfloat16 numbers of 8 bits that hold a float32 of 24
CHUNKS = 64
TABLE_NUMBERS = 1 << 24  # of the table of ones at a time


def split(x: jax.Array) -> list[jax.Array]:
    """bfloat16 arrays that add up to x, to the last bit of a float32 that is not near the smallest."""
    if x.dtype == jnp.bfloat16:
        return [x]
    made, left = [], x.astype(jnp.float32)
    for _ in range(PARTS):
        # Rounded by an operation of its own: of a conversion there and back XLA may keep more digits than bfloat16 has.
        part = lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7)
        made.append(part.astype(jnp.bfloat16))
        left = left - part
    return made


def by_product(x: jax.Array, at: jax.Array, codes: int) -> tuple[jax.Array, jax.Array]:
    """Counts and sums of a chunk as a product with a table of ones.

    The same bits at every run, which adding by address in no fixed order would not give, on matrix units that multiply
    ones exactly.
    """
    ones = (at[:, None] == jnp.arange(codes, dtype=jnp.int32)).astype(jnp.bfloat16)
    parts = split(x)
    beside = jnp.concatenate([*parts, jnp.ones((x.shape[0], 1), jnp.bfloat16)], axis=1)
    total = lax.dot_general(ones, beside, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    pieces = jnp.split(total[:, :-1], len(parts), axis=1)
    return total[:, -1], sum(pieces[1:], pieces[0])


def by_address(x: jax.Array, at: jax.Array, codes: int, wide: Any) -> tuple[jax.Array, jax.Array]:
    """Counts and sums of a chunk, each row added where it belongs: in order, on a CPU."""
    counts = jnp.zeros((codes,), wide).at[at].add(1, mode="drop")
    return counts, jnp.zeros((codes, x.shape[1]), wide).at[at].add(x.astype(wide), mode="drop")


def statistics(x: jax.Array, indices: jax.Array, codes: int, wide: Any) -> tuple[jax.Array, jax.Array]:
    """(counts [K], sums [K, D]) of rows x [N, D] whose index is not negative, a chunk of rows after another."""
    rows, width = x.shape
    in_order = current_target().platform == "cpu" or wide == jnp.float64
    chunk = max(1, min(-(-rows // CHUNKS), TABLE_NUMBERS // codes))
    if rows * codes <= TABLE_NUMBERS // 64:  # small enough to be done at once
        chunk = max(rows, 1)

    def step(total: tuple[jax.Array, jax.Array], number: Any) -> tuple[Any, None]:
        # The last chunk starts early, and what it shares with the one before is not counted again.
        start = jnp.minimum(number * chunk, rows - chunk)
        found = lax.dynamic_slice_in_dim(indices, start, chunk)
        joins = (found >= 0) & (start + jnp.arange(chunk, dtype=jnp.int32) >= number * chunk)
        at = jnp.where(joins, found, codes)  # past the last code: nowhere
        values = lax.dynamic_slice_in_dim(x, start, chunk)
        # What joins nothing may be no number, and zero times NaN is NaN.
        values = jnp.where(joins[:, None], values, jnp.zeros_like(values))
        counts, sums = by_address(values, at, codes, wide) if in_order else by_product(values, at, codes)
        return (total[0] + counts.astype(wide), total[1] + sums.astype(wide)), None

    total = vary_like(jnp.zeros((codes,), wide), x), vary_like(jnp.zeros((codes, width), wide), x)
    if rows:
        total, _ = lax.scan(step, total, jnp.arange(-(-rows // chunk), dtype=jnp.int32))
    return total
