"""What fast_svd is made of: orthonormal columns by Cholesky QR, and the small decomposition by rotations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.ops.linalg.svd.jacobi import MAX_SWEEPS, jacobi_svd, rotated
from capibara.kernels.ops.linalg.svd.orthonormal import orthonormal, well_conditioned

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 200, 16
# Products over 200 rows and a last pass from a condition number below 2 leave a few units roundoff; 16 of them.
LIMIT = 16 * 2.0**-24


def falling(ratio: float, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Singular values 1, ratio, ratio², ..."""
    u, _ = np.linalg.qr(RNG.normal(size=(rows, columns)))
    v, _ = np.linalg.qr(RNG.normal(size=(columns, columns)))
    return (u * ratio ** np.arange(columns)) @ v.T


COLUMN_SETS = {
    # how they are made, and the passes they take
    "gaussian": (RNG.normal(size=(ROWS, COLUMNS)), (2, 2)),
    "orthonormal": (np.linalg.qr(RNG.normal(size=(ROWS, COLUMNS)))[0], (1, 1)),
    "condition 5": (falling(0.9), (2, 2)),
    "condition 3e4": (falling(0.5), (3, 4)),
    "dependent to rounding": (falling(0.1), (3, 6)),
    "all equal": (np.ones((ROWS, COLUMNS)), (3, 6)),
    "zeros": (np.zeros((ROWS, COLUMNS)), (2, 3)),
    "three rows": (np.concatenate([RNG.normal(size=(3, COLUMNS)), np.zeros((ROWS - 3, COLUMNS))]), (3, 6)),
}
_orthonormal, _jacobi_svd, _rotated = jax.jit(orthonormal), jax.jit(jacobi_svd), jax.jit(rotated)


@pytest.mark.parametrize("what", COLUMN_SETS)
def test_columns_become_orthonormal_and_span_the_same(what: str) -> None:
    y, (fewest, most) = COLUMN_SETS[what]
    q, passes = _orthonormal(jnp.asarray(y, jnp.float32))
    q = np.asarray(q, np.float64)
    assert np.abs(q.T @ q - np.eye(COLUMNS)).max() < LIMIT
    assert np.linalg.norm(y - q @ (q.T @ y)) <= LIMIT * np.linalg.norm(y)
    # That it took more than Cholesky QR's two passes is what tells an ill-conditioned matrix.
    assert fewest <= int(passes) <= most


def test_between_power_iterations_a_condition_below_two_is_enough() -> None:
    y = falling(0.6)
    x, passes = jax.jit(well_conditioned)(jnp.asarray(y, jnp.float32))
    assert np.linalg.cond(np.asarray(x, np.float64)) < 2 < np.linalg.cond(y)
    assert int(passes) < int(_orthonormal(jnp.asarray(y, jnp.float32))[1])


SQUARES = {
    "normal": RNG.normal(size=(15, 15)),
    "falling": falling(0.5, 15, 15),
    "rank one": np.outer(np.arange(15.0), np.ones(15)),
    "zeros": np.zeros((15, 15)),
    "equal values": np.linalg.qr(RNG.normal(size=(15, 15)))[0],
}


@pytest.mark.parametrize("what", SQUARES)
def test_rotations_decompose(what: str) -> None:
    a = SQUARES[what]
    u, s, vh = (np.asarray(x, np.float64) for x in _jacobi_svd(jnp.asarray(a, jnp.float32)))
    want = np.linalg.svd(a, compute_uv=False)
    for x in (u, vh.T):
        assert np.abs(x.T @ x - np.eye(15)).max() < LIMIT
    assert np.abs(s - want).max() <= LIMIT * want.max()
    assert np.abs((u * s) @ vh - a).max() <= 2 * LIMIT * want.max()
    assert int(_rotated(jnp.asarray(a, jnp.float32))[2]) < MAX_SWEEPS  # it ended because it was done


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2])
def test_rotations_of_the_smallest(n: int) -> None:
    a = RNG.normal(size=(n, n))
    s = _jacobi_svd(jnp.asarray(a, jnp.float32))[1]
    np.testing.assert_allclose(s, np.linalg.svd(a, compute_uv=False), rtol=1e-5)


def test_small_singular_values_are_kept() -> None:
    """Rows of very different length keep the relative accuracy of each, though their squares differ by 1e10."""
    lengths = RNG.permutation(10.0 ** -np.linspace(0, 5, 15))
    a = np.asarray((np.eye(15) + 0.1 * RNG.normal(size=(15, 15))) * lengths[:, None], np.float32)
    want = np.linalg.svd(a.astype(np.float64), compute_uv=False)
    # Relative to each value: the rows, once of length one, have a condition number of a few.
    found = np.asarray(_jacobi_svd(jnp.asarray(a))[1], np.float64)
    assert np.abs(found / want - 1).max() < 100 * LIMIT
