"""quantize, residual_vq and product_vq: values, straight-through gradients, bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import look_up, product_vq, residual_vq, straight_through
from capibara.kernels.ops.vq import quantize


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def _nearest(x: Any, codebook: Any) -> np.ndarray:
    x, codebook = np.asarray(x, np.float64), np.asarray(codebook, np.float64)
    return ((x[..., None, :] - codebook) ** 2).sum(-1).argmin(-1)


def test_quantize_gives_codes_bit_for_bit_and_the_gradient_to_x() -> None:
    x, codebook = _normal(0, 3, 5, 8), _normal(1, 11, 8)
    quantized, indices = quantize(x, codebook, return_indices=True)
    np.testing.assert_array_equal(indices, _nearest(x, codebook))
    np.testing.assert_array_equal(quantized, codebook[indices])
    weights = _normal(2, 3, 5, 8)
    dx, dcodes = jax.jit(jax.grad(lambda x, c: (quantize(x, c) * weights).sum(), (0, 1)))(x, codebook)
    np.testing.assert_array_equal(dx, weights)
    assert not dcodes.any()


def test_types_and_broken_rows() -> None:
    x = _normal(3, 4, 8).astype(jnp.bfloat16).at[1, 0].set(jnp.nan)
    codebook = _normal(4, 6, 8)
    quantized, indices = quantize(x, codebook, return_indices=True)
    assert quantized.dtype == jnp.bfloat16
    assert indices[1] == -1
    assert jnp.isnan(quantized[1]).all()
    assert jnp.isfinite(quantized[jnp.array([0, 2, 3])]).all()
    assert jnp.isnan(look_up(codebook, jnp.array([-1]))).all()


def test_straight_through_has_each_operands_type() -> None:
    dx = jax.grad(lambda x: straight_through(x, jnp.float32(3)).sum())(jnp.bfloat16(2))
    assert dx.dtype == jnp.bfloat16
    assert dx == 1


def test_residual_vq_is_quantizing_what_is_left() -> None:
    x, codebooks = _normal(5, 40, 6), _normal(6, 3, 9, 6) * jnp.array([1.0, 0.5, 0.25]).reshape(3, 1, 1)
    quantized, indices = residual_vq(x, codebooks)
    left, total = np.asarray(x), np.zeros((40, 6), np.float32)
    for level in range(3):
        at = _nearest(left, codebooks[level])
        np.testing.assert_array_equal(indices[:, level], at)
        total, left = total + np.asarray(codebooks[level])[at], left - np.asarray(codebooks[level])[at]
    np.testing.assert_allclose(quantized, total, rtol=1e-6, atol=1e-6)  # the same additions, fused or not
    errors = [float(jnp.square(x - residual_vq(x, codebooks[:n])[0]).mean()) for n in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    np.testing.assert_array_equal(jax.grad(lambda x: residual_vq(x, codebooks)[0].sum())(x), np.ones((40, 6)))


def test_product_vq_is_quantizing_each_part() -> None:
    x, codebooks = _normal(7, 4, 10, 6), _normal(8, 3, 9, 2)
    quantized, indices = jax.jit(product_vq)(x, codebooks)
    for part in range(3):
        piece = x[..., 2 * part : 2 * part + 2]
        at = _nearest(piece, codebooks[part])
        np.testing.assert_array_equal(indices[..., part], at)
        np.testing.assert_array_equal(quantized[..., 2 * part : 2 * part + 2], codebooks[part][at])
    np.testing.assert_array_equal(jax.grad(lambda x: product_vq(x, codebooks)[0].sum())(x), np.ones((4, 10, 6)))


def test_vmap_over_codebooks_is_one_after_another() -> None:
    x, codebooks = _normal(9, 3, 5, 4), _normal(10, 3, 7, 4)
    got = jax.vmap(quantize)(x, codebooks)
    np.testing.assert_array_equal(got, jnp.stack([quantize(a, b) for a, b in zip(x, codebooks, strict=True)]))


def test_an_implementation_that_refuses_is_an_error() -> None:
    with pytest.raises(ValueError, match="for gpu"):
        quantize(_normal(11, 2, 4), _normal(12, 3, 4), implementation="hopper")


@pytest.mark.parametrize(
    ("fn", "x", "codebooks", "text"),
    [
        (residual_vq, (2, 4), (3, 4), r"residual_vq takes codebooks \[L, K, D\]"),
        (residual_vq, (2, 4), (2, 3, 5), "as many numbers as a row"),
        (product_vq, (2, 4), (2, 3, 3), "last axis of 6"),
        (product_vq, (2, 4), (0, 3, 4), r"product_vq takes codebooks \[P, K, D/P\]"),
    ],
)
def test_bad_input(fn: Any, x: tuple[int, ...], codebooks: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fn(jnp.ones(x), jnp.ones(codebooks))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: residual_vq(jnp.ones((2, 4), jnp.int32), c[None]), r"residual_vq takes .*x of i32.*astype"),
        (lambda c: residual_vq(jnp.ones((2, 4)), c[None].astype(jnp.int32)), "codebooks of i32"),
        (lambda c: residual_vq(None, c[None]), "residual_vq takes arrays"),
        (lambda c: product_vq(jnp.ones(4), "codes"), "product_vq takes arrays. Got codebooks of type str"),
        (lambda c: quantize("rows", c), "quantize takes arrays. Got x of type str"),
    ],
)
def test_what_is_no_array_of_floats(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(jnp.ones((3, 4)))
