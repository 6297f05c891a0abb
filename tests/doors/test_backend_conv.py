"""TpuV4ConvOps, used as the documents do."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.jax.tpu_v4.backend import TpuV4ConvOps
from capibara.kernels import explain

ops = TpuV4ConvOps()
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 8, 8, 4)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(3, 3, 4, 4)), jnp.float32)
S, V = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (X, W))


@pytest.mark.quick
@pytest.mark.parametrize("tile_size", [None, 2, (4, 4), [6, 6]])
def test_winograd_by_its_documented_keywords(tile_size: int | Sequence[int] | None) -> None:
    got = ops.winograd_conv2d(inputs=X, filters=W, strides=(1, 1), padding="SAME", tile_size=tile_size)
    # Float32 products of 36 terms, amplified by up to 46 in F(6x6, 3x3), of results up to about 20.
    np.testing.assert_allclose(got, ops.conv2d(X, W, implementation="reference"), atol=5e-4)
    chosen = explain(ops.winograd_conv2d, S, V, strides=(1, 1), padding="SAME", tile_size=tile_size)
    side = 4 if tile_size is None else np.ravel(tile_size)[0]
    assert chosen.implementation == f"xla_winograd{side}"


@pytest.mark.quick
def test_other_convolutions_go_direct_and_say_so() -> None:
    told = explain(ops.winograd_conv2d, S, V, strides=2, padding="VALID", tile_size=4)
    assert told.implementation == "xla"
    assert "not xla_winograd4: it is for strides of 1" in str(told)
    assert ops.winograd_conv2d(X, W, strides=2, padding="VALID", tile_size=4).shape == (2, 3, 3, 4)


@pytest.mark.quick
def test_a_tile_that_is_not_offered() -> None:
    with pytest.raises(ValueError, match="2, 4, 6"):
        ops.winograd_conv2d(X, W, 1, "SAME", 8)
    with pytest.raises(ValueError, match=r"2, 4, 6.*Got \(8, 8\)"):
        ops.winograd_conv2d(X, W, 1, "SAME", (8, 8))
    with pytest.raises(ValueError, match=r"tiles are square.*\(2, 4\).*\(4, 4\)"):
        ops.winograd_conv2d(X, W, 1, "SAME", (2, 4))


def test_precision_is_a_policy() -> None:
    assert ops.winograd_conv2d(X, W, precision="bfloat16").dtype == "bfloat16"
    assert ops.conv2d(X, W, precision="mixed").dtype == "float32"
    exact, mixed = ops.conv2d(X, W), ops.conv2d(X, W, precision="mixed")
    assert float(jnp.abs(exact - mixed).max()) > 1e-3, "rounding 36 products to 8 bits shows"
    assert ops.causal_conv1d(X[0], W[0, :, 0, :] * 1.0, precision="bfloat16").dtype == "bfloat16"


def test_sequences() -> None:
    x, w, h = X[0], W[0, :, 0, :], X[0, :, 0, :]
    y, state = ops.causal_conv1d(x, w, jnp.ones(4), activation="silu", return_state=True)
    step, after = ops.causal_conv1d_step(state, x[:, 0], w, jnp.ones(4), activation="silu")
    again, _ = ops.causal_conv1d(x[:, :1], w, jnp.ones(4), activation="silu", initial_state=state, return_state=True)
    # The same sums of four numbers in another order.
    np.testing.assert_allclose(step, again[:, 0], atol=1e-5)
    assert after.shape == state.shape
    assert y.shape == x.shape
    assert ops.long_conv(x, h).shape == x.shape
