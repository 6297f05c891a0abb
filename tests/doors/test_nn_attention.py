"""capibara.jax.nn.dot_product_attention: jax's own outside a context, jax's results by dispatch inside."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara.jax.nn as nn
from capibara.dropin import nn_attention as nn_api
from capibara.dropin.nn_attention import why_not
from capibara.kernels import explain
from capibara.kernels.core.dispatch import recording
from capibara.mesh.context import tpu_v4_optimization_context

RNG = np.random.default_rng(0)
Q = jnp.asarray(RNG.normal(size=(2, 12, 4, 16)), jnp.float32)
K, V = (jnp.asarray(RNG.normal(size=(2, 15, 2, 16)), jnp.float32) for _ in range(2))
PAIRS = RNG.random((2, 4, 12, 15)) < 0.5
PAIRS[0, 0, 3] = False  # a query that sees nothing: jax gives it the mean of all values
# Two products, of 16 and of 15 terms, in float32, once here and once in jax's; four for an unlucky draw.
FLOAT32 = 8 * (16**0.5 + 15**0.5) * 2**-24

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"bias": jnp.asarray(RNG.normal(size=(2, 4, 12, 15)), jnp.float32)},
    "bias, narrow": {"bias": jnp.asarray(RNG.normal(size=(1, 4, 12, 1)), jnp.float32)},
    "mask": {"mask": PAIRS},
    "mask of three axes": {"mask": PAIRS[0]},
    "mask, one head": {"mask": PAIRS[:, :1], "is_causal": True},
    "mask, one key": {"mask": PAIRS[:, :, :, :1]},
    "scale": {"scale": 0.3},
    "window": {"local_window_size": 4},
    "window of two sides": {"local_window_size": (5, 1), "is_causal": True},
    "key lengths": {"key_value_seq_lengths": jnp.asarray([15, 6], jnp.int32)},
    "no keys": {"key_value_seq_lengths": jnp.asarray([0, 6], jnp.int32)},
    "query lengths": {"query_seq_lengths": jnp.asarray([5, 12], jnp.int32)},
    "both lengths": {
        "query_seq_lengths": jnp.asarray([5, 12], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([9, 0], jnp.int32),
        "mask": PAIRS,
        "bias": jnp.asarray(RNG.normal(size=(1, 1, 12, 15)), jnp.float32),
    },
}


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def jaxs_own(options: dict[str, Any]) -> Any:
    """jax's result, its twenty operations as one program."""
    return jax.jit(functools.partial(jax.nn.dot_product_attention, **options))(Q, K, V)


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("name", CALLS)
def test_inside_a_context_it_is_the_op_with_jax_s_results(name: str) -> None:
    options = CALLS[name]
    want = jaxs_own(options)
    with tpu_v4_optimization_context(precision="float32"):
        with recording() as found:
            got = nn.dot_product_attention(Q, K, V, **options)
        assert [s.call.op.name for s in found] == ["attention"]
    assert got.dtype == want.dtype
    assert error(got, want) < FLOAT32
    assert why_not(Q, K, V, **options) is None


@pytest.mark.parametrize("name", ["bias", "both lengths"])
def test_gradients_are_jax_s(name: str) -> None:
    options = dict(CALLS[name])
    bias = options.pop("bias", jnp.zeros((1, 1, 12, 15)))
    weights = jnp.asarray(RNG.normal(size=Q.shape), jnp.float32)

    def loss(attend: Any) -> Any:
        return lambda q, k, v, bias: (attend(q, k, v, bias, **options) * weights).sum()

    wants = jax.jit(jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2, 3)))(Q, K, V, bias)
    with tpu_v4_optimization_context(precision="float32"):
        gots = jax.jit(jax.grad(loss(nn.dot_product_attention), (0, 1, 2, 3)))(Q, K, V, bias)
    for got, want in zip(gots, wants, strict=True):
        # Four more roundings a pass, as the op's own tolerance for gradients has it.
        assert error(got, want) < 4 * FLOAT32


@pytest.mark.quick
@pytest.mark.parametrize("name", ["plain", "both lengths"])
def test_the_residual(name: str) -> None:
    if "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters:
        pytest.skip("this jax has no return_residual")
    options = CALLS[name]
    want = jaxs_own({**options, "return_residual": True})
    with tpu_v4_optimization_context(precision="float32"):
        got = nn.dot_product_attention(Q, K, V, return_residual=True, **options)
        flat = jax.jit(jax.grad(lambda q: nn.dot_product_attention(q, K, V, return_residual=True, **options)[1].sum()))(
            Q
        )
    assert error(got[0], want[0]) < FLOAT32
    np.testing.assert_allclose(got[1], want[1], rtol=FLOAT32, atol=FLOAT32)
    assert got[1].dtype == want[1].dtype
    assert not np.asarray(flat).any()


