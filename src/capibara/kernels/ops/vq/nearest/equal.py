"""Codes that are equal, and the lowest index among them.

A matrix product may round the same numbers differently in different columns, so the best by a product need not be the
lowest of several equal codes. Equal codes are found by their bits instead, once for the codebook: that is exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

MOST_COMPARED = 1 << 22  # pairs of codes


def code_bits(codebook: jax.Array) -> jax.Array:
    """The numbers' bits, uint32 [K, D] (float64: [K, 2 D]); minus zero has those of zero, which it equals."""
    size = codebook.dtype.itemsize
    bits = lax.bitcast_convert_type(codebook, jnp.dtype(f"uint{8 * size}"))
    bits = jnp.where(bits == jnp.asarray(1 << (8 * size - 1), bits.dtype), jnp.zeros_like(bits), bits)
    if size <= 4:
        return bits.astype(jnp.uint32)
    return jnp.concatenate([bits.astype(jnp.uint32), (bits >> 32).astype(jnp.uint32)], axis=-1)


def _mixed(bits: jax.Array, factors: tuple[int, int]) -> jax.Array:
    """Another number for every number, each bit of it from all: a sum of the numbers as they are would collide often.

    1 and -1 differ in the highest bit alone, which is all that a sum would keep of them.
    """
    for factor in factors:
        bits = (bits ^ (bits >> 15)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def hashes(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers of 32 bits for every code: at 8,192 codes the odds are 2e-12 that two unequal ones share both."""
    place = jnp.arange(bits.shape[1], dtype=jnp.uint32)
    first = _mixed(bits + _mixed(place + jnp.uint32(1), (0x9E3779B1, 0x7FEB352D)), (0x2C1B3C6D, 0x297A2D39))
    second = _mixed(first ^ jnp.uint32(0x5BD1E995), (0x846CA68B, 0xD168AAAD))
    return first.sum(-1, dtype=jnp.uint32), second.sum(-1, dtype=jnp.uint32)


def lowest_equal(codebook: jax.Array, indices: jax.Array) -> jax.Array:
    """Each index [n] replaced by the lowest one whose code is equal; -1 stays.

    Codes are equal that have the same hashes. The one found is then compared number by number, so that no collision
    makes a code another. No table of n x K is made, but for one of MOST_COMPARED pairs or fewer.
    """
    codes = codebook.shape[0]
    if codes == 1:
        return indices
    at = jnp.maximum(indices, 0)
    asked = at if indices.shape[0] < codes else jnp.arange(codes, dtype=jnp.int32)
    bits = code_bits(codebook)
    marks = hashes(bits)
    if asked.shape[0] * codes <= MOST_COMPARED:
        lowest = by_comparing(marks, asked)
    else:
        lowest = by_sorting(marks)[asked]
    lowest = jnp.where((bits[lowest] == bits[asked]).all(-1), lowest, asked)
    return jnp.where(indices < 0, indices, lowest if asked is at else lowest[at])


def by_comparing(marks: tuple[jax.Array, jax.Array], asked: jax.Array) -> jax.Array:
    """The lowest code with the marks of each that is asked for, held against all at once.

    One step for an accelerator, which reduces the comparison as it makes it. A CPU stores it, so it is not for many.
    """
    one, two = marks
    alike = (one[asked][:, None] == one) & (two[asked][:, None] == two)
    return jnp.argmax(alike, axis=1).astype(jnp.int32)


def by_sorting(marks: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The lowest code with the marks of each, all of them in order: equal ones stand together, the lowest first."""
    codes = marks[0].shape[0]
    numbers = jnp.arange(codes, dtype=jnp.int32)
    one, two, order = lax.sort((*marks, numbers), num_keys=3)
    new = jnp.concatenate([jnp.ones(1, bool), (one[1:] != one[:-1]) | (two[1:] != two[:-1])])
    first = lax.cummax(jnp.where(new, numbers, 0))
    return jnp.zeros_like(numbers).at[order].set(order[first])
