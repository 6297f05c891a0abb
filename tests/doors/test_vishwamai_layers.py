"""vishwamai.kernels.tpu: layer norm, gated activations and experts, as the document uses them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from capibara.kernels import explain
from capibara.kernels.ops import layers
from vishwamai.kernels.tpu import (
    PrecisionConfig,
    expert_layer,
    geglu,
    glu,
    init_expert_layer,
    layer_norm,
    swiglu,
    tpu_kernel,
)

RNG = np.random.default_rng(0)
X, UP = (jnp.asarray(RNG.normal(size=(8, 64)), jnp.float32) for _ in range(2))
SCALE, BIAS = (jnp.asarray(RNG.normal(size=64), jnp.float32) for _ in range(2))
# Sums of 64 numbers: sqrt(64) units of float32, four for an unlucky draw, and eight roundings of numbers up to 8.
CLOSE = (8 + 4 * 64**0.5) * 2**-24 * 8


@tpu_kernel
def optimized_layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """As the document writes it."""
    return layer_norm(x, scale, bias, use_fused_ops=True)


@pytest.mark.quick
def test_a_norm_inside_a_kernel() -> None:
    x = np.asarray(X, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * np.asarray(SCALE) + np.asarray(BIAS)
    np.testing.assert_allclose(optimized_layer_norm(X, SCALE, BIAS), want, atol=CLOSE)
    np.testing.assert_allclose(layer_norm(X, SCALE, BIAS, use_fused_ops=False), want, atol=CLOSE)
    assert float(jnp.abs(layer_norm(X, eps=0.1) - layer_norm(X)).max()) > 1e-3
    _, stream = layer_norm(X, SCALE, residual=UP, return_residual=True)
    np.testing.assert_array_equal(stream, X + UP)


@pytest.mark.quick
def test_fused_or_the_specification() -> None:
    for call in (
        lambda x, fused: layer_norm(x, SCALE, BIAS, use_fused_ops=fused),
        lambda x, fused: glu(x, UP, use_fused_ops=fused),
        lambda x, fused: swiglu(x, UP, use_fused_ops=fused),
        lambda x, fused: geglu(x, UP, use_fused_ops=fused),
    ):
        assert [explain(call, X, fused).implementation for fused in (True, False)] == ["xla", "reference"]
        np.testing.assert_allclose(call(X, True), call(X, False), atol=CLOSE)

    def kept(fused: bool) -> int:
        _, pull = jax.vjp(lambda x: layer_norm(x, SCALE, use_fused_ops=fused), X)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes"))

    assert kept(True) < 1.2 * X.nbytes < 2 * X.nbytes <= kept(False)


@pytest.mark.quick
def test_the_gates() -> None:
    x, up = np.asarray(X, np.float64), np.asarray(UP, np.float64)
    sigmoid = 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(glu(X, UP), sigmoid * up, atol=CLOSE)
    np.testing.assert_allclose(swiglu(X, UP), x * sigmoid * up, atol=CLOSE)
    np.testing.assert_allclose(geglu(X, UP), jax.nn.gelu(X, approximate=False) * UP, atol=CLOSE)
    dropped = swiglu(X, UP, dropout_rate=0.5, key=jax.random.key(0))
    # 512 coins: six standard deviations are 0.13.
    assert abs(float((dropped == 0).mean()) - 0.5) < 0.13


def test_experts() -> None:
    params = init_expert_layer(jax.random.key(0), 64, 32, 8)
    y, metrics = jax.jit(lambda p, x: expert_layer(p, x, top_k=3))(params, X)
    want, _ = jax.jit(lambda p, x: layers.moe_layer(p, x, top_k=3))(params, X)
    np.testing.assert_array_equal(y, want)
    assert int(metrics.counts.sum()) == 8 * 3
    named = {"bfloat16": "bfloat16", "default": "bfloat16", "HIGH": "float32", "mixed": "float32"}
    for precision, dtype in (
        (PrecisionConfig.DEFAULT, "bfloat16"),
        (PrecisionConfig.HIGH, "float32"),
        *named.items(),
    ):
        shapes, _ = jax.eval_shape(lambda p, x, how=precision: expert_layer(p, x, precision=how), params, X)
        assert shapes.dtype == dtype
    with pytest.raises(ValueError, match=r"Unknown precision 'half'.*'highest'.*'bfloat16'"):
        expert_layer(params, X, precision="half")
    # A quarter of an even share of room for each expert: what does not fit is dropped, and counted.
    crowded = jax.jit(lambda p, x: expert_layer(p, x, top_k=3, capacity_factor=0.25)[1].dropped)
    assert int(crowded(params, X)) > 0

    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 1, 4), ("data", "model", "expert"))

    @tpu_kernel
    def parallel(params: Any, x: jax.Array) -> Any:
        return expert_layer(params, x, top_k=3, mesh=mesh, token_axis_names=("data",))

    program = str(jax.make_jaxpr(parallel)(params, X))
    assert program.count("all_to_all[") >= 3  # rows and their experts go, results come back
