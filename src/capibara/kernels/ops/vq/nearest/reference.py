"""The nearest code of every row, in plain JAX: the specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def wide_type(*arrays: Any) -> Any:
    """What distances and sums are computed in: float32, or wider where an operand is."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays))


def is_finite(squares: jax.Array) -> jax.Array:
    """Whether a squared norm is a number. NaN, infinity and what overflows when it is squared are none."""
    return squares < jnp.inf


def squared_norms(x: jax.Array) -> jax.Array:
    return jnp.square(x).sum(-1)


SMALL = 2.0**-30  # squares of numbers from here on, and of their differences, are numbers of float32


def enlargement(codes: jax.Array) -> jax.Array:
    """What rows and codes are multiplied by to be compared: 1, but for a codebook of numbers below SMALL.

    Squares of those vanish: at 1e-25 all distances would be zero. It is the power of two that brings the largest to
    about 1, so no digit changes. A row so large that it overflows then is as far from all codes.
    """
    return enlargement_of(largest_number(codes, is_finite(squared_norms(codes))))


def largest_number(codes: jax.Array, usable: jax.Array) -> jax.Array:
    return jnp.where(usable[:, None], jnp.abs(codes), 0).max(initial=0)


def enlargement_of(largest: jax.Array) -> jax.Array:
    """The `enlargement` of codes whose largest number is this one."""
    power = jnp.exp2(jnp.clip(-jnp.floor(jnp.log2(jnp.maximum(largest, jnp.finfo(largest.dtype).tiny))), 0, 120))
    return jnp.where((largest < SMALL) & (largest > 0), power, 1).astype(largest.dtype)


def distances_to(x: jax.Array, codebook: jax.Array, indices: jax.Array, by: Any = None) -> jax.Array:
    """|x - codebook[index]|² of every row in the wide type, NaN where the index is -1; of differences enlarged `by`.

    By differences: the expanded form |x|² - 2 x·c + |c|² loses what two close vectors have in common.
    """
    wide = wide_type(x, codebook)
    found = indices >= 0
    codes = codebook[jnp.maximum(indices, 0)].astype(wide)
    difference = x.astype(wide) - codes
    if by is not None:
        difference = difference * by
    # Rows without a code are cleared first: a derivative of zero times NaN would be NaN.
    difference = jnp.where(found[..., None], difference, 0)
    return jnp.where(found, jnp.square(difference).sum(-1), jnp.nan)


def outputs(indices: Any, distances: Any, counts: Any, sums: Any, return_distances: bool, return_stats: bool) -> Any:
    """What the op returns: the indices alone, or (indices, distances, counts, sums), each where it is asked for."""
    made = [indices]
    if return_distances:
        made.append(distances)
    if return_stats:
        made += [counts, sums]
    return tuple(made) if len(made) > 1 else indices


def reference(x: jax.Array, codebook: jax.Array, *, return_distances: bool = False, return_stats: bool = False) -> Any:
    """The index of the code nearest to each row of x, the lowest of those equally near; -1 for a row that has none.

    A row has none when its squared norm is not finite (NaN, infinity). A code whose squared norm is not finite is
    nobody's nearest. `return_distances` adds the squared distances (NaN for index -1); `return_stats` adds how many
    rows each code has, and the sum of those rows.
    """
    wide = wide_type(x, codebook)
    codes = lax.stop_gradient(codebook).astype(wide)
    rows = lax.stop_gradient(x).astype(wide)
    usable = is_finite(squared_norms(codes))
    by = enlargement(codes)
    # A code at a time, so that no number of x is kept K times. [K, ...].
    table = lax.map(lambda code: jnp.square((rows - code) * by).sum(-1), codes)
    table = jnp.where(usable.reshape(-1, *(1,) * (x.ndim - 1)) & ~jnp.isnan(table), table, jnp.inf)
    valid = is_finite(squared_norms(rows)) & usable.any()
    # Where every distance overflows, the first code that can be used is as near as any.
    best = jnp.where(table.min(0) < jnp.inf, table.argmin(0), usable.argmax())
    indices = jnp.where(valid, best, -1).astype(jnp.int32)
    distances = distances_to(x, codebook, indices) if return_distances else None
    counts = sums = None
    if return_stats:
        taken = indices.reshape(-1, 1) == jnp.arange(codebook.shape[0])
        counts = taken.sum(0).astype(wide)
        kept = jnp.where((indices >= 0)[..., None], x.astype(wide), 0).reshape(-1, x.shape[-1])
        sums = jnp.dot(taken.astype(wide).T, kept, precision=lax.Precision.HIGHEST)
    return outputs(indices, distances, counts, sums, return_distances, return_stats)
