"""TPUv4Kernels: norm, gelu with dropout and routing. Each keyword changes something that can be seen."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.core.kernels import TPUv4Kernels
from capibara.kernels import explain, load_balancing_loss, route
from capibara.surface import layers as by_level

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(3, 8, 64)) + 1, jnp.float32)
WEIGHT, BIAS = (jnp.asarray(RNG.normal(size=64), jnp.float32) for _ in range(2))
LOGITS = jnp.asarray(RNG.normal(size=(40, 8)), jnp.float32)

exactly = TPUv4Kernels("float32")
# A row of 64: two sums of sqrt(64) units each, four for an unlucky draw, eight roundings. bfloat16 rounds x and y; the
# mean is about the size of the deviation, so that x's rounding is seen up to twice.
FLOAT32 = (8 + 8 * 64**0.5) * 2**-24
BFLOAT16 = 4 * 2**-9


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def normal(x: Any, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5) -> np.ndarray:
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + eps)
    return scaled * np.asarray(weight, np.float64) + np.asarray(bias, np.float64)


def gelu(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))


@pytest.mark.quick
def test_used_as_documented() -> None:
    kernels = TPUv4Kernels(precision="bfloat16", optimization_level="aggressive")
    normed = kernels.fast_layer_norm(input_tensor=X, weight=WEIGHT, bias=BIAS, eps=1e-5, memory_efficient=True)
    assert normed.dtype == jnp.bfloat16
    assert error(normed, normal(X, WEIGHT, BIAS)) < BFLOAT16
    rows = X.astype(jnp.bfloat16)
    dropped = kernels.fused_gelu_dropout(input_tensor=rows, dropout_rate=0.1, training=True, inplace=True)
    assert dropped.shape == X.shape
    assert rows.is_deleted()
    with pytest.warns(UserWarning, match="drew random router weights"):
        routed = kernels.moe_routing_kernel(
            tokens=X, num_experts=32, top_k=4, load_balancing=True, precision="bfloat16"
        )
    weights, indices, counts, loss = routed
    assert weights.shape == indices.shape == (3, 8, 4)
    assert counts.shape == (32,)
    assert int(counts.sum()) == 3 * 8 * 4
    assert float(loss) > 0
    for name, documented in (
        ("fast_layer_norm", ["input_tensor", "weight", "bias", "eps", "memory_efficient"]),
        ("fused_gelu_dropout", ["input_tensor", "dropout_rate", "training", "inplace"]),
        ("moe_routing_kernel", ["tokens", "num_experts", "top_k", "load_balancing", "precision"]),
        ("batch_operations", ["operation_type", "inputs", "parameters", "parallel_execution"]),
    ):
        assert list(inspect.signature(getattr(TPUv4Kernels, name)).parameters)[1 : len(documented) + 1] == documented


@pytest.mark.quick
def test_a_norm_in_each_precision() -> None:
    errors = {}
    for name, dtype in (("bfloat16", "bfloat16"), ("mixed", "float32"), ("float32", "float32")):
        got = TPUv4Kernels(precision=name).fast_layer_norm(X, WEIGHT, BIAS)
        assert got.dtype == dtype
        assert exactly.fast_layer_norm(X, WEIGHT, BIAS, precision=name).dtype == dtype
        errors[name] = error(got, normal(X, WEIGHT, BIAS))
    assert errors["float32"] < FLOAT32 < errors["mixed"]
    assert max(errors.values()) < BFLOAT16
    assert error(exactly.fast_layer_norm(X), normal(X)) < FLOAT32
    assert error(exactly.fast_layer_norm(X, WEIGHT, eps=0.5), normal(X, WEIGHT, eps=0.5)) < FLOAT32
    with pytest.raises(ValueError, match="eps is a finite number above 0"):
        exactly.fast_layer_norm(X, eps=0)
    with pytest.raises(ValueError, match=r"eps is a number.*'a'"):
        exactly.fast_layer_norm(X, eps="a")  # type: ignore[arg-type]
    np.testing.assert_array_equal(
        exactly.fast_layer_norm(X, eps=jnp.float32(0.5)),  # type: ignore[arg-type]
        exactly.fast_layer_norm(X, eps=0.5),
    )
    with pytest.raises(ValueError, match="input_tensor is an array"):
        exactly.fast_layer_norm(None)


@pytest.mark.parametrize("level", ["none", "balanced"])
def test_memory_efficient_is_what_the_gradient_keeps(level: str) -> None:
    kernels = TPUv4Kernels("float32", optimization_level=level)

    def kept(memory_efficient: bool) -> tuple[int, Any]:
        norm = lambda x, w: kernels.fast_layer_norm(x, w, BIAS, memory_efficient=memory_efficient)  # noqa: E731
        made, pull = jax.vjp(norm, X, WEIGHT)
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes")]
        return sum(sizes), pull(jnp.cos(made))

    (lean, lean_grads), (plain, plain_grads) = kept(True), kept(False)
    rows = X.size // 64
    # The rows, two numbers for each, and the vectors.
    assert lean <= X.nbytes + 4 * (2 * rows + 2 * 64)
    assert plain >= 2 * X.nbytes
    for one, other in zip(lean_grads, plain_grads, strict=True):
        # Twice the sums of the forward pass, and those over the 24 rows.
        assert error(one, other) < 2 * FLOAT32 + 4 * rows**0.5 * 2**-24


@pytest.mark.quick
@pytest.mark.parametrize(
    ("level", "implementation"),
    [("none", "reference"), ("basic", "xla"), ("balanced", "xla"), ("aggressive", "xla")],
)
def test_a_level_decides_what_runs(level: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[str] = []
    monkeypatch.setattr(by_level, "tune_once", lambda how, fn, arrays: tuned.append(how.body.__name__))
    kernels = TPUv4Kernels("float32", optimization_level=level)
    for call in (
        lambda x: kernels.fast_layer_norm(x),
        lambda x: kernels.fused_gelu_dropout(x),
        lambda x: kernels.moe_routing_kernel(x, num_experts=64),
    ):
        found = explain(call, X)
        assert found.implementation == implementation
        assert ("it was asked for by name" in str(found)) == (level in ("none", "basic"))
    asked = ["_normalised", "_gelu_dropped", "_routed"] if level == "aggressive" else []
    assert tuned == asked
    unfused = TPUv4Kernels("float32", optimization_level=level, enable_xla_fusion=False)

    def barriers(kernels: TPUv4Kernels) -> int:
        return str(jax.make_jaxpr(lambda x: kernels.fast_layer_norm(x, WEIGHT))(X)).count("optimization_barrier")

    assert (barriers(kernels), barriers(unfused)) == (0, 2)
    assert error(unfused.fast_layer_norm(X, WEIGHT), normal(X, WEIGHT)) < FLOAT32


@pytest.mark.quick
def test_dropout_by_the_objects_keys() -> None:
    one, same, other = TPUv4Kernels("float32", seed=3), TPUv4Kernels("float32", seed=3), TPUv4Kernels("float32")
    x = jnp.ones((50, 100)) * 2
    first, second = (one.fused_gelu_dropout(x, dropout_rate=0.25) for _ in range(2))
    np.testing.assert_array_equal(first, same.fused_gelu_dropout(x, dropout_rate=0.25))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other.fused_gelu_dropout(x, dropout_rate=0.25))
    key = jax.random.key(7)
    np.testing.assert_array_equal(*(k.fused_gelu_dropout(x, dropout_rate=0.25, rng=key) for k in (one, other)))
    # 5000 coins of 1/4: four standard deviations are 0.025. What is kept is scaled by 4/3.
    assert abs(float((first == 0).mean()) - 0.25) < 0.025
    np.testing.assert_allclose(first[first != 0], gelu(2.0) * 4 / 3, rtol=1e-5)
    for nothing in ({"training": False, "dropout_rate": 0.25}, {"training": True}):
        assert error(one.fused_gelu_dropout(x, **nothing), gelu(x)) < FLOAT32
    # gelu by tanh differs by up to 5e-4, and by more than rounding.
    assert FLOAT32 < error(one.fused_gelu_dropout(X, approximate=True), gelu(X)) < 1e-3
    assert one.fused_gelu_dropout(X, precision="bfloat16").dtype == jnp.bfloat16
    for rate in (1.0, -0.1, "half"):
        with pytest.raises(ValueError, match="from 0 to below 1"):
            one.fused_gelu_dropout(x, dropout_rate=rate)  # type: ignore[arg-type]


def test_a_key_of_numpy_at_a_level_that_tunes() -> None:
    tuned = TPUv4Kernels("float32", "aggressive")
    key = np.array([0, 7], np.uint32)  # as PRNGKey(7) is
    got = tuned.fused_gelu_dropout(X, dropout_rate=0.5, rng=key)
    np.testing.assert_array_equal(got, exactly.fused_gelu_dropout(X, dropout_rate=0.5, rng=jnp.asarray(key)))


@pytest.mark.quick
def test_inplace_gives_up_the_input(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "capibara.kernels")
    for kernels in (exactly, TPUv4Kernels("mixed", enable_xla_fusion=False)):
        x = jnp.asarray(X)  # of its own, below
        x = x + 0
        place = x.unsafe_buffer_pointer()
        kept = kernels.fused_gelu_dropout(x)
        assert not x.is_deleted()
        made = kernels.fused_gelu_dropout(x, inplace=True)
        assert x.is_deleted()
        assert made.unsafe_buffer_pointer() == place
        np.testing.assert_array_equal(made, kept)
    assert not caplog.records

    slope = jax.grad(lambda x: exactly.fused_gelu_dropout(x, inplace=True).sum())(X)
    np.testing.assert_array_equal(slope, jax.grad(lambda x: exactly.fused_gelu_dropout(x).sum())(X))
    TPUv4Kernels("bfloat16").fused_gelu_dropout(X, inplace=True)
    TPUv4Kernels("float32", "none").fused_gelu_dropout(X, inplace=True)
    for _ in range(2):
        exactly.fused_gelu_dropout(np.asarray(X), inplace=True)
    assert not X.is_deleted()
    reasons = ["inside of jit and grad", "the input is float32", "operation by operation", "NumPy"]
    assert len(caplog.records) == len(reasons)
    for record, reason in zip(caplog.records, reasons, strict=True):
        assert reason in record.getMessage()


@pytest.mark.quick
def test_routing_of_logits_and_of_tokens() -> None:
    want = route(LOGITS, top_k=3, return_counts=True)
    got = exactly.moe_routing_kernel(LOGITS, num_experts=8, top_k=3)
    np.testing.assert_array_equal(got.indices, want.indices)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-6)
    np.testing.assert_array_equal(got.counts, want.counts)
    assert want.counts is not None
    np.testing.assert_allclose(got.load_balancing_loss, load_balancing_loss(LOGITS, want.counts), rtol=1e-6)
    bare = exactly.moe_routing_kernel(LOGITS, num_experts=8, top_k=3, load_balancing=False)
    assert bare.counts is None
    assert bare.load_balancing_loss is None
    rounded = jax.eval_shape(lambda x: exactly.moe_routing_kernel(x, 8, top_k=3, precision="bfloat16"), LOGITS)
    assert rounded.weights.dtype == jnp.bfloat16
    options = {"gate": "sigmoid", "normalize": False, "scale": 2.0, "load_balancing": False}
    sigmoid = exactly.moe_routing_kernel(LOGITS, 8, top_k=3, **options)
    assert error(sigmoid.weights, 2 * jax.nn.sigmoid(jnp.take_along_axis(LOGITS, sigmoid.indices, 1))) < FLOAT32

    router = jnp.asarray(RNG.normal(size=(64, 8)), jnp.float32)
    got = exactly.moe_routing_kernel(X, num_experts=8, top_k=3, router=router)
    want = route(jnp.dot(X, router, precision="highest"), top_k=3)
    np.testing.assert_array_equal(got.indices, want.indices)
    # The logits are sums of 64 products, some tens in size: their error is the weights' relative one.
    np.testing.assert_allclose(got.weights, want.weights, rtol=64 * 2**-20)
    # A router goes before the reading as logits.
    square = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)
    turned = explain(lambda x, r: exactly.moe_routing_kernel(x, 8, router=r), LOGITS, square)
    assert [selection.call.op.name for selection in turned.selections] == ["gemm", "route"]

    slope = jax.jit(jax.grad(lambda r: exactly.moe_routing_kernel(X, 8, router=r).load_balancing_loss))(router)
    assert float(jnp.abs(slope).max()) > 0


def test_a_router_that_is_drawn() -> None:
    with pytest.warns(UserWarning, match="pass router="):
        first = TPUv4Kernels("float32", seed=5).moe_routing_kernel(X, num_experts=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        same = TPUv4Kernels("float32", seed=5).moe_routing_kernel(X, num_experts=8)
        other = TPUv4Kernels("float32", seed=6).moe_routing_kernel(X, num_experts=8)
    np.testing.assert_array_equal(first.weights, same.weights)
    assert not np.array_equal(first.weights, other.weights)


@pytest.mark.quick
def test_mistakes_of_routing() -> None:
    for arguments, said in (
        ({"tokens": jnp.zeros((3, 8), jnp.int32), "num_experts": 8}, "tokens are floats.*Fix: embed them"),
        ({"tokens": X, "num_experts": 0}, "num_experts is a whole number, 1 or more"),
        ({"tokens": X, "num_experts": 8, "router": jnp.ones((8, 64))}, r"\[width, num_experts\], \(64, 8\)"),
        ({"tokens": LOGITS, "num_experts": 8, "top_k": 9}, "top_k"),
        ({"tokens": LOGITS, "num_experts": 8, "top_k": jnp.ones(2)}, "top_k is a whole number"),
        ({"tokens": LOGITS, "num_experts": 8, "scale": "a"}, "scale is a number"),
        ({"tokens": LOGITS, "num_experts": 8, "gate": "hard"}, "Unknown gate 'hard'"),
    ):
        with pytest.raises(ValueError, match=said):
            exactly.moe_routing_kernel(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no_such"):
        exactly.moe_routing_kernel(LOGITS, 8, no_such=1)