def test_other_types_and_ranks() -> None:
    half = [x.astype("bfloat16") for x in (Q, K, V)]
    with tpu_v4_optimization_context():
        got = nn.dot_product_attention(*half)
        one = nn.dot_product_attention(Q[0], K[0], V[0], is_causal=True)
        from_numpy = nn.dot_product_attention(*(np.asarray(x) for x in (Q, K, V)))
        batched = jax.vmap(nn.dot_product_attention)(*(jnp.stack([x, x + 1]) for x in (Q, K, V)))
    assert got.dtype == jnp.bfloat16
    # Both round probabilities and the result to bfloat16, and each does it its own way: four of 2**-9.
    assert error(got, jax.nn.dot_product_attention(*half)) < 4 * 2**-9
    assert error(one, jax.nn.dot_product_attention(Q[0], K[0], V[0], is_causal=True)) < FLOAT32
    assert error(from_numpy, jax.nn.dot_product_attention(Q, K, V)) < FLOAT32
    assert error(batched[1], jax.nn.dot_product_attention(Q + 1, K + 1, V + 1)) < FLOAT32


@pytest.mark.quick
def test_outside_it_is_jax_s_own() -> None:
    with recording() as found:
        got = nn.dot_product_attention(Q, K, V, is_causal=True)
    assert not found
    np.testing.assert_array_equal(got, jax.nn.dot_product_attention(Q, K, V, is_causal=True))
    mine, theirs = (jax.make_jaxpr(f)(Q, K, V) for f in (nn.dot_product_attention, jax.nn.dot_product_attention))
    assert str(mine) == str(theirs)
    assert inspect.signature(nn.dot_product_attention) == inspect.signature(jax.nn.dot_product_attention)
    assert nn.dot_product_attention.__module__ == "capibara.jax.nn"
    assert nn.relu is jax.nn.relu


@pytest.mark.quick
def test_what_was_asked_for_by_name_is_honoured() -> None:
    with tpu_v4_optimization_context():
        assert not explain(lambda q: nn.dot_product_attention(q, K, V, implementation="xla"), Q).selections
        np.testing.assert_array_equal(
            nn.dot_product_attention(Q, K, V, implementation="xla"),
            jax.nn.dot_product_attention(Q, K, V, implementation="xla"),
        )
        with pytest.raises(ValueError, match="Unsupported implementation option: mine"):
            nn.dot_product_attention(Q, K, V, implementation="mine")

    def original(query: Any, key: Any, value: Any, *, implementation: str | None = None) -> Any:
        return implementation

    assert nn_api.dot_product_attention(original, Q, K, V, implementation="cudnn") == "cudnn"


@pytest.mark.quick
@pytest.mark.usefixtures("nothing_said_yet")
def test_what_the_op_has_not_is_jax_s_own_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    long = jnp.concatenate([Q, Q], 1)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((Q, K, V), {"scale": jnp.float32(0.3)}, "its scale is an array"),
        ((long, K, V), {"local_window_size": (2, 2)}, "the window leaves the last queries no key"),
        ((Q, K, V), {"bias": jnp.ones((1, 1, 12, 15), jnp.int32)}, "its bias is int32"),
        ((Q[:0], K[:0], V[:0]), {}, "an operand is empty"),
    ]
    with caplog.at_level(logging.WARNING, "capibara.kernels"), tpu_v4_optimization_context(precision="float32"):
        for args, options, reason in calls:
            assert reason in str(why_not(*args, **options))
            mine, theirs = (
                jax.make_jaxpr(lambda *x, f=f, o=options: f(*x, **o))(*args)
                for f in (nn.dot_product_attention, jax.nn.dot_product_attention)
            )
            assert str(mine) == str(theirs)
            jax.eval_shape(lambda *x, o=options: nn.dot_product_attention(*x, **o), *args)  # says nothing new
    said = "\n".join(record.getMessage() for record in caplog.records)
    for _, _, reason in calls:
        assert said.count(reason) == 1


@pytest.mark.quick
def test_a_mistake_is_told_in_jax_s_words() -> None:
    for args, options in (
        ((Q, K, V[:, :3]), {}),
        ((Q, K[:, :, :, :3], V[:, :, :, :3]), {}),
        ((Q[:, :, :3], K, V), {}),
        ((Q, K, V), {"mask": jnp.ones((2, 4, 12, 15))}),
        ((Q, K, V), {"query_seq_lengths": jnp.asarray([1, 2, 3], jnp.int32)}),
        ((Q, K), {}),
        ((Q, K, V), {"no_such": 1}),
    ):
        with pytest.raises((ValueError, TypeError)) as theirs:
            jax.nn.dot_product_attention(*args, **options)
        with tpu_v4_optimization_context(), pytest.raises(type(theirs.value)) as ours:
            nn.dot_product_attention(*args, **options)
        assert str(ours.value) == str(theirs.value)
        assert why_not(*args, **options) == "jax refuses it"
