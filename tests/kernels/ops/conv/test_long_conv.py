"""long_conv: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.errors import ImplementationRefused
from capibara.kernels import long_conv


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), "float32")


X, H = _normal(2, 50, 3), _normal(20, 3, seed=1)
EXACT = np.stack(
    [np.stack([np.convolve(np.asarray(x)[:, c], np.asarray(H)[:, c])[:50] for c in range(3)], 1) for x in X]
)


def _error(got: Any) -> float:
    return float(np.abs(np.asarray(got, np.float64) - EXACT).max() / np.abs(EXACT).max())


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla", "xla_fft", "xla_direct", "reference"])
def test_against_numpy(name: str) -> None:
    # Float32 transforms of 69 points, about six levels each way: a few tens of units at the most.
    assert _error(long_conv(X, H, implementation=name)) < 64 * 2**-24


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla_fft", "xla_direct"])
def test_bfloat16_changes_the_products(name: str) -> None:
    error = _error(long_conv(X, H, precision="bfloat16", implementation=name))
    assert 1e-4 < error < 8 * 2**-8


def test_bfloat16_is_not_for_xla() -> None:
    with pytest.raises(ImplementationRefused, match="float32"):
        long_conv(X, H, precision="bfloat16", implementation="xla")


def test_a_long_filter_is_not_for_matrices() -> None:
    with pytest.raises(ImplementationRefused, match="up to 1024 taps"):
        long_conv(X, jnp.ones((1025, 3)), implementation="xla_direct")


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_a_large_element_of_the_batch_leaves_a_small_one_alone(precision: str | None) -> None:
    x = _normal(4, 50, 3) * np.float32([1e6, 1, 1e-3, 1])[:, None, None]
    got = long_conv(x, H, precision=precision, implementation="xla_fft")
    exact = np.stack([np.convolve(np.asarray(x)[2, :, c], np.asarray(H)[:, c])[:50] for c in range(3)], 1)
    bound = 64 * 2**-24 if precision is None else 8 * 2**-8
    assert np.abs(np.asarray(got[2]) - exact).max() / np.abs(exact).max() < bound


@pytest.mark.parametrize("name", ["xla", "xla_direct"])
def test_on_a_mesh(name: str) -> None:
    """Plain JAX, which XLA splits itself: the batch stays where it is."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    split = NamedSharding(mesh, P("data"))
    x = jax.device_put(_normal(4, 50, 3), split)
    got = jax.jit(lambda x, h: long_conv(x, h, implementation=name))(x, H)
    assert got.sharding.is_equivalent_to(split, 3)
    np.testing.assert_allclose(got, long_conv(jnp.asarray(np.asarray(x)), H, implementation="reference"), atol=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: long_conv(X[0], H), "three axes"),
        (lambda: long_conv(X, H.T), r"\[taps, channels\]"),
        (lambda: long_conv(X, H, precision="highest"), "precision of long_conv"),
        (lambda: long_conv(X.astype("int32"), H), "long_conv takes"),
    ],
)
def test_mistakes_are_named(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
