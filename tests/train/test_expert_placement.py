"""Experts placed anew: the model computes the same, and the busiest device has less to do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.models import ModularModelConfig, decoder
from capibara.parallel.optimizers import make_optimizer
from capibara.train.expert_placement import busiest, moe_slots, new_orders, reordered
from capibara.train.logs import read_metrics

MODEL = ModularModelConfig(
    hidden=16,
    layers=4,
    vocab=32,
    pattern="attention+mlp : attention+moe",
    blocks={"attention": {"heads": 2}, "mlp": {"ffn": 16}, "moe": {"experts": 8, "top_k": 2, "ffn": 8}},
)


@pytest.mark.quick
def test_the_model_is_the_same_with_its_experts_elsewhere() -> None:
    params = decoder.init(MODEL, jax.random.key(0))
    optimizer = make_optimizer("adamw", 1e-2)
    ids = np.random.default_rng(0).integers(0, 32, (4, 17))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}

    @jax.jit
    def step(params, state):
        (_, metrics), gradients = jax.value_and_grad(
            lambda p: decoder.loss(MODEL, p, batch, dtype=jnp.float32), has_aux=True
        )(params)
        changes, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, changes), state, metrics

    params, state, metrics = step(params, jax.jit(optimizer.init)(params))
    share = np.asarray(metrics["expert_share"])
    assert share.shape == (2, 8)
    orders = new_orders(share, devices=4)
    assert sorted(orders[0].tolist()) == list(range(8))
    assert (orders != np.arange(8)).any()
    slots = moe_slots(MODEL)
    moved, moved_state = (reordered(tree, slots, orders) for tree in (params, state))
    # What is not a mixture's, and its sum over experts, is as it was.
    assert moved["embed"] is params["embed"]
    assert jnp.array_equal(moved["layers"][0]["mlp"]["up"], params["layers"][0]["mlp"]["up"])

    after, _, more = step(params, state)
    elsewhere, _, other = step(moved, moved_state)
    # The order of sums over experts changes, and the next step's parameters with it: a few float32 roundings.
    assert float(other["loss"]) == pytest.approx(float(more["loss"]), rel=1e-6)
    back = reordered(elsewhere, slots, np.argsort(orders, axis=1))
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(after), strict=True):
        assert jnp.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(more["expert_share"]), orders, axis=1), other["expert_share"], atol=1e-6
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_what_an_optimizer_keeps_of_experts_goes_with_them(name: str) -> None:
    """Adafactor keeps means over rows and over columns of a matrix of 128 and more."""
    model = dataclasses.replace(
        MODEL, hidden=128, blocks={**MODEL.blocks, "moe": {"experts": 8, "top_k": 2, "ffn": 128}}
    )
    params = decoder.init(model, jax.random.key(0))
    slots, orders = moe_slots(model), np.stack([np.roll(np.arange(8), 3), np.arange(8)[::-1]])
    optimizer = make_optimizer(name, 1e-2)

    @jax.jit
    def state_after(params):
        return optimizer.update(params, optimizer.init(params), params)[1]  # any gradients do

    moved = reordered(state_after(params), slots, orders)
    wanted = state_after(reordered(params, slots, orders))
    assert jax.tree.structure(moved) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(moved), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.quick
def test_the_busiest_device_has_less_to_do() -> None:
    share = np.array([[0.3, 0.3, 0.2, 0.05, 0.05, 0.05, 0.03, 0.02]])
    orders = new_orders(share, devices=4)
    assert busiest(share, 4) == pytest.approx(2.4)
    # The two busiest experts no longer share a device; 0.3 + 0.02 is what is left.
    assert busiest(np.take_along_axis(share, orders, axis=1), 4) < 1.4


def test_a_run_places_its_experts_anew_and_goes_on_as_before(tmp_path: Path) -> None:
    """On 8 devices, 4 for the experts: the losses are those of a run that leaves its experts where they are."""
    told = {}
    for name, threshold in (("anew", 1.0), ("left", 100.0)):
        command = [
            sys.executable, "-m", "capibara", "train", "moe", "--devices", "8", "--out", str(tmp_path / name),
            *(f"--set={text}" for text in (
                "model.hidden=32", "model.layers=2", "model.vocab=259", "model.blocks.attention.heads=4",
                "model.blocks.attention.kv_heads=2", "model.blocks.moe.ffn=16", "model.blocks.moe.shared_ffn=0",
                "model.blocks.moe.experts=8", "train.steps=6", "train.batch_size=8", "train.sequence_length=32",
                "train.precision=float32", "train.checkpoint_every=3", "train.remat=none", "train.accumulate=1",
                "mesh.data=2", "mesh.expert=4", f"scaling.load_threshold={threshold}", "train.eval_batches=1",
            )),
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        told[name] = run.stderr
    assert "experts were placed anew" in told["anew"]
    assert "experts were placed anew" not in told["left"]
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in told
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
