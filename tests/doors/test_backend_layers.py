"""capibara.jax.tpu_v4.backend: the layers' object and the quantizers', each keyword with its effect."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from capibara.jax.tpu_v4 import kernels
from capibara.jax.tpu_v4.backend import TpuV4LayerOps, TpuV4VQOps, init_moe
from capibara.kernels import registry
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.ops import layers, vq

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, Y, SCALE, BIAS = normal(4, 6, 32), normal(4, 6, 32), normal(32), normal(32)
WEIGHTS, LABELS = normal(32, 50), jnp.asarray(RNG.integers(0, 50, (4, 6)))
CODEBOOK = normal(16, 32)
LEVELS = jnp.stack([CODEBOOK, CODEBOOK / 4])
PARAMS = jax.jit(functools.partial(init_moe, width=32, hidden=16, num_experts=8))(jax.random.key(0))
KEY = jax.random.key(1)

ops, quantizers = TpuV4LayerOps(), TpuV4VQOps()

# The method on float32 operands, and the room's function that it stands for.
CALLS: dict[str, tuple[Any, Any]] = {
    "layer_norm": (
        lambda p: ops.layer_norm(X, SCALE, BIAS, Y, eps=1e-3, precision=p),
        lambda: layers.layer_norm(X, SCALE, BIAS, Y, eps=1e-3),
    ),
    "rms_norm": (
        lambda p: ops.rms_norm(X, SCALE, Y, eps=1e-3, precision=p, offset=1.0),
        lambda: layers.rms_norm(X, SCALE, Y, eps=1e-3, offset=1.0),
    ),
    "activation": (
        lambda p: ops.activation(X, kind="silu", dropout_rate=0.5, rng=KEY, precision=p),
        lambda: layers.activation(X, kind="silu", dropout_rate=0.5, key=KEY),
    ),
    "gated_activation": (
        lambda p: ops.gated_activation(X, Y, kind="gelu", dropout_rate=0.5, rng=KEY, precision=p),
        lambda: layers.gated_activation(X, Y, kind="gelu", dropout_rate=0.5, key=KEY),
    ),
    "moe_layer": (
        # As one program: step by step, each step is compiled by itself.
        jax.jit(lambda p: ops.moe_layer(PARAMS, X, top_k=2, precision=p, activation="gelu")[0], static_argnums=0),
        jax.jit(lambda: layers.moe_layer(PARAMS, X, top_k=2, activation="gelu")[0]),
    ),
    "quantize": (
        jax.jit(lambda p: quantizers.quantize(X, CODEBOOK, precision=p), static_argnums=0),
        jax.jit(lambda: vq.quantize(X, CODEBOOK)),
    ),
    "residual_vq": (
        jax.jit(lambda p: quantizers.residual_vq(X, LEVELS, precision=p)[0], static_argnums=0),
        jax.jit(lambda: vq.residual_vq(X, LEVELS)[0]),
    ),
    "product_vq": (
        jax.jit(lambda p: quantizers.product_vq(X, CODEBOOK.reshape(4, 16, 8), precision=p)[0], static_argnums=0),
        jax.jit(lambda: vq.product_vq(X, CODEBOOK.reshape(4, 16, 8))[0]),
    ),
}


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", CALLS)
def test_a_method_is_the_rooms_function_in_a_precision(name: str) -> None:
    method, function = CALLS[name]
    want = np.asarray(function(), np.float64)
    for precision, dtype in ((None, "float32"), ("bfloat16", "bfloat16")):
        got = method(precision)
        assert got.dtype == dtype
        off = float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))
        if dtype == "float32":
            assert off < 1e-6  # the same program
        else:
            # Of rounding: at least some of it shows. A row whose nearest code, or expert, is another is off by more
            # than rounding, but of the 24 rows few are that close: less than a quarter of the norm.
            assert 2**-12 < off < 0.25


def test_losses_and_choices_stay_exact() -> None:
    want = jax.jit(lambda: layers.cross_entropy(X, WEIGHTS, LABELS, z_loss=1e-3))()
    for precision, exact in (("float32", True), ("bfloat16", False)):
        got = jax.jit(lambda p=precision: ops.cross_entropy(X, WEIGHTS, LABELS, precision=p, z_loss=1e-3))()
        assert got.dtype == jnp.float32
        # Rounding to bfloat16 moves a logit by about 2**-9 of it, and the logits are some sixes.
        assert (abs(float(got - want)) < 1e-5) == exact
        assert abs(float(got - want)) < 32**0.5 * 2**-7
    logits = normal(30, 8)
    routed = ops.route(logits, top_k=2, return_counts=True)
    np.testing.assert_array_equal(routed.indices, layers.route(logits, top_k=2).indices)
    assert routed.weights.dtype == jnp.float32
    assert not np.array_equal(routed.weights, ops.route(logits, top_k=2, precision="bfloat16").weights)
    indices, distances = quantizers.nearest_code(X, CODEBOOK, return_distances=True)
    np.testing.assert_array_equal(indices, vq.nearest_code(X, CODEBOOK))
    _, rounded = quantizers.nearest_code(X, CODEBOOK, precision="bfloat16", return_distances=True)
    assert rounded.dtype == jnp.float32
    assert not np.array_equal(distances, rounded)
    quantized, indices = quantizers.quantize(X, CODEBOOK, return_indices=True, precision="bfloat16")
    assert (quantized.dtype, indices.dtype) == (jnp.bfloat16, jnp.int32)


def test_float32_holds_for_the_backward_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator multiplies float32 in fewer bits unless it is told not to, in both passes."""
    seen: list[str | None] = []

    @jax.custom_vjp
    def told(x: Any) -> Any:
        return x

    def forward(x: Any) -> Any:
        seen.append(matmul_precision())
        return x, None

    def backward(kept: Any, flow: Any) -> Any:
        seen.append(matmul_precision())
        return (flow,)

    told.defvjp(forward, backward)
    monkeypatch.setattr(layers, "cross_entropy", lambda hidden, weights, labels: told(hidden).sum() + weights.sum())
    jax.grad(lambda x: ops.cross_entropy(x, WEIGHTS, LABELS, precision="float32"))(X)
    assert seen == ["highest", "highest"]
    del seen[:]
    jax.grad(lambda x: ops.cross_entropy(x, WEIGHTS, LABELS, precision="bfloat16").astype(jnp.float32))(X)
    assert seen == [None, None]


