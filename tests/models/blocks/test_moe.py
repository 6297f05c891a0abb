"""The mixture of experts against every expert for every token, in float64, weighted by what the router says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.blocks.single import BATCH, HIDDEN, LENGTH, Weights, drawn, inputs, model_with, run, sigmoid, softmax

from capibara.models.blocks import Moe, Sequences

EXPERTS, TOP, FFN = 6, 2, 8
KEYS: dict[str, Any] = {"experts": EXPERTS, "top_k": TOP, "ffn": FFN}


def _gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    inner = x @ gate
    return (inner * sigmoid(inner) * (x @ up)) @ down


def _router(block: Moe, w: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight for each expert, 0 for those that were not chosen; and whether it was."""
    logits = x @ w["router"]
    scores = {"softmax": softmax, "sigmoid": sigmoid, "softmax_topk": softmax}[block.gate](logits)
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, np.argsort(-logits, axis=-1)[..., : block.top_k], True, axis=-1)
    weights = np.where(chosen, scores, 0)
    if block.gate == "softmax_topk":
        weights = np.where(chosen, softmax(np.where(chosen, logits, -1e30)), 0)
    elif block.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, chosen


def _wanted(block: Moe, w: Weights, x: np.ndarray) -> np.ndarray:
    weights, _ = _router(block, w, x)
    y = sum(weights[..., e, None] * _gated(x, w["gate"][e], w["up"][e], w["down"][e]) for e in range(EXPERTS))
    if block.shared_ffn:
        shared = _gated(x, w["shared_gate"], w["shared_up"], w["shared_down"])
        y = y + (shared * sigmoid(x @ w["shared_gating"]) if block.shared_gate else shared)
    return np.asarray(y)


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 3},
    "gate": {"gate": "sigmoid"},
    "softmax_topk": {"gate": "softmax_topk"},
    "normalize": {"normalize": False},
    "shared_ffn": {"shared_ffn": 12},
    "shared_gate": {"shared_ffn": 12, "shared_gate": True},
}


@pytest.mark.quick
@pytest.mark.parametrize("changed", CHANGES)
def test_against_a_sum_over_all_experts(changed: str) -> None:
    model = model_with("moe", **{**KEYS, **CHANGES[changed]})
    block, w, x = model.blocks["moe"], drawn(model), inputs()
    y, loss, metrics = run(model, w, x)
    np.testing.assert_allclose(y, _wanted(block, w, x), atol=1e-5, rtol=1e-5)
    _, chosen = _router(block, w, x)
    share = chosen.reshape(-1, EXPERTS).sum(0) / (BATCH * LENGTH * block.top_k)
    np.testing.assert_allclose(metrics["expert_share"], share, rtol=1e-6)
    assert loss.shape == ()
    # A softmax over those chosen is one over all, divided by its sum over those chosen.
    if changed not in ("plain", "top_k", "softmax_topk"):
        plain = dataclasses.replace(block, gate="softmax", normalize=True, shared_ffn=0, shared_gate=False)
        assert np.abs(np.asarray(y) - _wanted(plain, w, x)).max() > 1e-3


def test_its_losses_are_the_two_of_the_router() -> None:
    def loss(**keys: Any) -> float:
        model = model_with("moe", **{**KEYS, **keys})
        return float(run(model, drawn(model), inputs())[1])

    model = model_with("moe", **KEYS)
    w, x = drawn(model), inputs()
    logits = (x @ w["router"]).reshape(-1, EXPERTS)
    _, chosen = _router(model.blocks["moe"], w, x)
    # Switch Transformers' loss: experts · Σ share of choices · mean probability.
    balance = EXPERTS * np.sum(chosen.reshape(-1, EXPERTS).mean(0) / TOP * softmax(logits).mean(0))
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    assert loss(balance_loss=1.0, z_loss=0.0) == pytest.approx(balance, rel=1e-5)
    assert loss(balance_loss=0.0, z_loss=1.0) == pytest.approx(z, rel=1e-5)
    assert loss() == pytest.approx(0.01 * balance + 0.001 * z, rel=1e-5)


def test_activation_is_of_all_experts() -> None:
    model = model_with("moe", **KEYS, shared_ffn=8, activation="reglu")
    w, x = drawn(model), inputs()
    weights, _ = _router(model.blocks["moe"], w, x)

    def gated(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return np.maximum(x @ gate, 0) * (x @ up) @ down

    y = sum(weights[..., e, None] * gated(w["gate"][e], w["up"][e], w["down"][e]) for e in range(EXPERTS))
    y = y + gated(w["shared_gate"], w["shared_up"], w["shared_down"])
    np.testing.assert_allclose(run(model, w, x)[0], y, atol=1e-5, rtol=1e-5)


def test_jitter_is_noise_while_training() -> None:
    model = model_with("moe", **KEYS, jitter=0.3)
    w, x = drawn(model), inputs()
    quiet = run(model, w, x)[0]
    noisy = [run(model, w, x, Sequences(key=jax.random.key(seed)))[0] for seed in (0, 0, 1)]
    np.testing.assert_allclose(quiet, _wanted(model.blocks["moe"], w, x), atol=1e-5, rtol=1e-5)
    assert jnp.array_equal(noisy[0], noisy[1])
    assert not jnp.allclose(noisy[0], noisy[2], atol=1e-3)
    assert not jnp.allclose(noisy[0], quiet, atol=1e-3)
    without = model_with("moe", **KEYS)
    assert jnp.array_equal(run(without, w, x, Sequences(key=jax.random.key(0)))[0], run(without, w, x)[0])


@pytest.mark.quick
def test_a_token_meets_its_own_experts_and_the_shared_ones() -> None:
    model = model_with("moe", **KEYS, shared_ffn=5, shared_gate=True)
    expert, shared = 3 * HIDDEN * FFN, 3 * HIDDEN * 5
    assert model.blocks["moe"].active_parameters(model) == HIDDEN * EXPERTS + TOP * expert + shared + HIDDEN
    everything = model.parameters - 2 * model.vocab * HIDDEN - 2 * HIDDEN
    assert everything == HIDDEN * EXPERTS + EXPERTS * expert + shared + HIDDEN
    tested = {"experts", "top_k", "ffn", "activation", "balance_loss", "z_loss", "jitter", *CHANGES}
    assert {field.name for field in dataclasses.fields(Moe)} == tested - {"plain", "softmax_topk"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"experts": 0}, "experts of a mixture of experts is 1 or more"),
        ({"top_k": 7}, "top_k is at most the number of experts. Got 7 of 6"),
        ({"activation": "gelu"}, "'geglu'"),
        ({"gate": "tanh"}, "Choices: 'softmax', 'sigmoid', 'softmax_topk'"),
        ({"shared_gate": True}, "shared_gate weights shared experts"),
        ({"shared_ffn": -1}, "shared_ffn"),
        ({"jitter": 1.5}, "jitter"),
        ({"balance_loss": -1.0}, "balance_loss"),
        ({"z_loss": -1.0}, "z_loss"),
    ],
)
def test_bad_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model_with("moe", **{**KEYS, **keys})
