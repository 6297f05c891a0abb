"""route and the losses beside it: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import (
    Routing,
    expert_counts,
    explain,
    interpret,
    load_balancing_loss,
    route,
    target,
    update_bias,
    z_loss,
)
from capibara.kernels.ops.layers import ROUTE
from capibara.kernels.ops.layers.router.hopper.forward import RowsConfig
from capibara.kernels.ops.layers.router.tpu.forward import LanesConfig

EVERYWHERE = ("xla", "pallas_tpu", "reference")


def _normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def _naive(
    logits: Any, bias: Any, top_k: int, gate: str, normalize: bool, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64, with a stable sort."""
    weights, indices = [], []
    for row in np.asarray(logits, np.float64):
        soft = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        score = {"softmax": soft, "sigmoid": 1 / (1 + np.exp(-row)), "softmax_topk": row}[gate]
        choice = row if bias is None else score + np.asarray(bias, np.float64)
        best = np.argsort(-choice, kind="stable")[:top_k]
        weight = (np.exp(row) if gate == "softmax_topk" else score)[best]
        if normalize:
            weight = weight / weight.sum()
        weights.append(scale * weight)
        indices.append(best)
    return np.array(weights), np.array(indices)


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("gate", "normalize"), [("softmax", True), ("softmax", False), ("sigmoid", True), ("sigmoid", False),
                            ("softmax_topk", True)],
)  # fmt: skip
def test_against_numpy(gate: str, normalize: bool, biased: bool) -> None:
    logits = _normal(9, 12)
    bias = 0.5 * _normal(12, seed=1) if biased else None
    wanted, chosen = _naive(logits, bias, 3, gate, normalize, 2.0)
    for name in EVERYWHERE:
        with interpret("hlo"):
            made = route(logits, top_k=3, gate=gate, bias=bias, normalize=normalize, scale=2.0, implementation=name)
        np.testing.assert_array_equal(made.indices, chosen)
        # Float32: an exponential of numbers up to 3 or so, a sum of 12, a quotient.
        np.testing.assert_allclose(made.weights, wanted, rtol=2e-6)
        assert made.counts is None


@pytest.mark.parametrize("name", EVERYWHERE)
def test_ties_masked_experts_and_nan(name: str) -> None:
    low, bad = -np.inf, np.nan
    logits = jnp.array([[1, 3, 3, 3], [low, 2, low, low], [0, bad, 1, 2], [low, low, low, low]], jnp.float32)
    with interpret("hlo"):
        soft = route(logits, top_k=3, implementation=name)
        sigmoid = route(logits, top_k=3, gate="sigmoid", implementation=name)
    # Ties, -inf among them, go to the lowest expert, and none comes twice; a NaN comes last.
    np.testing.assert_array_equal(soft.indices, [[1, 2, 3], [1, 0, 2], [3, 2, 0], [0, 1, 2]])
    np.testing.assert_array_equal(sigmoid.indices, soft.indices)
    np.testing.assert_allclose(soft.weights[:2], [[1 / 3, 1 / 3, 1 / 3], [1, 0, 0]], rtol=1e-6)
    assert np.isnan(soft.weights[2:]).all()
    np.testing.assert_allclose(sigmoid.weights[1], [1, 0, 0], rtol=1e-6)
    assert np.isnan(sigmoid.weights[2]).all()
    np.testing.assert_array_equal(sigmoid.weights[3], [0, 0, 0])


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_lowest_finite_number_is_a_score(name: str) -> None:
    low, least = -np.inf, float(np.finfo(np.float32).min)
    logits = jnp.array([[low, least, least, 0], [least] * 4, [low, low, least, low]], jnp.float32)
    with interpret("hlo"):
        made = route(logits, top_k=2, implementation=name)
    np.testing.assert_array_equal(made.indices, [[3, 1], [0, 1], [2, 0]])
    np.testing.assert_allclose(made.weights, [[1, 0], [0.5, 0.5], [1, 0]], rtol=1e-6)


def test_losses_of_no_tokens_are_zero() -> None:
    nothing = jnp.zeros((0, 4))
    for gate in ("softmax", "sigmoid"):
        assert float(load_balancing_loss(nothing, jnp.zeros(4, jnp.int32), gate=gate)) == 0
    assert float(z_loss(nothing)) == 0


