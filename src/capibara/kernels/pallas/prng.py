"""A counter-based random generator that runs inside kernels: the same bits on every platform.

The number at (seed, row, column) is a hash of those integers and of nothing else, so a backward pass draws again
exactly what the forward pass drew, whatever the tiling and whatever the chip. Only additions, exclusive ors,
logical shifts and products of 32-bit integers are used, which every backend has.

The hash is in two stages. `row_keys` mixes the seed with the row into 64 bits and is computed once a row;
`random_bits` folds a column into them with two rounds of a 32-bit finaliser, a few operations an element. One word
of the row's key enters before the first round and the other between the two: with one word alone the numbers of one
row would be a permutation of another's.

Where 16 bits are enough, one hash serves two neighbouring columns: the functions named `pair_*`. It saves half of the
work where a compiler sees that neighbours share their hash, and only rounds the rate, to a multiple of 1/65536.

Arrays may be uint32 or int32 (some kernels have no unsigned arithmetic): the bits are the same.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Multipliers of 32-bit finalisers found by others' exhaustive searches for the least bias: the first pair with the
# shifts (16, 15, 16) by Chris Wellons' hash prospector, the second by Austin Appleby for MurmurHash3 (16, 13, 16).
_COLUMN_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_ROW_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
_WEYL = 0x9E3779B9  # 2^32 / golden ratio: neighbouring counters differ in half their bits


def _constant(value: int, dtype: Any) -> Any:
    """A 32-bit pattern in either signedness, as a scalar that stays weak inside a kernel."""
    return np.uint32(value).view(np.int32) if np.dtype(dtype) == np.int32 else np.uint32(value)


def _shift(x: jax.Array, by: int) -> jax.Array:
    return jax.lax.shift_right_logical(x, jnp.full(x.shape, by, x.dtype))


def _words(x: Any, dtype: Any) -> jax.Array:
    """Any 32-bit integers as `dtype`, bits kept; a Python int is taken modulo 2^32."""
    if isinstance(x, int | np.integer):
        return jnp.asarray(_constant(int(x) & 0xFFFFFFFF, dtype))
    if x.dtype == dtype:
        return jnp.asarray(x)
    if x.dtype in (jnp.int32, jnp.uint32):
        return jax.lax.bitcast_convert_type(jnp.asarray(x), dtype)
    return jnp.asarray(x).astype(dtype)


def _finalise_row(x: jax.Array) -> jax.Array:
    first, second = (_constant(m, x.dtype) for m in _ROW_MULTIPLIERS)
    x = (x ^ _shift(x, 16)) * first
    x = (x ^ _shift(x, 13)) * second
    return x ^ _shift(x, 16)


def row_keys(seed: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
    """Two words for each row: everything of the hash that does not depend on the column.

    Args:
      seed: two 32-bit words, as an array [2] or a pair of scalars.
      rows: integers of any shape; their type (uint32 or int32) is the type of the computation.
    """
    dtype = rows.dtype if getattr(rows, "dtype", None) in (jnp.int32, jnp.uint32) else jnp.dtype(jnp.uint32)
    low, high, rows = _words(seed[0], dtype), _words(seed[1], dtype), _words(rows, dtype)
    first = _finalise_row((rows * _constant(_WEYL, dtype)) ^ low)
    second = _finalise_row(first + high)
    # `first` alone is a bijection of the row; hashing it once more with the other word makes the pair 64-bit.
    return _finalise_row(first ^ second), second


def random_bits(keys: tuple[jax.Array, jax.Array], columns: Any) -> jax.Array:
    """32 random bits for each pair of row and column; the keys and the columns broadcast against each other."""
    first, second = keys
    columns = _words(columns, first.dtype)
    early, late = (_constant(m, first.dtype) for m in _COLUMN_MULTIPLIERS)
    x = first ^ (columns * _constant(_WEYL, first.dtype))
    x = ((x ^ _shift(x, 16)) * early) ^ second
    x = (x ^ _shift(x, 15)) * late
    return x ^ _shift(x, 16)


def threshold(rate: float) -> int:
    """The integer below which 32 random bits mean "drop": rate · 2^32, rounded to the nearest.

    >>> hex(threshold(0.5))
    '0x80000000'
    """
    # Scaling by a power of two is exact, so the only rounding is to the nearest integer.
    return min(round(math.ldexp(rate, 32)), 0xFFFFFFFF)


def kept(bits: jax.Array, rate: float) -> jax.Array:
    """True where the bits, read as an unsigned number, reach the rate's threshold."""
    limit = threshold(rate)
    if bits.dtype == jnp.int32:
        # Flipping the top bit maps unsigned order onto signed order.
        flip = _constant(0x80000000, jnp.int32)
        return (bits ^ flip) >= _constant(limit ^ 0x80000000, jnp.int32)
    return bits >= np.uint32(limit)


