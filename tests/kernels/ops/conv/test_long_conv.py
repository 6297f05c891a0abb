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
from capibara.kernels import explain, long_conv, target


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), "float32")


X, H = _normal(2, 50, 3), _normal(20, 3, seed=1)
EXACT = np.stack(
    [np.stack([np.convolve(np.asarray(x)[:, c], np.asarray(H)[:, c])[:50] for c in range(3)], 1) for x in X]
)


def _error(got: Any) -> float:
    return float(np.abs(np.asarray(got, np.float64) - EXACT).max() / np.abs(EXACT).max())


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla", "xla_packed", "xla_fft", "xla_direct", "reference"])
def test_against_numpy(name: str) -> None:
    # Float32 transforms of 69 points, about six levels each way: a few tens of units at the most.
    assert _error(long_conv(X, H, implementation=name)) < 64 * 2**-24


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla_fft", "xla_direct"])
def test_bfloat16_changes_the_products(name: str) -> None:
    error = _error(long_conv(X, H, precision="bfloat16", implementation=name))
    assert 1e-4 < error < 8 * 2**-8


@pytest.mark.parametrize("name", ["xla", "xla_packed"])
def test_bfloat16_is_not_for_transforms_of_float32(name: str) -> None:
    with pytest.raises(ImplementationRefused, match="float32"):
        long_conv(X, H, precision="bfloat16", implementation=name)


@pytest.mark.quick
@pytest.mark.parametrize(("platform", "taken"), [("gpu", "xla_packed"), ("cpu", "xla"), ("tpu", "xla")])
def test_transforms_of_half_as_many_points_are_for_a_gpu(platform: str, taken: str) -> None:
    """Where XLA's transform back to real numbers takes three passes."""
    with target(platform, {"gpu": "NVIDIA H200", "tpu": "TPU v4"}.get(platform, platform)):
        assert explain("long_conv", X, H).selections[0].implementation == taken
        assert explain("long_conv", X, H, precision="bfloat16").selections[0].implementation == "xla_fft"


@pytest.mark.quick
@pytest.mark.parametrize(("time", "taps"), [(1, 1), (7, 5), (8, 30)])
def test_half_as_many_points_of_any_length(time: int, taps: int) -> None:
    """Odd and even, taps beyond the time; values, gradients, and the gradient of those."""
    x, h = _normal(2, time, 3), _normal(taps, 3, seed=1)

    def steep(x: jax.Array, h: jax.Array, name: str) -> jax.Array:
        return (long_conv(x, h, implementation=name) ** 2).sum()

    def flow(x: jax.Array, h: jax.Array, name: str) -> jax.Array:
        return (jax.grad(steep, 1)(x, h, name) ** 2).sum()

    for fn in (steep, flow):
        for got, wanted in zip(
            jax.grad(fn, (0, 1))(x, h, "xla_packed"), jax.grad(fn, (0, 1))(x, h, "reference"), strict=True
        ):
            # Transforms of 15 points at the most, up to seven one after another: a few units each.
            assert np.abs(got - wanted).max() <= 256 * 2**-24 * np.abs(wanted).max()


@pytest.mark.quick
def test_half_as_many_points_keep_signals_apart() -> None:
    """Unlike two signals in one complex one: what is not finite in a signal, and what is large, stays there."""
    x = X.at[0, 3, 1].set(np.nan) * np.float32([1, 1e-12])[:, None, None]
    got = np.asarray(long_conv(x, H, implementation="xla_packed"))
    assert np.isnan(got[0, :, 1]).all()
    assert np.isfinite(np.delete(got[0], 1, 1)).all()
    assert np.abs(got[1] - 1e-12 * EXACT[1]).max() < 64 * 2**-24 * 1e-12 * np.abs(EXACT[1]).max()


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


@pytest.mark.parametrize("filters", [P(), P(None, "model")])
def test_half_as_many_points_where_types_say_what_is_split(filters: P) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:4])
    x, h = _normal(4, 12, 4), _normal(5, 4, seed=1)

    def steep(x: jax.Array, h: jax.Array) -> jax.Array:
        return (long_conv(x, h, implementation="xla_packed") ** 2).sum()

    wanted = jax.grad(steep, (0, 1))(x, h)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("data"))), jax.device_put(h, NamedSharding(mesh, filters))
        got = jax.jit(jax.grad(steep, (0, 1)))(*split)
    for one, exact, operand in zip(got, wanted, split, strict=True):
        assert one.sharding.is_equivalent_to(operand.sharding, one.ndim)
        np.testing.assert_allclose(one, exact, atol=1e-4)


@pytest.mark.parametrize("name", ["xla", "xla_direct", "xla_packed"])
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