def test_the_bias_is_for_the_choice_alone() -> None:
    logits = jnp.array([[0.0, 1.0, 2.0]])
    plain, pushed = (
        route(logits, top_k=1, gate="sigmoid", normalize=False, bias=b) for b in (None, jnp.array([9.0, 0, 0]))
    )
    assert plain.indices.tolist() == [[2]]
    assert pushed.indices.tolist() == [[0]]
    np.testing.assert_allclose(pushed.weights, [[0.5]])
    slope = jax.jit(jax.grad(lambda b: route(logits, top_k=2, gate="sigmoid", bias=b).weights[0, 0]))(jnp.zeros(3))
    np.testing.assert_array_equal(slope, np.zeros(3))


def test_weights_are_float32_and_bfloat16_logits_are_not_rounded_again() -> None:
    logits = _normal(4, 6, dtype="bfloat16")
    made = route(logits, top_k=2)
    assert made.weights.dtype == jnp.float32
    assert made.indices.dtype == jnp.int32
    np.testing.assert_array_equal(made.weights, route(logits.astype("float32"), top_k=2).weights)


@pytest.mark.quick
@pytest.mark.parametrize("params", [{}, {"normalize": False}, {"gate": "sigmoid"}], ids=str)
def test_second_derivatives(params: dict[str, Any]) -> None:
    logits, direction = _normal(3, 7), _normal(3, 7, seed=1)

    def slope(name: str) -> Any:
        def loss(x: Any) -> Any:
            return (route(x, top_k=3, implementation=name, **params).weights ** 3).sum()

        return jax.jit(jax.grad(lambda x: (jax.grad(loss)(x) * direction).sum()))(logits)

    wanted = slope("reference")
    # Both in float32, some thirty roundings deep.
    np.testing.assert_allclose(slope("xla"), wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_the_backward_pass_keeps_only_the_choices_where_they_suffice() -> None:
    logits = _normal(8, 32)
    _, pull = jax.vjp(lambda x: route(x, top_k=2, implementation="xla").weights, logits)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(pull) if leaf.size) == [(8, 2), (8, 2)]
    text = jax.jit(jax.grad(lambda x: route(x, top_k=2, implementation="xla").weights[:, 0].sum())).lower(logits)
    assert "scatter" not in text.as_text()


def test_counts_and_losses_by_hand() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.7, 0.2, 0.1]]))
    routing = route(logits, top_k=1, return_counts=True)
    assert isinstance(routing, Routing)
    assert routing.counts is not None
    assert routing.counts.tolist() == [2, 0, 0]
    # All to expert 0, whose mean probability is 0.6: 3 · 1 · 0.6.
    np.testing.assert_allclose(load_balancing_loss(logits, routing.counts), 1.8, rtol=1e-6)
    np.testing.assert_allclose(z_loss(logits + 2.0), 4.0, rtol=1e-5)
    even = load_balancing_loss(jnp.zeros((4, 3)), jnp.array([1, 1, 2]), gate="sigmoid")
    np.testing.assert_allclose(even, 1.0, rtol=1e-6)
    assert float(load_balancing_loss(logits, routing.counts, gate="sigmoid")) != pytest.approx(1.8, rel=1e-2)
    assert expert_counts(jnp.array([[[0, 1]], [[1, 2]]]), 4).tolist() == [1, 2, 1, 0]
    # Moving probability away from the crowded expert lowers the loss.
    slope = jax.jit(jax.grad(load_balancing_loss))(logits, routing.counts)
    assert (slope[:, 0] > 0).all()
    assert (slope[:, 1:] < 0).all()


