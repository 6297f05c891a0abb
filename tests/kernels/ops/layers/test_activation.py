"""Activations and their dropout: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.compile import gpu_compiler
from capibara.hardware import abstract_devices
from capibara.kernels import dropout, gated_activation, geglu, gelu, glu, interpret, silu, swiglu, target
from capibara.kernels.core.spec import Implementation
from capibara.kernels.lab.check import check
from capibara.kernels.ops.layers import ACTIVATION, ACTIVATION_GRAD, activation
from capibara.kernels.ops.layers.activation.cases import LOWERED
from capibara.kernels.ops.layers.activation.folding import fold
from capibara.kernels.ops.layers.activation.formulas import KINDS, SHORT_TAIL_ERROR, normal_cdf, value_and_slope
from capibara.kernels.ops.layers.activation.reference import FUNCTIONS
from capibara.kernels.ops.layers.activation.xla import xla, xla_grad
from capibara.kernels.pallas import prng

EVERYWHERE = ("xla", "opaque", "reference")
KEY = jax.random.key(7)


@pytest.fixture(autouse=True, scope="module")
def opaque() -> Iterator[None]:
    """XLA's pass as JAX sees a kernel: the op's own gradient, batching and mesh rules stand in, as for Hopper's."""
    fns = {ACTIVATION: xla, ACTIVATION_GRAD: xla_grad}
    for op, fn in fns.items():
        op.implement(Implementation("opaque", fn, kernel=True))
    yield
    for op in fns:
        del op.implementations["opaque"]
        op.runners.clear()


