"""One hash for two columns: the bits of the definition, and statistics that a dropout mask needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.pallas import prng

SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
ROWS, COLUMNS = 512, 2048


@pytest.fixture(scope="module")
def bits() -> np.ndarray:
    rows, columns = jnp.arange(ROWS, dtype=jnp.uint32)[:, None], jnp.arange(COLUMNS, dtype=jnp.uint32)
    return np.asarray(prng.pair_bits(prng.row_keys(jnp.asarray(SEED), rows), columns))


@pytest.mark.quick
def test_a_pair_shares_the_halves_of_one_hash(bits: np.ndarray) -> None:
    rows, pairs = np.arange(ROWS, dtype=np.uint32)[:, None], np.arange(COLUMNS // 2, dtype=np.uint32)
    words = np.asarray(jax.jit(lambda seed: prng.random_bits(prng.row_keys(seed, rows), pairs))(jnp.asarray(SEED)))
    np.testing.assert_array_equal(bits[:, 0::2], words & 0xFFFF)
    np.testing.assert_array_equal(bits[:, 1::2], words >> 16)


@pytest.mark.quick
def test_signed_words_and_parts_that_begin_inside_a_pair_agree(bits: np.ndarray) -> None:
    rows, columns = np.arange(7, 40, dtype=np.int32)[:, None], np.arange(33, 100, dtype=np.int32)
    signed = jax.jit(lambda seed: prng.pair_bits(prng.row_keys(seed, rows), columns))(jnp.asarray(SEED))
    assert signed.dtype == jnp.int32
    np.testing.assert_array_equal(signed, bits[7:40, 33:100])
    for rate in (0.1, 0.9):
        mask = jax.jit(prng.pair_keep_mask, static_argnums=3)(jnp.asarray(SEED), rows, columns, rate)
        np.testing.assert_array_equal(mask, bits[7:40, 33:100] >= round(rate * 65536))


@pytest.mark.quick
@pytest.mark.parametrize("rate", [2**-18, 0.1, 0.5, 0.9999999])
def test_the_mask_in_fewer_operations_is_the_same(rate: float) -> None:
    """Hashes at the thresholds too, where an order or a half mistaken for another would show."""
    rows, columns = np.arange(64, dtype=np.int32)[:, None], np.arange(COLUMNS, dtype=np.int32)
    drawn = jax.jit(lambda seed: prng.random_bits(prng.row_keys(seed, rows), columns))(jnp.asarray(SEED))
    limit = prng.pair_threshold(rate)
    halves = np.array([0, max(limit - 1, 0), limit, 0x7FFF, 0x8000, 0xFFFF], np.uint32)
    edges = ((halves[:, None] << 16) | halves).reshape(-1, 1).view(np.int32)

    @jax.jit
    def both(hashes: Any) -> tuple[Any, Any]:
        return prng.pair_kept_of(hashes, columns, rate), prng.pair_kept(prng.half_of(hashes, columns), rate)

    for hashes in (drawn, np.broadcast_to(edges, (edges.size, COLUMNS))):
        np.testing.assert_array_equal(*both(hashes))


@pytest.mark.parametrize(
    ("rate", "limit"), [(0.0, 0), (2**-18, 0), (2**-16, 1), (0.1, 6554), (0.5, 32768), (0.9999999, 65535)]
)
def test_the_threshold_is_the_nearest_and_below_everything(rate: float, limit: int) -> None:
    assert prng.pair_threshold(rate) == limit
    assert prng.pair_rate(rate) == limit / 65536
    numbers = jnp.array([0, max(limit - 1, 0), limit, 65535], jnp.uint32)
    assert prng.pair_kept(numbers, rate).tolist() == [limit == 0, limit == 0, True, True]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_mean_is_the_rate(bits: np.ndarray, rate: float) -> None:
    kept = np.asarray(prng.pair_kept(jnp.asarray(bits), rate))
    wanted = 1 - prng.pair_rate(rate)
    deviation = (rate * (1 - rate)) ** 0.5
    for part in (kept, kept[:, 0::2], kept[:, 1::2]):
        assert abs(part.mean() - wanted) < 4 * deviation / part.size**0.5
    # Every row and column on its own too: the largest of thousands of normal deviates stays under six.
    for axis, count in ((0, ROWS), (1, COLUMNS)):
        assert np.abs(kept.mean(axis) - wanted).max() < 6 * deviation / count**0.5


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_halves_of_a_pair_and_neighbours_are_independent(bits: np.ndarray, rate: float) -> None:
    """Masks at the rate itself, correlated: in standard deviations of what independent ones would give."""
    kept = np.asarray(prng.pair_kept(jnp.asarray(bits), rate)).astype(float)
    centred = (kept - (1 - prng.pair_rate(rate))) / (rate * (1 - rate)) ** 0.5

    def correlation(left: np.ndarray, right: np.ndarray) -> float:
        return float((left * right).mean() * left.size**0.5)

    assert abs(correlation(centred[:, 0::2], centred[:, 1::2])) < 4.5, "the halves of a pair"
    assert abs(correlation(centred[:, 1:-1:2], centred[:, 2::2])) < 4.5, "neighbours of two pairs"
    for lag in (1, 2, 3, 4, 16, 128, 256):
        assert abs(correlation(centred[:, lag:], centred[:, :-lag])) < 4.5, f"columns {lag} apart"
        assert abs(correlation(centred[lag:], centred[:-lag])) < 4.5, f"rows {lag} apart"


def test_every_bit_is_fair_and_pairs_of_bits_are_independent(bits: np.ndarray) -> None:
    """Each of the 16 bits, and each bit of one half against each of the other."""
    signs = 1.0 - 2.0 * ((bits[:, :, None] >> np.arange(16, dtype=np.uint32)) & 1).astype(np.float32)
    count = bits.size / 2
    for half in (signs[:, 0::2], signs[:, 1::2]):
        assert np.abs(half.mean((0, 1))).max() < 4.5 / count**0.5
    left, right = signs[:, 0::2].reshape(-1, 16), signs[:, 1::2].reshape(-1, 16)
    # The largest of 256 normal deviates stays under five.
    assert np.abs(left.T @ right / count).max() < 5 / count**0.5
