"""Tiles hold what the image held, and give it back exactly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.surface.tiling import tile_layout, untile_layout


@pytest.mark.quick
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)),
    st.integers(1, 5),
    st.sampled_from(["float32", "bfloat16", "int8", "bool"]),
)
def test_a_round_trip_is_exact(shape: tuple[int, ...], block: int, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, shape), dtype)
    tiled, back = jax.jit(lambda x: (tile_layout(x, block), untile_layout(tile_layout(x, block), shape)))(x)
    b, h, w, c = shape
    assert tiled.shape == (b, -(-h // block), -(-w // block), block, block, c)
    assert tiled.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


@pytest.mark.quick
def test_a_tile_is_a_square_of_the_image() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 200, 300, 3)), jnp.float32)
    tiled = np.asarray(jax.jit(tile_layout)(x))
    assert tiled.shape == (2, 2, 3, 128, 128, 3)
    np.testing.assert_array_equal(tiled[1, 0, 1], x[1, :128, 128:256])
    np.testing.assert_array_equal(tiled[0, 1, 2, : 200 - 128, : 300 - 256], x[0, 128:, 256:])
    assert not tiled[:, 1, :, 200 - 128 :].any()
    assert not tiled[:, :, 2, :, 300 - 256 :].any()


def test_under_jit_grad_and_vmap() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 7, 2)), jnp.float32)

    @jax.jit
    def there_and_back(x: jax.Array) -> jax.Array:
        return untile_layout(tile_layout(x, 4) * 3, x.shape)

    np.testing.assert_array_equal(there_and_back(x), 3 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: there_and_back(x).sum())(x), jnp.full_like(x, 3))
    stacked = jnp.stack([x, -x])
    np.testing.assert_array_equal(jax.vmap(there_and_back)(stacked), 3 * stacked)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tile_layout(jnp.ones((4, 4))), r"\[batch, height, width, channels\].*2 axes"),
        (lambda: tile_layout(jnp.ones((1, 4, 4, 1)), 0), "positive whole number"),
        (lambda: tile_layout(jnp.ones((1, 4, 4, 1)), 2.0), "positive whole number"),
        (lambda: untile_layout(jnp.ones((1, 2, 2, 2, 3, 1)), (1, 4, 4, 1)), "pass tile_layout's result"),
        (lambda: untile_layout(jnp.ones((1, 2, 2, 2, 2, 1)), (4, 4)), "the shape before tiling"),
        (
            lambda: untile_layout(jnp.ones((1, 2, 2, 2, 2, 1)), (1, 4, 5, 1)),
            r"tiles of shape \(1, 2, 3, 2, 2, 1\)",
        ),
        (
            lambda: untile_layout(jnp.ones((1, 2, 2, 2, 2, 1)), (1, 4, 2, 1)),
            r"tiles of shape \(1, 2, 1, 2, 2, 1\)",
        ),
    ],
)
def test_a_mistake_is_named(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
