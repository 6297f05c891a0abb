"""The derivative of fast_svd is that of jnp.linalg.svd, truncated: in float64, where both are exact to rounding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import fast_svd

RNG = np.random.default_rng(0)


def matrix(rows: int, columns: int) -> np.ndarray:
    """Singular values 1, 0.7, 0.7², ...: far enough apart for their vectors to be well determined."""
    small = min(rows, columns)
    u, _ = np.linalg.qr(RNG.normal(size=(rows, small)))
    v, _ = np.linalg.qr(RNG.normal(size=(columns, small)))
    return (u * 0.7 ** np.arange(small)) @ v.T


def loss(found: Any) -> jax.Array:
    """Of every output, and blind to the signs that vectors may have."""
    u, s, vh = found
    weights = jnp.arange(1.0, 1 + s.shape[0]) / s.shape[0]
    left = jnp.sin(jnp.arange(u.size, dtype=u.dtype)).reshape(u.shape)
    right = jnp.cos(jnp.arange(vh.size, dtype=vh.dtype)).reshape(vh.shape)
    return jnp.sum(weights * s) + jnp.sum(weights * jnp.sum(u * left, 0) * jnp.sum(vh * right, 1))


def truncated(rank: int | None) -> Any:
    def reference(a: Any) -> Any:
        u, s, vh = jnp.linalg.svd(a, full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank]

    return reference


def close(got: Any, want: Any, tolerance: float) -> None:
    assert np.linalg.norm(np.asarray(got) - np.asarray(want)) <= tolerance * np.linalg.norm(np.asarray(want))


@pytest.mark.parametrize(
    ("shape", "keywords"),
    [
        ((30, 8), {}),
        ((9, 12), {"rank": 4, "method": "exact"}),
        ((40, 24), {"rank": 2, "power_iterations": 6}),
    ],
    ids=str,
)
def test_gradient_and_differential(shape: tuple[int, int], keywords: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        a, da = jnp.asarray(matrix(*shape)), jnp.asarray(RNG.normal(size=shape))
        reference = truncated(keywords.get("rank"))
        wanted = np.asarray(jax.jit(jax.grad(lambda x: loss(reference(x))))(a))
        gradient = jax.jit(jax.grad(lambda x: loss(fast_svd(x, **keywords))))(a)
        forward = jax.jit(lambda x: jax.jvp(lambda y: loss(fast_svd(y, **keywords)), (x,), (da,))[1])(a)
    # Exact: rounding, 1e-16, divided by gaps of s² no smaller than 0.7^16. Conjugate gradients stop at 16 units. The
    # sketch of 12 columns with q = 6 leaves (s_13 / s_2)^13 = 0.7^143 = 7e-23 of a vector in error: less than rounding.
    close(gradient, wanted, 1e-9)
    assert abs(float(forward) - np.vdot(wanted, da)) <= 1e-9 * np.linalg.norm(wanted) * np.linalg.norm(da)


def test_the_part_that_was_left_out_matters() -> None:
    """Dropping it, as formulas for matrices of exactly that rank do, is far off: the test above can fail."""
    with jax.enable_x64(True):
        a = jnp.asarray(matrix(9, 12))
        u, s, vh = truncated(4)(a)
        gradient = jax.jit(jax.grad(lambda x: loss(fast_svd(x, rank=4, method="exact"))))
        kept, whole = gradient((u * s) @ vh), gradient(a)
    assert np.linalg.norm(kept - whole) > 0.1 * np.linalg.norm(whole)


@pytest.mark.quick
@pytest.mark.parametrize("keywords", [{}, {"rank": 3}], ids=str)
def test_gradient_of_the_values_alone(keywords: dict[str, Any]) -> None:
    a = jnp.asarray(matrix(40, 30), jnp.float32)
    weights = jnp.arange(1.0, 31.0)[: keywords.get("rank")]
    got = jax.jit(jax.grad(lambda x: jnp.sum(weights * fast_svd(x, compute_uv=False, **keywords))))(a)
    u, _, vh = np.linalg.svd(np.asarray(a, np.float64), full_matrices=False)
    # A sum of rank one matrices, in which vectors of close values may be off by rounding over the gap, 0.3 · 0.7^29 at
    # the smallest, without effect on the sum as long as their weights are close: 3 % apart or less there.
    close(got, (u[:, : len(weights)] * np.asarray(weights)) @ vh[: len(weights)], 3e-2 if not keywords else 1e-4)


def test_equal_values_have_a_gradient_of_what_is_determined() -> None:
    got = jax.jit(jax.grad(lambda x: fast_svd(x)[1].sum()))(jnp.eye(6))
    np.testing.assert_allclose(got, np.eye(6), atol=1e-5)


def test_second_derivative_and_narrow_floats() -> None:
    with jax.enable_x64(True):
        a, da = jnp.asarray(matrix(7, 5)), jnp.asarray(RNG.normal(size=(7, 5)))

        def slope(decompose: Any) -> Any:
            return jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(lambda y: loss(decompose(y)))(x), da)))(a)

        close(slope(fast_svd), slope(truncated(None)), 1e-8)
    narrow = jnp.asarray(matrix(40, 30), jnp.bfloat16)
    got = jax.jit(jax.grad(lambda x: fast_svd(x, rank=2, compute_uv=False).sum()))(narrow)
    assert got.dtype == jnp.bfloat16
    u, _, vh = np.linalg.svd(np.asarray(narrow, np.float64), full_matrices=False)
    close(got.astype(jnp.float32), u[:, :2] @ vh[:2], 2.0**-7)  # rounded to bfloat16 once
