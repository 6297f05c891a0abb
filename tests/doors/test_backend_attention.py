"""capibara.jax.tpu_v4.backend.TpuV4AttentionOps, used as the documents do; each keyword changes what can be seen."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara.kernels.ops.attention
from capibara.jax.tpu_v4 import backend, kernels
from capibara.jax.tpu_v4.backend import TpuV4AttentionOps, init_multihead_attention
from capibara.kernels import explain, interpret, target, trust
from capibara.kernels.ops.attention import tiling
from capibara.kernels.ops.attention.api import attention
from capibara.kernels.ops.attention.tiling import config_for

RNG = np.random.default_rng(0)
Q = jnp.asarray(RNG.normal(size=(2, 4, 50, 16)), jnp.float32)
K, V = (jnp.asarray(RNG.normal(size=(2, 2, 50, 16)), jnp.float32) for _ in range(2))
# Two products, of 16 and of 50 terms, in float32; four for an unlucky draw. bfloat16 rounds three operands and the
# result, 2**-9 each, and scores of order one by as much; fp8 has four significant bits for each of three operands.
FLOAT32 = 4 * (16**0.5 + 50**0.5) * 2**-24
LIMITS = {"float32": FLOAT32, "bfloat16": 6 * 2**-9, "mixed": 6 * 2**-9, "fp8": 4 * 2**-4}
TYPES = {"float32": "float32", "bfloat16": "bfloat16", "mixed": "float32", "fp8": "bfloat16"}

ops = TpuV4AttentionOps()


def exact(**options: Any) -> Any:
    return attention(Q, K, V, layout="bhtd", implementation="reference", **options)


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.quick
def test_used_as_documented() -> None:
    got = ops.flash_attention(query=Q, key=K, value=V, block_size=128, use_causal_mask=True, precision="bfloat16")
    assert got.dtype == jnp.bfloat16
    assert error(got, exact(causal=True)) < LIMITS["bfloat16"]
    without = ops.flash_attention(query=Q, key=K, value=V, block_size=128, use_causal_mask=True)
    np.testing.assert_array_equal(got, without)
    embeddings = jnp.asarray(RNG.normal(size=(2, 9, 48)), jnp.float32)
    made = ops.fused_multihead_attention(x=embeddings, num_heads=12, use_bias=True, dropout_rate=0.1)
    assert made.shape == embeddings.shape
    assert bool(jnp.isfinite(made).all())


@pytest.mark.quick
def test_causality_in_the_documents_word_and_in_attentions_own() -> None:
    documented = ops.flash_attention(Q, K, V, use_causal_mask=True)
    for word in ("causal", "is_causal"):
        np.testing.assert_array_equal(ops.flash_attention(Q, K, V, **{word: True}), documented)
        np.testing.assert_array_equal(ops.flash_attention(Q, K, V, use_causal_mask=True, **{word: True}), documented)
        assert error(ops.flash_attention(Q, K, V, **{word: False}), documented) > 0.1
        with pytest.raises(ValueError, match=rf"use_causal_mask=True and {word}=False. Fix: pass one of them"):
            ops.flash_attention(Q, K, V, use_causal_mask=True, **{word: False})


@pytest.mark.quick
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.filterwarnings("ignore:precision='fp8'")
def test_each_precision(precision: str) -> None:
    got = ops.flash_attention(Q, K, V, precision=precision)
    assert got.dtype == TYPES[precision]
    assert error(got, exact()) < LIMITS[precision]
    out, lse = ops.flash_attention(Q, K, V, precision=precision, return_lse=True)
    assert (out.dtype, lse.dtype) == (TYPES[precision], "float32")


def test_the_precisions_differ() -> None:
    found = {p: error(ops.flash_attention(Q, K, V, precision=p), exact()) for p in ("float32", "bfloat16", "fp8")}
    assert found["float32"] * 100 < found["bfloat16"] < found["fp8"]
    assert ops.flash_attention(Q.astype("float16"), *(x.astype("float16") for x in (K, V)), precision=None).dtype == (
        "float16"
    )


@pytest.mark.quick
def test_float32_is_full_precision_forward_and_backward() -> None:
    def products(precision: str | None) -> tuple[int, int]:
        fn = lambda q: jax.grad(lambda q: ops.flash_attention(q, K, V, precision=precision).sum())(q)  # noqa: E731
        text = str(jax.make_jaxpr(fn)(Q))
        return text.count("dot_general["), text.count("HIGHEST")

    plain, highest = products(None), products("float32")
    assert plain[1] == 0
    # Seven products in all, two forward and five backward, and two operands each.
    assert highest[0] == plain[0] >= 7
    assert highest[1] >= highest[0]
    plain_grad, exact_grad = (
        jax.grad(lambda q, p=p: ops.flash_attention(q, K, V, use_causal_mask=True, precision=p).sum())(Q)
        for p in (None, "float32")
    )
    assert error(exact_grad, plain_grad) < 10 * FLOAT32


@pytest.mark.quick
def test_a_block_size_is_the_tile_of_what_runs() -> None:
    def program(size: int | None) -> str:
        return str(jax.make_jaxpr(lambda q: ops.flash_attention(q, K, V, block_size=size, precision=None))(Q))

    assert len({program(size) for size in (None, 16, 25)}) == 3
    assert error(ops.flash_attention(Q, K, V, 7, True, "float32"), exact(causal=True)) < FLOAT32
    x = jax.ShapeDtypeStruct((1, 4, 1024, 64), "bfloat16")
    with target("tpu", "TPU v4"):
        for size in (128, 256, 512):
            (chosen,) = explain(ops.flash_attention, x, x, x, block_size=size).selections
            assert (chosen.config.block_q, chosen.config.block_k) == (size, size)
    with target("gpu", "NVIDIA H200"):
        config = config_for(128, (x, x, x), {"implementation": "hopper", "layout": "bhtd"})
        assert (2 * config.block_q, config.block_k) == (128, 128)
    with interpret():
        got = ops.flash_attention(Q, K, V, block_size=128, precision="float32", implementation="pallas_tpu")
        assert error(got, exact()) < FLOAT32


@pytest.mark.quick
def test_a_block_size_is_of_what_runs_under_each_trust() -> None:
    x = jax.ShapeDtypeStruct((1, 4, 1024, 64), "bfloat16")
    with target("tpu", "TPU v4"):
        for level, implementation in (("measured", "xla"), ("predicted", "pallas_tpu")) * 2:
            with trust(level):
                (chosen,) = explain(ops.flash_attention, x, x, x, block_size=256, use_causal_mask=True).selections
            assert chosen.implementation == implementation
            assert (chosen.config.block_q, chosen.config.block_k) == (256, 256)


def test_a_block_size_is_of_the_causal_call_by_either_spelling() -> None:
    calls = [
        tiling._call((Q, K, V), {"layout": "bhtd", name: True}).params["causal"] for name in ("causal", "is_causal")
    ]
    assert calls == [True, True]


@pytest.mark.quick
@pytest.mark.usefixtures("nothing_said_yet")
def test_a_block_size_that_cannot_be_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tiling._CONFIGS.clear()
    x = jax.ShapeDtypeStruct((1, 4, 1024, 64), "bfloat16")
    with caplog.at_level(logging.WARNING, "capibara.kernels"):
        for _ in range(2):
            ops.flash_attention(Q, K, V, block_size=16, implementation="reference")
            with target("tpu", "TPU v4"), trust("predicted"):
                explain(ops.flash_attention, x, x, x, block_size=100)
    said = [record.getMessage() for record in caplog.records]
    assert sum("block_size means nothing to reference" in line for line in said) == 1
    assert sum("block_size=100 is a tile of 128 queries and 128 keys in pallas_tpu" in line for line in said) == 1
    for wrong in (0, 1.5, (16, 16)):
        with pytest.raises(ValueError, match="block_size is the side of a tile"):
            ops.flash_attention(Q, K, V, block_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chosen by block_size or by config"):
        ops.flash_attention(Q, K, V, block_size=16, config=3)


@pytest.mark.quick
def test_every_other_rule_passes_through() -> None:
    ids = jnp.asarray(RNG.integers(0, 3, (2, 50)).cumsum(1) // 20)
    blocks = jnp.asarray(RNG.random((4, 4)) < 0.7).at[:, 0].set(True)
    near = lambda i, j: abs(i - j) < 9  # noqa: E731

    def program(fn: Any, **options: Any) -> str:
        return str(jax.make_jaxpr(lambda *x: fn(*x, **options))(Q, K, V))

    each: tuple[dict[str, Any], ...] = (
        {"mask": jnp.asarray(RNG.random((50, 50)) < 0.5)},
        {"bias": jnp.asarray(RNG.normal(size=(1, 4, 50, 50)), jnp.float32)},
        {"segment_ids": ids},
        {"window": (5, 3)},
        {"block_mask": blocks, "block_size": 16},
        {"mask_fn": near, "block_size": (16, 16)},
        {"softcap": 2.0, "scale": 0.5},
        {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)},
    )
    room = functools.partial(attention, layout="bhtd")
    for options in each:
        assert program(ops.flash_attention, **options, precision=None) == program(room, **options)
        assert program(room, **options) != program(room)
    drops, said = each[-1], {"dropout_rate": 0.5, "rng": jax.random.key(1)}
    assert program(ops.flash_attention, **drops) == program(ops.flash_attention, **said), "the documents' word"
    got = ops.flash_attention(Q, K, V, precision="float32", **each[0])
    assert error(got, exact(**each[0])) < FLOAT32
    with pytest.raises(TypeError, match="no_such"):
        ops.flash_attention(Q, K, V, no_such=1)
    with pytest.raises(ValueError, match="Unknown precision 'float8'"):
        ops.flash_attention(Q, K, V, precision="float8")


@pytest.mark.filterwarnings("ignore:fused_multihead_attention was called without params")
def test_dropout_without_a_key_is_the_objects_own() -> None:
    x = jnp.asarray(RNG.normal(size=(2, 9, 48)), jnp.float32)
    call: dict[str, Any] = {"num_heads": 4, "dropout_rate": 0.5, "training": True}
    one, two, other = TpuV4AttentionOps(seed=1), TpuV4AttentionOps(seed=1), TpuV4AttentionOps(seed=2)
    params = init_multihead_attention(jax.random.key(0), 48, 4)
    first, second = (one.fused_multihead_attention(x, params=params, **call) for _ in range(2))
    np.testing.assert_array_equal(first, two.fused_multihead_attention(x, params=params, **call))
    assert error(first, second) > 0.05
    assert error(first, other.fused_multihead_attention(x, params=params, **call)) > 0.05
    still = one.fused_multihead_attention(x, params=params, **(call | {"training": False}))
    np.testing.assert_array_equal(still, one.fused_multihead_attention(x, 4, params=params))
    assert error(still, first) > 0.05
    # Given a key, the result is a function of it; the parameters it makes are too.
    keyed = [o.fused_multihead_attention(x, rng=jax.random.key(5), **call) for o in (one, other)]
    np.testing.assert_array_equal(*keyed)
    assert error(keyed[0], one.fused_multihead_attention(x, rng=jax.random.key(6), **call)) > 0.05
    assert error(one.fused_multihead_attention(x, 4), other.fused_multihead_attention(x, 4)) > 0.05


def test_a_fused_layer_trains() -> None:
    x = jnp.asarray(RNG.normal(size=(2, 9, 48)), jnp.float32)
    params = init_multihead_attention(jax.random.key(0), 48, 6, num_kv_heads=2, use_bias=False)

    @jax.jit
    def step(params: Any) -> Any:
        def loss(params: Any) -> Any:
            made = ops.fused_multihead_attention(
                x, 6, use_bias=False, params=params, num_kv_heads=2, causal=True, dropout_rate=0.1,
                rng=jax.random.key(0), training=True,
            )  # fmt: skip
            return ((made - x) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - g, params, gradient)

    values = []
    for _ in range(5):
        value, params = step(params)
        values.append(float(value))
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.98 * values[0]


@pytest.mark.quick
def test_signatures_and_paths() -> None:
    flash = list(inspect.signature(TpuV4AttentionOps.flash_attention).parameters)
    assert flash[:7] == ["self", "query", "key", "value", "block_size", "use_causal_mask", "precision"]
    fused = list(inspect.signature(TpuV4AttentionOps.fused_multihead_attention).parameters)
    assert fused[:8] == ["self", "x", "num_heads", "use_bias", "dropout_rate", "params", "rng", "training"]
    assert kernels.attention is capibara.kernels.ops.attention
    assert "TpuV4AttentionOps" in dir(backend)