def keep_mask(seed: Any, rows: Any, columns: Any, rate: float) -> jax.Array:
    """Which elements dropout keeps: True with probability 1 - rate, decided by (seed, row, column) alone.

    >>> seed = jnp.array([1, 2], jnp.uint32)
    >>> keep_mask(seed, jnp.arange(4)[:, None], jnp.arange(1000), 0.25).shape
    (4, 1000)
    """
    return kept(random_bits(row_keys(seed, rows), columns), rate)


def pair_bits(keys: tuple[jax.Array, jax.Array], columns: Any) -> jax.Array:
    """16 random bits, as numbers up to 65535: columns 2k and 2k + 1 have the low and the high half of one hash."""
    columns = _words(columns, keys[0].dtype)
    return half_of(random_bits(keys, _shift(columns, 1)), columns)


def half_of(bits: jax.Array, columns: jax.Array) -> jax.Array:
    """The half of a pair's 32 bits that belongs to a column: the low one to an even column, the high one to an odd."""
    one, low_half = (_constant(value, bits.dtype) for value in (1, 0xFFFF))
    return jnp.where((columns & one) == one, _shift(bits, 16), bits & low_half)


def pair_threshold(rate: float) -> int:
    """The integer below which 16 random bits mean "drop": rate · 2^16, rounded to the nearest.

    >>> pair_threshold(0.5), pair_threshold(0.1), pair_threshold(0.9999999)
    (32768, 6554, 65535)
    """
    return min(round(math.ldexp(rate, 16)), 0xFFFF)


def pair_rate(rate: float) -> float:
    """The share that `pair_keep_mask` drops: the rate rounded to a multiple of 1/65536, and below 1.

    >>> pair_rate(0.25), pair_rate(1e-6)
    (0.25, 0.0)
    """
    return math.ldexp(pair_threshold(rate), -16)


def pair_kept(bits: jax.Array, rate: float) -> jax.Array:
    """True where bits of `pair_bits` reach the rate's threshold; they are below 2^16, so of either signedness."""
    return bits >= _constant(pair_threshold(rate), bits.dtype)


def pair_kept_of(hashes: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """`pair_kept(half_of(hashes, columns), rate)` of int32 words, in fewer operations where an operation counts.

    A column's half is looked at where it stands in the high one: what is below it cannot decide, since the threshold
    has nothing there. The exclusive or, which turns unsigned order into signed order, is one with the hash's last.
    """
    ordered = hashes ^ _constant(0x80008000, jnp.int32)
    odd = (columns & _constant(1, jnp.int32)) == _constant(1, jnp.int32)
    own = jnp.where(odd, ordered, ordered << jnp.full(ordered.shape, 16, jnp.int32))
    return own >= _constant((pair_threshold(rate) << 16) ^ 0x80000000, jnp.int32)


def pair_keep_mask(seed: Any, rows: Any, columns: Any, rate: float) -> jax.Array:
    """As `keep_mask`, by one hash for two columns: True with probability 1 - pair_rate(rate).

    >>> pair_keep_mask(jnp.array([1, 2], jnp.uint32), jnp.arange(4)[:, None], jnp.arange(1000), 0.25).shape
    (4, 1000)
    """
    return pair_kept(pair_bits(row_keys(seed, rows), columns), rate)


def bits_by_place(seed: Any, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for each element of an array: a function of the seed (two uint32) and the element's place alone.

    Made of counters, so that it is split over a mesh like anything elementwise, is the same on any, and compiles at
    once.

    >>> bits_by_place(jnp.array([1, 2], jnp.uint32), (4, 8)).shape
    (4, 8)
    """
    rows = jnp.zeros(shape[:-1], jnp.uint32)
    for axis in range(len(shape) - 1):
        rows = rows * jnp.uint32(shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, shape[:-1], axis)
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return random_bits(row_keys(seed, rows[..., None]), columns)


def normal_by_place(seed: Any, shape: tuple[int, ...]) -> jax.Array:
    """Normal float32 numbers by `bits_by_place`, to within 5.4 deviations."""
    # 23 bits as the middles of as many steps between -1 and 1: never either end, where the normal is infinite.
    middle = (bits_by_place(seed, shape) >> 9).astype(jnp.float32) * 2.0**-22 + (2.0**-23 - 1.0)
    return jax.lax.erf_inv(middle) * np.float32(math.sqrt(2))
