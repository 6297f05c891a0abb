"""The mixture of experts against every expert for every token, in float64, weighted by what the router says."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tests.models.blocks.single import BATCH, HIDDEN, LENGTH, Weights, drawn, inputs, model_with, run, sigmoid, softmax

from capibara.mesh import MeshConfig, partition_spec
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


SPLIT = model_with("moe", experts=8, top_k=2, ffn=16)


@functools.cache
def _alone() -> Any:
    """A function's gradients, its arguments and its results on one device: 128 tokens, 256 choices."""
    block = SPLIT.blocks["moe"]
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(value, jnp.float32) for name, value in drawn(SPLIT).items()}
    x, flow = (jnp.asarray(rng.standard_normal((8, 16, HIDDEN)), jnp.float32) for _ in range(2))

    def loss(params: Any, x: jax.Array) -> Any:
        out = block(SPLIT, params, x, Sequences())
        return (out.value * flow).sum() + out.loss, (out.value, out.metrics)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return run, params, x, jax.jit(run)(params, x)


@pytest.mark.parametrize(
    ("axes", "sorted_here"),
    [
        # Choices of a device; with experts over an axis those that arrive as well, room for all that may come.
        ({"data": 4, "model": 2}, {64}),
        ({"data": 2, "sequence": 2, "model": 2}, {64}),
        ({"data": 2, "expert": 2, "model": 2}, {64, 2 * 64}),
        ({"data": 1, "expert": 3}, {256}),  # 8 experts do not divide
    ],
)
def test_on_a_mesh_each_device_sorts_its_own_tokens(axes: dict[str, int], sorted_here: set[int]) -> None:
    run, params, x, alone = _alone()
    mesh = MeshConfig(tuple(axes.values()), tuple(axes)).build(jax.devices()[: math.prod(axes.values())])
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, partition_spec(("batch", "sequence"), mesh.shape)))
        compiled = jax.jit(run).lower(params, split).compile()
        got, text = compiled(params, split), compiled.as_text()
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5 * max(1.0, float(jnp.abs(right).max())))
    assert {int(n) for n in re.findall(r"= s32\[(\d+)\]\S* sort\(", text)} == sorted_here
    assert "all-gather" not in text, "neither tokens nor logits are gathered"
    assert ("all-to-all" in text) == (axes.get("expert") == 2)
    # Of the experts' 16 hidden columns each of two devices has 8, and of the experts those that are its own.
    here = 1 if axes.get("expert") == 3 else axes.get("expert", 1)
    of_up = got[1][0]["up"].addressable_shards[0].data.shape
    assert of_up == (8 // here, HIDDEN, 16 // axes.get("model", 1))
