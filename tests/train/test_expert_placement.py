"""Experts placed anew: the model computes the same, and the busiest device has less to do."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train.tiny_runs import MOE, packed_batches, tiny_model

from capibara.checkpoints.store import Checkpoints
from capibara.models import ModularModelConfig, decoder
from capibara.models.preset import OptimizerSettings, TrainSettings
from capibara.parallel.optimizers import make_optimizer
from capibara.train.compiled_step import CompiledStep, StepMaker
from capibara.train.config import load_run
from capibara.train.data.wrapped import wrap_dataset
from capibara.train.expert_placement import busiest, moe_slots, new_orders, reordered
from capibara.train.logs import MetricsLog, read_metrics
from capibara.train.loop import Loop, LoopOptions, Preempted
from capibara.train.run import train
from capibara.train.trainable import ModelTrainable

MODEL = ModularModelConfig(
    hidden=16,
    layers=4,
    vocab=32,
    pattern="attention+mlp : attention+moe",
    blocks={"attention": {"heads": 2}, "mlp": {"ffn": 16}, "moe": {"experts": 8, "top_k": 2, "ffn": 8}},
)


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


@pytest.mark.parametrize("name", ["adafactor", "muon", "lion"])
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


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs of a test have the first one's program: when experts are placed is no part of it."""
    steps: list[CompiledStep] = []
    compile_step = StepMaker.compile

    def first(self: StepMaker, *args: Any) -> CompiledStep:
        if not steps:
            steps.append(compile_step(self, *args))
        return steps[0]

    monkeypatch.setattr(StepMaker, "compile", first)


@pytest.mark.usefixtures("compiled_once")
def test_a_run_places_its_experts_anew_and_goes_on_as_before(tmp_path: Path) -> None:
    """On 8 devices, 4 for the experts: the losses are those of a run that leaves its experts where they are."""
    told: dict[str, list[str]] = {}
    for name, threshold in (("anew", 1.0), ("left", 100.0)):
        config = load_run("moe", [
            "model.hidden=32", "model.layers=2", "model.vocab=259", "model.blocks.attention.heads=4",
            "model.blocks.attention.kv_heads=2", "model.blocks.moe.ffn=16", "model.blocks.moe.shared_ffn=0",
            "model.blocks.moe.experts=8", "model.max_length=32", "train.steps=6", "train.batch_size=8",
            "train.sequence_length=32", "train.precision=float32", "train.checkpoint_every=3", "train.remat=none",
            "train.accumulate=1", "train.eval_batches=1", "mesh.data=2", "mesh.expert=4",
            f"scaling.load_threshold={threshold}",
        ])  # fmt: skip
        told[name] = []
        train(config, tmp_path / name, devices=jax.devices()[:8], tell=told[name].append)
    assert any("experts were placed anew" in text for text in told["anew"])
    assert not any("experts were placed anew" in text for text in told["left"])
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in told
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


class _StopAt:
    """A request to stop that comes at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def should_stop(self, step: int) -> bool:
        return step == self.step


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_when_experts_are_placed_hangs_on_the_step_alone(tmp_path: Path) -> None:
    """Stopped at a step between two checkpoints, or killed there with an emergency copy of an earlier one, and started
    again: bit for bit the run that was left alone."""
    batches, told = packed_batches(8, 8), []

    def run(name: str, stop: int = 0, until: int = 8) -> tuple[Any, list[dict[str, Any]]]:
        killed = name == "killed"
        emergency = {"emergency_folder": tmp_path / f"{name}_local", "emergency_every": 1} if killed else {}
        with Checkpoints(tmp_path / name, **emergency) as checkpoints:
            loop = Loop(
                ModelTrainable(tiny_model(tmp_path, MOE), "float32"),
                TrainSettings(
                    steps=8, batch_size=8, precision="float32", remat="none", accumulate=1, checkpoint_every=4
                ),
                OptimizerSettings(learning_rate=0.1, warmup_steps=0),
                LoopOptions(axes={"data": 2, "expert": 4}, devices=jax.devices()[:8], load_threshold=1.0),
                checkpoints=checkpoints,
                tell=told.append,
            )
            kept = loop.prepare(batches[0])
            data = wrap_dataset(batches)
            if kept is not None:
                data.restore(kept["data"])
            if stop and killed:
                loop.save = lambda *args, **kwargs: None  # type: ignore[method-assign]  # it dies before that
            with contextlib.suppress(Preempted), MetricsLog(tmp_path / f"{name}_log", loop.step) as log:
                loop.run(data, until=until, log=log, preemption=_StopAt(stop) if stop else None)  # type: ignore[arg-type]
        return loop, read_metrics(tmp_path / f"{name}_log" / "metrics.jsonl")

    alone, rows = run("alone")
    placed = [text.split(":")[0] for text in told if "placed anew" in text]
    assert placed[0] == "step 4", "a checkpoint's step, by the four steps before it"
    names = ("step", "loss", "expert_load_max", "expert_share")
    for end, first in (("stopped", {"stop": 6}), ("killed", {"stop": 7, "until": 6})):
        told.clear()
        run(end, **first)
        after, again = run(end)
        assert [text.split(":")[0] for text in told if "placed anew" in text] == placed
        assert any("restored step 6" in text for text in told)
        for mine, its in zip(jax.tree.leaves(after.params), jax.tree.leaves(alone.params), strict=True):
            assert np.array_equal(mine, its)
        mine, its = ([[row.get(name) for name in names] for row in log] for log in (again, rows))
        assert mine == its
    # A step's line has one number of the experts; all of them are in a checkpoint's.
    assert all(1 <= row["expert_load_max"] <= 8 for row in rows if "loss" in row)
    whole = {row["step"]: np.array(row["expert_share"]) for row in rows if "expert_share" in row}
    assert sorted(whole) == [4, 8]
    assert whole[4].shape == (2, 8)
    np.testing.assert_allclose(whole[4].sum(axis=1), 1, rtol=1e-6)
    assert not any("expert_share" in row and "loss" in row for row in rows)
