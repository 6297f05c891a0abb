"""Ties between equal codes: the lowest index, however a product rounds its columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import interpret
from capibara.kernels.ops.vq.nearest import equal, xla
from capibara.kernels.ops.vq.nearest.equal import lowest_equal
from capibara.kernels.ops.vq.nearest.tpu import forward as tpu

DISTINCT, COPIES = 12, 5


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _spread() -> tuple[np.ndarray, np.ndarray]:
    """(codes, the lowest index of each one's equals): copies all over the codebook."""
    which = np.random.default_rng(0).permutation(np.repeat(np.arange(DISTINCT), COPIES))
    return _normal(1, DISTINCT, 8)[which], np.array([list(which).index(kind) for kind in which])


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("most_compared", [0, 1 << 22])
def test_the_lowest_of_equal_codes(dtype: str, rows: int, most_compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sorting and by comparing, fewer rows than codes and more; minus zero is zero; a row without a code stays."""
    monkeypatch.setattr(equal, "MOST_COMPARED", most_compared)
    codes, lowest = _spread()
    codes[:, 3] = np.where(np.arange(len(codes)) % 2, -0.0, 0.0)
    indices = np.random.default_rng(2).integers(0, len(codes), rows).astype(np.int32)
    indices[0] = len(codes) - 1
    want = lowest[indices]
    assert (want != indices).any()
    indices[2] = want[2] = -1
    np.testing.assert_array_equal(
        jax.jit(lambda c, i: lowest_equal(c, i))(jnp.asarray(codes).astype(dtype), indices), want
    )


def test_float64_is_told_apart_by_all_of_its_bits() -> None:
    with jax.enable_x64(True):
        codes = jnp.array([[1.0], [1.0 + 2.0**-50], [-0.0], [1.0], [0.0], [1.0 + 2.0**-50]], jnp.float64)
        assert jax.jit(lambda c: lowest_equal(c, jnp.arange(6, dtype=jnp.int32)))(codes).tolist() == [0, 1, 2, 0, 2, 1]


def test_codes_of_few_bits_have_hashes_of_their_own() -> None:
    """1 and -1 differ in one bit, small whole numbers in a few: all 4,096 codes of each kind, and a shifted number."""
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 12)).reshape(12, -1).T
    whole = np.array(np.meshgrid(*[np.arange(8.0)] * 4)).reshape(4, -1).T
    for codes in (signs, whole, np.eye(100)):
        one, two = jax.jit(lambda c: equal.hashes(equal.code_bits(c)))(codes.astype(np.float32))
        assert len(set(zip(one.tolist(), two.tolist(), strict=True))) == len(codes)
        # One of them alone collides for a pair in 2^32: about 0.002 times among 4,096 codes.
        assert min(len(set(one.tolist())), len(set(two.tolist()))) >= len(codes) - 1


def test_a_collision_makes_no_code_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal, "hashes", lambda bits: (jnp.zeros(len(bits)), jnp.zeros(len(bits))))
    codes = jnp.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    assert jax.jit(lambda c: lowest_equal(c, jnp.arange(3, dtype=jnp.int32)))(codes).tolist() == [0, 1, 0]


def _rounded_by_column(x: jax.Array) -> jax.Array:
    """Squared norms as if each column were rounded in its own way: later codes seem nearer than their equals."""
    return jnp.square(x).sum(-1) * (1 - 1e-5 * jnp.arange(x.shape[0]))


def _by_xla(x: jax.Array, codes: jax.Array) -> Any:
    return xla.xla(x, codes, return_distances=False, return_stats=True)


def _by_pallas_tpu(x: jax.Array, codes: jax.Array) -> Any:
    with interpret("hlo"):
        return tpu.nearest_code_tpu(x, codes, config=tpu.BlockConfig(40, 32), return_distances=False, return_stats=True)


@pytest.mark.parametrize("implementation", [_by_xla, _by_pallas_tpu])
def test_columns_that_round_differently(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, lowest = _spread()
    kinds = np.arange(40) % len(codes)
    x = codes[kinds] + np.float32(0.01) * _normal(3, 40, 8)
    for module in (xla, tpu):
        monkeypatch.setattr(module, "squared_norms", _rounded_by_column)
    # A function of its own each time, which no program is kept for that was made without the change.
    indices, counts, _ = jax.jit(lambda x, codes: implementation(x, codes))(x, codes)
    np.testing.assert_array_equal(indices, lowest[kinds])
    np.testing.assert_array_equal(counts, np.bincount(lowest[kinds], minlength=len(codes)))
    # That the lowest was not found without looking for it: else this test shows nothing.
    monkeypatch.setattr(xla, "lowest_equal", lambda codebook, indices: indices)
    careless = jax.jit(lambda x: xla.xla(x, jnp.asarray(codes), return_distances=False, return_stats=False))(x)
    assert (np.asarray(careless) != lowest[kinds]).any()