def test_the_reference_has_forward_derivatives_in_float32() -> None:
    plain = {"precision": "float32", "implementation": "reference"}

    def loss(x: Any) -> Any:
        return ops.cross_entropy(x, WEIGHTS, LABELS, **plain)

    for call in (loss, lambda x: ops.layer_norm(x, SCALE, **plain)):
        made, slope = jax.jvp(call, (X,), (Y,))
        pulled = jax.vjp(call, X)[1](jnp.ones_like(made))[0]
        # Sums over some hundreds of numbers near 1, either way round.
        np.testing.assert_allclose(slope.sum(), jnp.vdot(pulled, Y), rtol=1e-4, atol=1e-4)
    # Every product of both passes is asked for at float32's own precision.
    program = str(jax.make_jaxpr(jax.grad(loss))(X))
    assert program.count("dot_general[") >= 2
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == program.count("dot_general[")


def test_gradients_pass_through_a_precision() -> None:
    def loss(params: Any, x: Any, precision: str | None) -> Any:
        y, metrics = ops.moe_layer(params, x, top_k=2, precision=precision, jitter=0.1, key=KEY)
        return jnp.square(y).sum() + metrics.load_balancing_loss

    # "float32" is held through both passes, None is not touched: on a CPU they are the same products.
    got, want = (jax.jit(jax.grad(loss), static_argnums=2)(PARAMS, X, p) for p in ("float32", None))
    for name in PARAMS:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)
    # Straight through the codes, to x as it is.
    np.testing.assert_array_equal(jax.grad(lambda x: quantizers.quantize(x, CODEBOOK, "float32").sum())(X), 1)


def test_experts_over_a_mesh() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "expert"))

    @jax.jit
    def split(params: Any, x: Any) -> Any:
        return ops.moe_layer(params, x, top_k=2, precision="float32", mesh=mesh, token_axis_names=("data",))

    y, metrics = split(PARAMS, X)
    want, same = jax.jit(lambda: ops.moe_layer(PARAMS, X, top_k=2, precision="float32"))()
    np.testing.assert_allclose(y, want, atol=1e-5)  # two sums of some tens of products, near 1
    np.testing.assert_array_equal(metrics.counts, same.counts)
    assert "all_to_all" in str(jax.make_jaxpr(split)(PARAMS, X))
    with pytest.raises(ValueError, match=r"axes of the mesh.*pass mesh="):
        ops.moe_layer(PARAMS, X, top_k=2, axis_name="expert")
    # What only the other layer has is a mistake with a name, not a missing argument of an inner function.
    with pytest.raises(ValueError, match=r"^capacity_factor is for experts on one device.*pair_capacity_factor"):
        ops.moe_layer(PARAMS, X, top_k=2, mesh=mesh, capacity_factor=1.0)
    with pytest.raises(ValueError, match=r"pair_capacity_factor is for experts over a mesh"):
        ops.moe_layer(PARAMS, X, top_k=2, pair_capacity_factor=1.0)


@pytest.mark.quick
def test_mistakes_and_the_families_second_path() -> None:
    for call, said in (
        (lambda: ops.layer_norm(X, precision="half"), "Unknown precision 'half'.*'bfloat16'"),
        (lambda: ops.activation(X, kind="swish"), "Unknown kind of activation 'swish'"),
        (lambda: ops.activation(X, dropout_rate=0.1), "Dropout draws from a key"),
        (lambda: quantizers.quantize(X, CODEBOOK[:, :3]), "as many numbers as a row"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(TypeError, match="no_such"):
        quantizers.nearest_code(X, CODEBOOK, no_such=1)
    assert kernels.layers is layers
    assert kernels.vq is vq
    assert "nearest_code" in registry()