def test_the_bias_evens_out_the_experts() -> None:
    """Without any loss, a router that favours one expert ends up using all."""
    logits = _normal(512, 4) + jnp.array([1.5, 0, 0, 0])

    @jax.jit
    def counts(bias: jax.Array) -> Any:
        return route(logits, top_k=1, gate="sigmoid", bias=bias, return_counts=True).counts

    bias = jnp.zeros(4)
    assert int(counts(bias).max()) > 256
    for _ in range(60):
        bias = update_bias(bias, counts(bias), 0.02)
    # A step of 0.02 moves a few per cent of the tokens at most.
    assert int(jnp.abs(counts(bias) - 128).max()) < 32


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: route(x, top_k=9), "from 1 to the number of experts, 8"),
        (lambda x: route(x, top_k=0), "from 1 to the number of experts, 8"),
        (lambda x: route(x, top_k=True), "from 1 to the number of experts"),
        (lambda x: route(x, top_k=1.5), "from 1 to the number of experts"),
        (lambda x: route(x, top_k=2, gate="relu"), "Unknown gate"),
        (lambda x: route(x, top_k=2, bias=jnp.ones(7)), r"one number an expert, \(8,\)"),
        (lambda x: route(x, top_k=2, bias=jnp.ones(8, jnp.int32)), "bias of i32"),
        (lambda x: route(x.astype(jnp.int32), top_k=2), "logits of i32"),
        (lambda x: route(x, top_k=2, gate="softmax_topk", normalize=False), "sum to one by themselves"),
        (lambda x: route(x, top_k=2, normalize=1), "normalize is True or False"),
        (lambda x: route(x, top_k=2, scale=0.0), "The scale is a finite number above 0"),
        (lambda x: route(x[:, :0], top_k=1), "one number an expert"),
        (lambda x: route("logits", top_k=1), "route takes arrays"),
        (lambda x: load_balancing_loss(x, jnp.ones(4)), "counts are one number an expert"),
        (lambda x: load_balancing_loss(x, jnp.ones(8), gate="top"), "Unknown gate"),
        (lambda x: update_bias(x[0], jnp.ones(4), 0.1), "counts are one number an expert"),
        (lambda x: update_bias([0.0, 0.0], [1, 2, 3], 0.1), "counts are one number an expert"),
        (lambda x: update_bias("bias", [1, 2], 0.1), "update_bias takes arrays"),
        (lambda x: update_bias(jnp.zeros(2, jnp.int32), [1, 2], 0.1), "one float an expert"),
        (lambda x: LanesConfig(0), "tokens is 1 or more"),
        (lambda x: RowsConfig(12), "experts is 8, 16 or 32"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(jnp.ones((4, 8)))


def test_what_is_chosen_and_who_refuses() -> None:
    def shape(rows: int, experts: int) -> Any:
        return jax.ShapeDtypeStruct((rows, experts), "float32")

    assert explain(lambda x: route(x, top_k=2), shape(64, 8)).implementation == "xla"
    assert explain(lambda x: route(x, top_k=8), shape(64, 256)).implementation == "reference"  # measured on a CPU
    for platform, name in (("gpu", "hopper"), ("tpu", "pallas_tpu")):
        with target(platform):
            # The kernel for TPUs waits for its measurement.
            chosen = name if platform == "gpu" else "xla"
            assert explain(lambda x: route(x, top_k=4), shape(65536, 32)).implementation == chosen
            if platform == "gpu":  # too many passes for xla, whose sort takes eight times as long as the kernel
                assert explain(lambda x: route(x, top_k=8), shape(65536, 128)).implementation == name
            for rows, experts, top_k, words in (
                (64, 257, 2, "256 experts"),
                (64, 64, 17, "16"),
                (0, 8, 2, "no tokens"),
            ):
                reason = ROUTE.implementations[name].refusal(ROUTE.call(shape(rows, experts), top_k=top_k))
                assert words in str(reason)


def test_a_config_that_was_asked_for_is_used() -> None:
    with target("tpu"):
        made = explain(
            lambda x: route(x, top_k=2, implementation="pallas_tpu", config=LanesConfig(256)),
            jax.ShapeDtypeStruct((1024, 8), "float32"),
        )
    assert made.selections[0].config == LanesConfig(256)


def test_a_number_is_no_switch_even_after_a_call_that_is_equal_to_it() -> None:
    """True and 1 are one key of a dictionary: what is remembered of a call must tell them apart."""
    logits = jnp.ones((3, 5))
    route(logits, top_k=2, normalize=True)
    with pytest.raises(ValueError, match="normalize is True or False"):
        route(logits, top_k=2, normalize=1)
