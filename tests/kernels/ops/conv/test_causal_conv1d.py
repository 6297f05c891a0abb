"""causal_conv1d and its single step: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import causal_conv1d, causal_conv1d_step
from capibara.kernels.ops.conv import CAUSAL_CONV1D_GRAD
from capibara.kernels.ops.conv.causal1d.gradient import local_grad
from capibara.kernels.ops.conv.causal1d.reference import reference_grad


def _normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


X, W, BIAS, STATE = _normal(2, 9, 6), _normal(4, 6, seed=1), _normal(6, seed=2), _normal(2, 3, 6, seed=3)


def _naive(x: Any, w: Any, bias: Any, state: Any) -> np.ndarray:
    seen = np.concatenate([np.asarray(state), np.asarray(x)], 1).astype(np.float64)
    w = np.asarray(w, np.float64)
    total = [[(seen[b, t : t + len(w)] * w).sum(0) for t in range(x.shape[1])] for b in range(x.shape[0])]
    z = np.array(total) + np.asarray(bias)
    return z / (1 + np.exp(-z))


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla", "reference"])
def test_against_numpy(name: str) -> None:
    y, state = causal_conv1d(X, W, BIAS, activation="silu", initial_state=STATE, return_state=True, implementation=name)
    # Float32: four taps, a bias and the activation, of numbers up to about 5.
    np.testing.assert_allclose(y, _naive(X, W, BIAS, STATE), atol=1e-5)
    np.testing.assert_array_equal(state, X[:, -3:])


@pytest.mark.quick
def test_pieces_and_steps_equal_the_whole() -> None:
    whole, last = causal_conv1d(X, W, BIAS, activation="silu", return_state=True)
    first, state = causal_conv1d(X[:, :2], W, BIAS, activation="silu", return_state=True)
    second, state = causal_conv1d(X[:, 2:7], W, BIAS, activation="silu", initial_state=state, return_state=True)
    parts = [first, second]
    for t in (7, 8):
        y, state = causal_conv1d_step(state, X[:, t], W, BIAS, activation="silu")
        parts.append(y[:, None])
    # The same sums, but for the order that a compiler takes them in: a few units of float32 of numbers up to about 5.
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=5e-6)
    np.testing.assert_array_equal(state, last)


def test_a_bfloat16_sum_is_float32() -> None:
    """256 + 1 + 1 is 258 in float32; added up in bfloat16 it would stay at 256."""
    x, w = jnp.array([1.0, 1.0, 256.0], "bfloat16").reshape(1, 3, 1), jnp.ones((3, 1), "bfloat16")
    assert float(causal_conv1d(x, w, implementation="xla")[0, 2, 0]) == 258.0


def test_a_bfloat16_gradient_is_rounded_once() -> None:
    """The taps have shares of 1, 1 and 256: 258 in float32, and 256 where each sum of them is rounded."""
    w = jnp.array([1.0, 1.0, 256.0], "bfloat16").reshape(3, 1)
    _, pull = jax.vjp(lambda x: causal_conv1d(x, w, implementation="xla"), jnp.ones((1, 3, 1), "bfloat16"))
    assert float(pull(jnp.ones((1, 3, 1), "bfloat16"))[0][0, 0, 0]) == 258.0


@pytest.mark.quick
def test_a_device_s_gradients_of_the_filters_are_summed_over_the_others() -> None:
    """What a kernel runs on a mesh: the sequences split in two, the filters whole."""
    d_out, spec = _normal(2, 9, 6, seed=4), jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))

    def part(x: Any, w: Any, bias: Any, d_out: Any) -> Any:
        arrays = (x, w, bias, None, d_out, None)
        return local_grad(CAUSAL_CONV1D_GRAD, arrays, {"activation": "silu"}, {"b": ("data",)}, None)[:3]

    split, whole = spec("data"), spec()
    run = jax.shard_map(
        part, mesh=mesh, in_specs=(split, whole, whole, split), out_specs=(split, whole, whole), check_vma=False
    )
    wanted = reference_grad(X, W, BIAS, None, d_out, activation="silu")[:3]
    for got, right in zip(jax.jit(run)(X, W, BIAS, d_out), wanted, strict=True):
        # Float32: sums of 18 products of numbers up to about 10.
        np.testing.assert_allclose(got, right, atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: causal_conv1d(X[0], W), "three axes"),
        (lambda: causal_conv1d(X, W.T), r"\[width, channels\]"),
        (lambda: causal_conv1d(X, W, BIAS[:3]), "one number a channel"),
        (lambda: causal_conv1d(X, W, initial_state=STATE[:, :2]), "the last inputs"),
        (lambda: causal_conv1d(X, W, activation="relu"), "activation of causal_conv1d"),
        (lambda: causal_conv1d(X, W, activation=["silu"]), r"activation=\['silu'\]"),
        (lambda: causal_conv1d(X.astype("int32"), W), "causal_conv1d takes"),
        (lambda: CAUSAL_CONV1D_GRAD(X, W, BIAS, None, X[:1]), "The result's cotangent has x's shape"),
        (lambda: CAUSAL_CONV1D_GRAD(X, W, BIAS, None, X, X), "The last inputs' cotangent is"),
        (lambda: causal_conv1d_step(STATE, X, W), "One step takes"),
        (lambda: causal_conv1d_step(STATE[:, 1:], X[:, 0], W), "the last inputs"),
        (lambda: causal_conv1d_step(STATE, X[:, 0], W, activation="gelu"), "activation"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
