"""What dropout keeps: decided by the seed and an element's place in the whole array, and by nothing else.

An element's row is its index among the leading axes, counted in row-major order; its column is its index on the last
axis. Two things change how rows are counted. Under vmap every element of the mapped axis counts from 0, as it would
alone: that axis has a stride of 0. On a mesh a device knows its own part only: the strides are those of the whole
array, and `offsets` says at which row and column the part begins.

Two neighbouring columns share one hash, 16 bits each, so a rate is rounded to a multiple of 1/65536. What is kept is
scaled for the rounded rate: the mean of the result is exact.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.pallas import prng

Strides = tuple[int, ...]


def row_major(lead: tuple[int, ...]) -> Strides:
    """How far apart in rows neighbours along each leading axis are.

    >>> row_major((4, 3, 5))
    (15, 5, 1)
    """
    return tuple(math.prod(lead[axis + 1 :]) for axis in range(len(lead)))


def row_keys(
    lead: tuple[int, ...], seed: jax.Array, offsets: jax.Array | None, strides: Strides | None
) -> tuple[jax.Array, jax.Array]:
    """The two words of each row, shaped as the leading axes. A seed [groups, 2] has one for each of the first axis."""
    rows: Any = jnp.zeros(lead, jnp.uint32)
    for axis, stride in enumerate(row_major(lead) if strides is None else strides):
        rows = rows + lax.broadcasted_iota(jnp.uint32, lead, axis) * np.uint32(stride & 0xFFFFFFFF)
    if offsets is not None:
        rows = rows + lax.bitcast_convert_type(offsets[0], jnp.uint32)
    if seed.ndim == 2:
        words = tuple(seed[:, word].reshape(-1, *(1,) * (len(lead) - 1)) for word in range(2))
        return prng.row_keys(words, rows)
    return prng.row_keys(seed, rows)


def kept(keys: tuple[jax.Array, jax.Array], columns: int, offsets: jax.Array | None, rate: float) -> jax.Array:
    """True for the elements [*lead, columns] that stay."""
    numbers = lax.iota(jnp.uint32, columns)
    if offsets is not None:
        numbers = numbers + lax.bitcast_convert_type(offsets[1], jnp.uint32)
    return prng.pair_kept(prng.pair_bits((keys[0][..., None], keys[1][..., None]), numbers), rate)


def scale(rate: float) -> float:
    """What is kept is multiplied by this.

    >>> scale(0.5)
    2.0
    """
    return 1 / (1 - prng.pair_rate(rate))