def _normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def _mask(shape: tuple[int, ...], rate: float, key: Any = KEY) -> np.ndarray:
    """What is kept, by the generator itself: rows are counted over the leading axes, columns along the last."""

    @jax.jit
    def keep(key: Any) -> Any:
        rows = jnp.arange(math.prod(shape[:-1]), dtype=jnp.uint32)[:, None]
        columns = jnp.arange(shape[-1], dtype=jnp.uint32)
        return prng.pair_keep_mask(jax.random.bits(key, (2,), jnp.uint32), rows, columns, rate)

    return np.asarray(keep(key)).reshape(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_slopes_against_float64(kind: str) -> None:
    """Every formula, also where it is nearly 0 or nearly saturated."""
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, -80.0, 80.0]])
    with jax.enable_x64(True):
        wanted, slope = (np.asarray(v) for v in jax.jvp(FUNCTIONS[kind], (jnp.asarray(x),), (jnp.ones_like(x),)))
    got = value_and_slope(kind, jnp.asarray(x, jnp.float32), False)
    # Some thirty roundings of float32, of values up to 80 and slopes up to about 1.
    np.testing.assert_allclose(got[0], wanted, atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(got[1], slope, atol=4e-6)


@pytest.mark.parametrize(("short", "allowed"), [(True, SHORT_TAIL_ERROR), (False, 4e-6)])
def test_the_tail_of_gelu_is_exact_relative_to_itself(short: bool, allowed: float) -> None:
    """1 + erf would have lost every digit here; what is left is the rounding of x² in the exponential."""
    x = np.linspace(-9, -1, 1001).astype(np.float32)
    right = np.array([0.5 * math.erfc(-float(v) * math.sqrt(0.5)) for v in x])
    below, _ = normal_cdf(jnp.asarray(x), short)
    np.testing.assert_allclose(np.asarray(below), right, rtol=allowed)


@pytest.mark.quick
@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_mask_is_the_generators(name: str) -> None:
    x = 1 + jnp.abs(_normal(3, 5, 70))
    with interpret("hlo"):
        y = dropout(x, 0.25, KEY, implementation=name)
        gated = gated_activation(x, x, kind="silu", dropout_rate=0.25, key=KEY, implementation=name)
    keep = _mask(x.shape, 0.25)
    np.testing.assert_allclose(y, np.where(keep, x / 0.75, 0), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(gated) != 0, keep)
    assert 0.7 < keep.mean() < 0.8  # 1050 draws: three standard deviations are 0.04


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla", "opaque"])
def test_the_backward_pass_draws_the_same_mask_and_stores_none(name: str) -> None:
    gate, up, flow = _normal(6, 130), _normal(6, 130, seed=1), _normal(6, 130, seed=2)

    def fn(gate: Any, up: Any) -> Any:
        return geglu(gate, up, dropout_rate=0.5, key=KEY, implementation=name)

    with interpret("hlo"):
        _, pull = jax.vjp(fn, gate, up)
        d_gate, d_up = pull(flow)
    kept = sorted(str(leaf.dtype) for leaf in jax.tree.leaves(pull) if leaf.size)
    assert kept == ["float32", "float32", "uint32"]  # the gate, the up and the two words

    @jax.jit
    def plain(gate: Any, up: Any, flow: Any) -> Any:
        return jax.vjp(lambda g, u: FUNCTIONS["gelu"](g) * u, gate, up)[1](flow)

    right = plain(gate, up, np.where(_mask(gate.shape, 0.5), flow * 2, 0))
    np.testing.assert_allclose(d_gate, right[0], atol=2e-5)
    np.testing.assert_allclose(d_up, right[1], atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("xla", P("data", "model", None)),
        ("xla", P("model", None, "data")),
        ("opaque", P("model", None, "data")),
        ("opaque", P(None, ("data", "model"), None)),
    ],
)
def test_the_mask_does_not_depend_on_the_mesh(name: str, spec: P) -> None:
    """60 columns over 4 devices: parts of 15 begin at odd columns too, in the middle of a pair."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    x = _normal(4, 8, 60)

    def loss(x: Any) -> Any:
        y = activation(x, kind="gelu", dropout_rate=0.3, key=KEY, implementation=name)
        return (y**2).sum(), y

    with interpret("hlo"):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        fn = jax.jit(jax.value_and_grad(loss, has_aux=True))
        compiled = fn.lower(placed).compile()
        (_, split), d_split = compiled(placed)
        (_, whole), d_whole = fn(x)
    assert "all-gather" not in compiled.as_text()
    assert split.sharding.is_equivalent_to(placed.sharding, 3)
    np.testing.assert_array_equal(np.asarray(split) != 0, _mask(x.shape, 0.3))
    np.testing.assert_allclose(split, whole, atol=1e-6)
    np.testing.assert_allclose(d_split, d_whole, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["xla", "opaque"])
def test_each_element_of_vmap_drops_what_it_would_alone(name: str) -> None:
    x, keys = _normal(2, 2, 3, 40), jax.random.split(KEY, 4).reshape(2, 2)

    def fn(x: Any, key: Any) -> Any:
        return jax.grad(lambda x: dropout(x, 0.5, key, implementation=name).sum())(x)

    @jax.jit  # compiled together: alone, each would take as long
    def mapped(x: Any, keys: Any) -> Any:
        own = jax.vmap(jax.vmap(fn))(x, keys)
        inner = jax.vmap(jax.vmap(fn), in_axes=(0, None))(x, keys[0])
        outer = jax.vmap(jax.vmap(fn, in_axes=(0, None)))(x, keys[:, 0])
        rows = jax.vmap(fn, in_axes=(0, None))(x[0, 0], keys[0, 0])
        return own, inner, outer, rows

    with interpret("hlo"):
        own, inner, outer, rows = mapped(x, keys)
    masks = {at: 2.0 * _mask((3, 40), 0.5, keys[at]) for at in np.ndindex(2, 2)}
    for i, j in masks:
        np.testing.assert_array_equal(own[i, j], masks[i, j])
        np.testing.assert_array_equal(inner[i, j], masks[0, j])
        np.testing.assert_array_equal(outer[i, j], masks[i, 0])
    for row in rows:
        np.testing.assert_array_equal(row, masks[0, 0][0])


def test_the_thin_functions() -> None:
    gate, up = _normal(4, 9), _normal(4, 9, seed=1)
    right = {
        "gelu": (gelu(gate), jax.nn.gelu(gate, approximate=False)),
        "gelu_tanh": (gelu(gate, approximate=True), jax.nn.gelu(gate, approximate=True)),
        "silu": (silu(gate), jax.nn.silu(gate)),
        "glu": (glu(gate, up), jax.nn.sigmoid(gate) * up),
        "swiglu": (swiglu(gate, up), jax.nn.silu(gate) * up),
        "geglu": (geglu(gate, up), jax.nn.gelu(gate, approximate=False) * up),
        "geglu_tanh": (geglu(gate, up, approximate=True), jax.nn.gelu(gate, approximate=True) * up),
        "list": (activation([-1.0, 1.0], kind="relu"), [0.0, 1.0]),
    }
    for name, (got, wanted) in right.items():
        np.testing.assert_allclose(got, wanted, atol=2e-6, err_msg=name)
    assert not np.allclose(right["gelu"][0], right["gelu_tanh"][0], atol=1e-5)


def test_both_gradients_of_a_gated_layer_are_one_pass_between_products() -> None:
    found = gpu_compiler()
    if not found.available:
        pytest.skip(f"needs the GPU compiler: {found}")
    there = jax.sharding.SingleDeviceSharding(abstract_devices("h200")[0])
    x, wide, back = (
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=there) for shape in ((2048, 512), (512, 1024), (1024, 512))
    )

    def mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return (gated_activation(x @ gate, x @ up, kind="silu", implementation="xla") @ down).astype("float32").sum()

    with target("gpu", "NVIDIA H200"):
        text = jax.jit(jax.grad(mlp, argnums=(0, 1, 2))).lower(x, wide, wide, back).compile().as_text()
    assert re.search(r"= \(bf16\[2048,1024\]\S*, bf16\[2048,1024\]\S*\) fusion\(", text or "")


def test_rate_0_needs_no_key_and_uses_none() -> None:
    x = _normal(3, 8)
    np.testing.assert_array_equal(gelu(x, dropout_rate=0.0, key=KEY), gelu(x))
    half = np.float32(0.5)  # numpy's numbers are as good as Python's
    np.testing.assert_array_equal(dropout(x, half, KEY), dropout(x, 0.5, KEY))


@pytest.mark.parametrize("case", [c for c in ACTIVATION.cases if c.tags == LOWERED], ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["xla", "opaque"])
def test_cases_that_the_shared_suite_only_lowers(name: str, case: Any) -> None:
    with interpret("hlo"):
        reason = ACTIVATION.implementations[name].refusal(ACTIVATION.call(*case.args(), **case.params))
        if reason is not None:
            assert "float16" in reason
            return
        result = check(ACTIVATION, case.arrays(), case.params, name)
    assert result.ok, result.why


def test_the_rate_is_rounded_and_what_is_kept_scaled_for_it() -> None:
    """Of 0.9999 one in 9362 is kept (7 of 65536), not one in 10000: the mean would be off by 7 % without the scale."""
    y = np.asarray(dropout(jnp.ones((256, 512)), 0.9999, KEY))
    np.testing.assert_allclose(np.unique(y), [0, 65536 / 7], rtol=1e-6)
    np.testing.assert_array_equal(dropout(jnp.ones((4, 64)), 1e-6, KEY), 1.0)  # nearer to 0 than to 1/65536


def test_rows_fold_into_the_fewest_groups() -> None:
    assert fold((), None, False)[2:] == (1, 1)
    assert fold((4, 3, 5), None, False) == ((), (), 60, 1)
    assert fold((4, 3, 5), (30, 10, 1), False) == ((4, 3), (30, 10), 5, 1)  # a part of a wider array
    assert fold((4, 3, 5), (0, 5, 1), True) == ((4,), (0,), 15, 1)
    assert fold((4,), (0,), True) == ((4,), (0,), 1, 1)
    assert fold((4, 5), (0, 0), False) == ((), (), 20, 0)
    np.testing.assert_array_equal(fold((2, 3, 5), (30, 10, 1), False).begins(), [0, 10, 20, 30, 40, 50])


def test_vmap_of_vmap_of_no_rows() -> None:
    x, keys = jnp.zeros((2, 3, 0, 4)), jax.random.split(KEY, (2, 3))
    assert jax.vmap(jax.vmap(lambda x, key: dropout(x, 0.5, key)))(x, keys).shape == x.shape


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: gelu(x, dropout_rate=1.0, key=KEY), "from 0 to below 1"),
        (lambda x: gelu(x, dropout_rate=-0.1, key=KEY), "from 0 to below 1"),
        (lambda x: gelu(x, dropout_rate=float("nan"), key=KEY), "from 0 to below 1"),
        (lambda x: gelu(x, dropout_rate="much", key=KEY), "from 0 to below 1"),
        (lambda x: gelu(x, dropout_rate=True, key=KEY), "from 0 to below 1"),
        (lambda x: jax.jit(lambda r: gelu(x, dropout_rate=r, key=KEY))(0.5), "known before tracing"),
        (lambda x: gelu(x, dropout_rate=0.5), "Dropout draws from a key"),
        (lambda x: gelu(x, dropout_rate=0.5, key="seed"), "Dropout draws from a JAX key"),
        (lambda x: activation(x, kind="gellu"), "Did you mean 'gelu'"),
        (lambda x: gelu(x.astype(jnp.int32)), "x of i32"),
        (lambda x: gelu(x[0, 0]), r"an array \[..., columns\]"),
        (lambda x: gelu("row"), "activation takes arrays"),
        (lambda x: swiglu(x, x[:2]), "The gate and the up have one shape and one type"),
        (lambda x: swiglu(x, x.astype("bfloat16")), "The gate and the up have one shape and one type"),
        (lambda x: swiglu(x, None), "takes a gate and an up"),
        (lambda x: ACTIVATION(x, None, jnp.zeros(3, "uint32"), rate=0.5), "The seed is two words"),
        (lambda x: ACTIVATION(x, None, jnp.zeros(2, "uint32"), jnp.zeros(3, "int32"), rate=0.5), "a row and a column"),
        (lambda x: ACTIVATION(x, None, jnp.zeros(2, "uint32"), rate=0.5, strides=(1, 1)), "a stride for each"),
        (lambda x: ACTIVATION_GRAD(x), "the cotangent of the output"),
        (lambda x: ACTIVATION_GRAD(x, None, None, None, x[:2]), "d_out is as x"),
    ],
)
def test_errors_say_the_rule(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(_normal(4, 8))
