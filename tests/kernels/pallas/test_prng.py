"""The counter PRNG: fixed bits, the same in either signedness, and statistics that a dropout mask needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.pallas import prng

SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
ROWS, COLUMNS = 1024, 2048


def _bits(seed: np.ndarray = SEED, first_row: int = 0, first_column: int = 0) -> np.ndarray:
    rows = jnp.arange(first_row, first_row + ROWS, dtype=jnp.uint32)[:, None]
    columns = jnp.arange(first_column, first_column + COLUMNS, dtype=jnp.uint32)
    return np.asarray(prng.random_bits(prng.row_keys(jnp.asarray(seed), rows), columns))


def _in_python(seed: np.ndarray, row: int, column: int) -> int:
    """The same hash in unbounded integers: what no compiler or platform can change."""
    mask = 0xFFFFFFFF

    def final(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B & mask
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & mask
        return x ^ (x >> 16)

    first = final((row * 0x9E3779B9 & mask) ^ int(seed[0]))
    second = final((first + int(seed[1])) & mask)
    x = final(first ^ second) ^ (column * 0x9E3779B9 & mask)
    x = ((x ^ (x >> 16)) * 0x7FEB352D & mask) ^ second
    x = (x ^ (x >> 15)) * 0x846CA68B & mask
    return x ^ (x >> 16)


@pytest.mark.quick
def test_the_bits_are_those_of_the_definition() -> None:
    bits = _bits()
    for row, column in ((0, 0), (1, 0), (0, 1), (513, 1999), (ROWS - 1, COLUMNS - 1)):
        assert int(bits[row, column]) == _in_python(SEED, row, column)


@pytest.mark.quick
def test_signed_arithmetic_gives_the_same_bits_and_mask() -> None:
    rows, columns = np.arange(64, dtype=np.int32)[:, None], np.arange(96, dtype=np.int32)
    signed = jax.jit(lambda seed: prng.random_bits(prng.row_keys(seed, rows), columns))(jnp.asarray(SEED))
    assert signed.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(signed).view(np.uint32), _bits()[:64, :96])
    for rate in (0.1, 0.5, 0.9):
        wanted = jax.jit(prng.keep_mask, static_argnums=3)(
            jnp.asarray(SEED), rows.astype(np.uint32), columns.astype(np.uint32), rate
        )
        np.testing.assert_array_equal(jax.jit(prng.kept, static_argnums=1)(signed, rate), wanted)


def test_eager_jit_and_tiles_agree() -> None:
    """A tile in the middle is what the whole has there: no state, no order."""
    rows, columns = jnp.arange(300, 340, dtype=jnp.uint32)[:, None], jnp.arange(700, 777, dtype=jnp.uint32)
    whole = _bits()[300:340, 700:777]
    tile = jax.jit(lambda seed: prng.random_bits(prng.row_keys(seed, rows), columns))(jnp.asarray(SEED))
    np.testing.assert_array_equal(tile, whole)


@pytest.mark.parametrize("rate", [0.0, 2.0**-32, 0.1, 0.25, 0.5, 0.75, 1 - 2.0**-20])
def test_the_threshold_is_exact(rate: float) -> None:
    limit = prng.threshold(rate)
    assert abs(limit - rate * 2**32) <= 0.5
    bits = jnp.array([0, limit - 1 if limit else 0, limit, 0xFFFFFFFF], jnp.uint32)
    assert prng.kept(bits, rate).tolist() == [limit == 0, limit == 0, True, True]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_mean_is_the_rate(rate: float) -> None:
    kept = np.asarray(prng.kept(jnp.asarray(_bits()), rate))
    deviation = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 4 * deviation
    # Every row and column on its own too: the largest of thousands of normal deviates stays under six.
    for axis, count in ((0, ROWS), (1, COLUMNS)):
        assert np.abs(kept.mean(axis) - (1 - rate)).max() < 6 * (rate * (1 - rate) / count) ** 0.5


def test_every_bit_is_fair() -> None:
    bits = _bits()
    for position in range(32):
        share = ((bits >> position) & 1).mean()
        assert abs(share - 0.5) < 4 * 0.5 / bits.size**0.5, position


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    """In standard deviations of what independent bits would give."""
    x, y = (np.where(bits >> 31, 1.0, -1.0) for bits in (left, right))
    return float((x * y).mean() * x.size**0.5)


def test_neighbouring_rows_columns_and_seeds_are_independent() -> None:
    bits = _bits()
    for lag in (1, 2, 3, 7, 16, 64, 128, 512):
        assert abs(_correlation(bits[lag:], bits[:-lag])) < 4.5, f"rows {lag} apart"
        assert abs(_correlation(bits[:, lag:], bits[:, :-lag])) < 4.5, f"columns {lag} apart"
    assert abs(_correlation(bits[1:, 1:], bits[:-1, :-1])) < 4.5
    for word in (0, 1):
        for position in (0, 7, 31):
            other = SEED.copy()
            other[word] ^= np.uint32(1 << position)
            assert abs(_correlation(bits, _bits(other))) < 4.5, f"bit {position} of word {word}"
    assert abs(_correlation(bits, _bits(SEED[::-1].copy()))) < 4.5


def test_runs_have_the_length_of_coin_flips() -> None:
    flips = (_bits() >> 31).astype(np.int8)
    changes = (np.diff(flips, axis=1) != 0).sum()
    trials = flips.shape[0] * (flips.shape[1] - 1)
    assert abs(changes - trials / 2) < 4.5 * trials**0.5 / 2


def test_numbers_are_spread_evenly() -> None:
    """Chi-squared over 256 bins of the top byte and of the bottom byte."""
    bits = _bits()
    for shift in (0, 24):
        counts = np.bincount(((bits >> shift) & 255).ravel(), minlength=256)
        mean = bits.size / 256
        statistic = ((counts - mean) ** 2 / mean).sum()
        assert abs(statistic - 255) < 5 * (2 * 255) ** 0.5


def test_one_row_is_no_permutation_of_another() -> None:
    """Two rows' sets of numbers over many columns share no more than chance gives."""
    columns = jnp.arange(1 << 14, dtype=jnp.uint32)
    rows = jnp.arange(8, dtype=jnp.uint32)[:, None]
    bits = np.asarray(prng.random_bits(prng.row_keys(jnp.asarray(SEED), rows), columns))
    for row in range(1, 8):
        assert np.intersect1d(bits[0], bits[row]).size < 8
