"""The nearest code by XLA: chunks of rows against all codes, so that the table of distances stays small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.vq.nearest.equal import lowest_equal
from capibara.kernels.ops.vq.nearest.reference import (
    distances_to,
    enlargement,
    is_finite,
    outputs,
    squared_norms,
    wide_type,
)
from capibara.kernels.ops.vq.nearest.statistics import statistics

CHUNKS = 80  # the table is an eightieth of N x K, or smaller
TABLE_NUMBERS = 1 << 24  # the most of it at a time: 64 MiB
SMALL_TABLE = 1 << 22  # 16 MiB are made at once: on a GPU every chunk is some launches, and they take 1.3 ms
CANDIDATES = 2


def centre_of(codes: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the mean of the codes [K, D] that can be used, whether it brings each of them closer, or hardly farther).

    They are compared enlarged `by`.

    A product rounds |x|·|c|, so what rows and codes have in common is better taken off them before. Where codes are of
    very different sizes that would round the small ones away: such a codebook has no centre. Nor have codes so large
    that a product about it could overflow; their mean is zero here.
    """
    norms = squared_norms(codes * by)
    usable = is_finite(norms)
    mean = jnp.where(usable[:, None], codes, 0).sum(0) / jnp.maximum(usable.sum(), 1).astype(codes.dtype)
    largest = jnp.where(usable, norms, 0).max()
    mean = jnp.where(largest < jnp.finfo(codes.dtype).max / 16, mean, 0)
    return mean, (~usable | (squared_norms((codes - mean) * by) <= 4 * norms)).all()


def nearest_about(rows: jax.Array, codebook: jax.Array, centre: jax.Array, by: jax.Array) -> jax.Array:
    """Indices of rows [n, D] by one product at full precision, of what is left of rows and codes without `centre`.

    Scores are those of rows and codes enlarged `by`; the codes take it for both, so that rows stay as they are. The
    product rounds |x|·|c|, which hides a small distance between large vectors. So the best two by it are held
    against each other by their differences from the row. It may round equal codes differently, too: `lowest_equal` of
    what is found is the caller's to take.
    """
    wide = wide_type(rows, codebook)
    codes, values = codebook.astype(wide), rows.astype(wide)
    usable = is_finite(squared_norms(codes))
    valid = is_finite(squared_norms(values)) & usable.any()
    enlarged, values = ((codes - centre) * by) * by, values - centre
    # A code that cannot be used spoils its own column, which is not looked at.
    product = lax.dot_general(
        values, enlarged, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    scores = jnp.where(usable, squared_norms(enlarged / by) / 2 - product, jnp.inf)
    numbers = jnp.arange(codes.shape[0], dtype=jnp.int32)
    best = jnp.argmin(scores, axis=1).astype(jnp.int32)
    if codes.shape[0] >= CANDIDATES:
        other = jnp.argmin(jnp.where(numbers == best[:, None], jnp.inf, scores), axis=1).astype(jnp.int32)
        # Where one code can be used, the other is any.
        best = nearer(rows, codebook, best, jnp.where(usable[other], other, best), by)
    return jnp.where(valid, best, -1)


def nearer(rows: jax.Array, codebook: jax.Array, one: jax.Array, other: jax.Array, by: jax.Array) -> jax.Array:
    """Of two codes a row [n], the one whose difference from the row is smaller, the lower where they are alike."""
    low, high = jnp.minimum(one, other), jnp.maximum(one, other)
    far, near = (distances_to(rows, codebook, at, by) for at in (high, low))
    return jnp.where(far < near, high, low)


def nearest_rows(rows: jax.Array, codebook: jax.Array, *, chunked: bool = False) -> jax.Array:
    """Indices of rows [n, D]: about the codes' centre, and where that may hide small codes also about zero."""
    codes = codebook.astype(wide_type(rows, codebook))
    by = enlargement(codes)
    centre, enough = centre_of(codes, by)

    def both(rows: jax.Array) -> jax.Array:
        # One after another, in the same memory. A row that has no code has none by either.
        centres = jnp.stack([centre, jnp.zeros_like(centre)])
        one, other = lax.map(lambda about: nearest_about(rows, codebook, about, by), centres)
        return nearer(rows, codebook, one, other, by)

    def over(fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return in_chunks(fn, codebook.shape[0], rows) if chunked else fn(rows)

    return lax.cond(enough, lambda: over(lambda rows: nearest_about(rows, codebook, centre, by)), lambda: over(both))


def in_chunks(fn: Callable[..., jax.Array], codes: int, *arrays: jax.Array) -> jax.Array:
    """fn of arrays [N, ...], a number a row, so many rows after another that tables of `codes` a row stay small."""
    rows = arrays[0].shape[0]
    chunk = max(1, min(-(-rows // CHUNKS), TABLE_NUMBERS // codes))
    if rows * codes <= SMALL_TABLE or chunk >= rows:
        return fn(*arrays)
    steps = -(-rows // chunk)
    # The last chunk starts early: it computes a few rows again, and no row is padded.
    starts = jnp.minimum(jnp.arange(steps, dtype=jnp.int32) * chunk, rows - chunk)
    made = lax.map(lambda start: fn(*(lax.dynamic_slice_in_dim(x, start, chunk) for x in arrays)), starts)
    whole = made[:-1].reshape(-1)
    return jnp.concatenate([whole, made[-1, chunk - (rows - whole.size) :]])


def finish(x: jax.Array, codebook: jax.Array, indices: jax.Array, return_distances: bool, return_stats: bool) -> Any:
    """The outputs that follow from the indices [N] of x's rows."""
    wide, codes, lead = wide_type(x, codebook), codebook.shape[0], x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])
    distances = counts = sums = None
    if return_distances:
        made = in_chunks(lambda rows, at: distances_to(rows, codebook, at), codes, flat, indices)
        distances = made.reshape(lead)
    if return_stats:
        counts, sums = statistics(flat, indices, codes, wide)
    return outputs(indices.reshape(lead), distances, counts, sums, return_distances, return_stats)


def xla(x: jax.Array, codebook: jax.Array, *, return_distances: bool, return_stats: bool) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    indices = nearest_rows(flat, codebook, chunked=True)
    return finish(x, codebook, lowest_equal(codebook, indices), return_distances, return_stats)


# Opaque to JAX, though it is plain: a loop over chunks of rows that a mesh holds would gather them, where the op's own
# mesh rule gives each device its rows.
IMPLEMENTATION = Implementation("xla", xla, kernel=True)
