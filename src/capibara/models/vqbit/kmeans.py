"""The first codes of a codebook: k-means++ and Lloyd's algorithm over a batch, by nearest_code."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.ops.vq import nearest_code

SAMPLED = 8  # rows a code that the first codes are chosen from


def random_rows(key: jax.Array, rows: jax.Array, valid: jax.Array, count: int) -> jax.Array:
    """`count` valid rows in random order, all different while there are enough; zeros where no row is valid."""
    drawn = jnp.where(valid, jax.random.uniform(key, valid.shape), 2.0)
    order = jnp.argsort(drawn)
    available = jnp.maximum(valid.sum(), 1)
    chosen = rows[order[jnp.arange(count) % available]].astype(jnp.float32)
    return jnp.where(valid.any(), chosen, 0.0)


def spread_rows(key: jax.Array, rows: jax.Array, valid: jax.Array, codes: int) -> jax.Array:
    """k-means++ over a sample of the rows: each next code a row, the likelier the farther it is from those before."""
    own, later = jax.random.split(key)
    sample = random_rows(own, rows, valid, min(SAMPLED * codes, rows.shape[0]))

    def step(nearest: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Drawn in proportion to the squared distance. Where all of them are zero, every row is a code already.
        chosen = sample[jax.random.categorical(key, jnp.log(nearest))]
        return jnp.minimum(nearest, jnp.square(sample - chosen).sum(-1)), chosen

    start = jnp.full(sample.shape[:1], jnp.finfo(jnp.float32).max)
    _, made = lax.scan(step, start, jax.random.split(later, codes))
    return made


@functools.partial(jax.jit, static_argnames=("codes", "steps", "implementation"))
def kmeans(
    key: jax.Array, rows: jax.Array, valid: jax.Array, *, codes: int, steps: int, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """(codebook [K, D], rows of each code [K]) after `steps` of Lloyd's algorithm.

    A code that loses all of its rows starts again from a random row.
    """
    first, *later = jax.random.split(key, steps + 1)
    codebook = spread_rows(first, rows, valid, codes)

    def step(codebook: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, counts, sums = nearest_code(rows, codebook, return_stats=True, implementation=implementation)
        mean = sums / jnp.maximum(counts, 1)[:, None]
        moved = jnp.where((counts > 0)[:, None], mean, random_rows(key, rows, valid, codes))
        return moved.astype(jnp.float32), counts

    counts: Any = jnp.ones((codes,), jnp.float32)
    if later:
        codebook, history = lax.scan(step, codebook, jnp.stack(later))
        counts = jnp.maximum(history[-1], 1.0)
    return codebook, counts
