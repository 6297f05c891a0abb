"""The loop between steps: where it goes on after a device was lost, and what it has told by then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train.tiny_runs import packed_batches, tiny_model

from capibara.checkpoints.store import Checkpoints
from capibara.memory import autopsy_of
from capibara.models.preset import OptimizerSettings, TrainSettings
from capibara.parallel import run as layouts_run
from capibara.train import recovery
from capibara.train.config import LoraSettings
from capibara.train.data.wrapped import wrap_dataset
from capibara.train.logs import MetricsLog, read_metrics
from capibara.train.loop import AUTOPSY, Loop, LoopOptions
from capibara.train.lora import LoraTrainable
from capibara.train.trainable import LossTrainable

STEPS = 6


def _loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def _batches() -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [{"x": draw.normal(size=(4, 8)).astype(np.float32), "y": np.zeros((4, 4), np.float32)} for _ in range(STEPS)]


def _loop(loss: Any = _loss, devices: int = 2, settings: dict[str, Any] | None = None, **more: Any) -> Loop:
    defaults = {"steps": STEPS, "batch_size": 4, "precision": "float32", "remat": "none", "accumulate": 1}
    return Loop(
        LossTrainable(loss, {"w": np.ones((8, 4), np.float32)}),
        TrainSettings(**{**defaults, **(settings or {})}),
        OptimizerSettings(warmup_steps=0),
        LoopOptions(axes={"data": devices}, devices=jax.devices()[:devices]),
        **more,
    )


def _run(folder: Path) -> tuple[Loop, list[float]]:
    batches, loop = _batches(), _loop()
    loop.prepare(batches[0])
    with MetricsLog(folder) as log:
        result = loop.run(wrap_dataset(batches, tokens=False), until=STEPS, log=log)
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in result.history] == list(range(1, STEPS + 1))
    return loop, [row["loss"] for row in rows]


def test_a_loss_is_traced_once_for_its_shapes_and_once_for_the_step() -> None:
    """The job that is planned and the one that runs look at the same shapes."""
    traced: list[Any] = []

    def loss(params: Any, batch: Any) -> jax.Array:
        traced.append(params)
        return _loss(params, batch)

    _loop(loss, devices=1).prepare(_batches()[0])
    assert len(traced) == 2


@pytest.mark.parametrize("donated", [False, True])
def test_a_lost_device_costs_no_step_and_each_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, donated: bool
) -> None:
    """Whether the step had taken the state over when the device was lost, or had not begun."""
    _, alone = _run(tmp_path / "alone")
    run_step, calls = Loop._one_step, iter(range(100))

    def failing(self: Loop, batch: Any, after: int) -> Any:
        fails = next(calls) == 3
        if fails and donated:
            run_step(self, batch, after)
            self.step -= 1
            jax.tree.map(lambda x: x.delete(), self.params)
        if fails:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: lost device 1")
        return run_step(self, batch, after)

    monkeypatch.setattr(Loop, "_one_step", failing)
    monkeypatch.setattr(recovery, "choose_devices", lambda in_use, **_: list(in_use)[:1])
    manager = recovery.TpuRecoveryManager(backoff_seconds=0, checkpoint_frequency=2)
    with manager.recovery_context():
        loop, losses = _run(tmp_path / "lost")
    assert len(manager.errors) == 1
    assert len(loop.devices) == 1
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_a_device_lost_in_the_first_step_costs_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is drawn before the first step, and is still the one after step 0."""
    _, alone = _run(tmp_path / "alone")
    run_step, calls = Loop._one_step, iter(range(100))

    def failing(self: Loop, batch: Any, after: int) -> Any:
        if next(calls) == 0:
            jax.tree.map(lambda x: x.delete(), self.params)
            raise jax.errors.JaxRuntimeError("DATA_LOSS: lost device 1")
        return run_step(self, batch, after)

    monkeypatch.setattr(Loop, "_one_step", failing)
    monkeypatch.setattr(recovery, "choose_devices", lambda in_use, **_: list(in_use)[:1])
    with recovery.TpuRecoveryManager(backoff_seconds=0).recovery_context():
        _, losses = _run(tmp_path / "lost")
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_weights_that_are_frozen_are_read_again_where_a_device_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody keeps a copy of them: what lay on the lost device is gone."""
    model = tiny_model(tmp_path)
    weights = jax.tree.map(np.asarray, model.params)
    model._params = None
    meshes: list[Any] = []

    def load(mesh: Any) -> Any:
        meshes.append(mesh)
        return jax.tree.map(jnp.asarray, weights)

    batches = packed_batches(4, 4)
    loop = Loop(
        LoraTrainable(model, LoraSettings(rank=2), "float32", load=load),
        TrainSettings(steps=4, batch_size=4, precision="float32", remat="none", accumulate=1),
        OptimizerSettings(warmup_steps=0),
        LoopOptions(axes={"data": 2}, devices=jax.devices()[:2]),
    )
    run_step, calls = Loop._one_step, iter(range(100))

    def failing(self: Loop, batch: Any, after: int) -> Any:
        if next(calls) == 2:
            jax.tree.map(lambda x: x.delete(), self.state["frozen"])
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: lost device 1")
        return run_step(self, batch, after)

    monkeypatch.setattr(Loop, "_one_step", failing)
    monkeypatch.setattr(recovery, "choose_devices", lambda in_use, **_: list(in_use)[:1])
    manager = recovery.TpuRecoveryManager(backoff_seconds=0, checkpoint_frequency=1)
    with manager.recovery_context(), MetricsLog(None) as log:
        loop.prepare(batches[0])
        result = loop.run(wrap_dataset(batches), until=4, log=log)
    assert [row["step"] for row in result.history] == [1, 2, 3, 4]
    assert [mesh.size for mesh in meshes] == [2, 1]
    frozen = jax.tree.leaves(loop.state["frozen"])
    assert {len(leaf.sharding.device_set) for leaf in frozen} == {1}
    assert all(np.isfinite(row["loss"]) for row in result.history)


def test_history_has_numbers_and_the_file_has_all() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return _loss(params, batch), {"share": jnp.ones((2, 3)), "error": jnp.float32(2)}

    rows: list[Any] = []
    loop = _loop(loss, devices=1)
    loop.prepare(_batches()[0])
    with MetricsLog(None) as log:
        batches = wrap_dataset(_batches(), tokens=False)
        result = loop.run(batches, until=2, log=log, on_step=lambda step, row: rows.append(row))
    assert rows[0]["share"] == [[1.0] * 3] * 2
    assert result.history[0]["error"] == 2
    assert "share" not in result.history[0]


def test_emergency_copies_come_when_they_are_due_and_their_alerts_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "a_file"
    full.write_text("")
    copies, told = [], []
    real = Checkpoints.emergency_copy
    monkeypatch.setattr(
        Checkpoints, "emergency_copy", lambda self, step, *args: (copies.append(step), real(self, step, *args))[1]
    )
    with Checkpoints(tmp_path / "kept", emergency_folder=full / "below", emergency_every=2) as checkpoints:
        settings = {"eval_every": 3, "checkpoint_every": 0}
        loop = _loop(devices=1, settings=settings, checkpoints=checkpoints, tell=told.append)
        loop.prepare(_batches()[0])
        with MetricsLog(None) as log:
            loop.run(wrap_dataset(_batches(), tokens=False), until=5, log=log)
    assert copies == [2, 4]
    assert any("the emergency copy of step 2 could not be written" in text for text in told)


def test_an_evaluation_that_fails_at_the_end_costs_no_step(tmp_path: Path) -> None:
    def evaluation() -> Any:
        raise OSError("the held-out file is gone")

    with Checkpoints(tmp_path) as checkpoints:
        loop = _loop(devices=1, settings={"checkpoint_every": 0}, checkpoints=checkpoints)
        loop.prepare(_batches()[0])
        with MetricsLog(None) as log, pytest.raises(OSError, match="held-out"):
            loop.run(wrap_dataset(_batches(), tokens=False), until=3, log=log, evaluation=evaluation)
        assert checkpoints.latest() == 3


@pytest.mark.parametrize("where", ["compile", "step"])
def test_out_of_memory_leaves_an_autopsy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fails(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.")

    if where == "compile":
        monkeypatch.setattr(layouts_run, "lower_program", fails)
    else:
        monkeypatch.setattr(Loop, "_one_step", fails)
    # All of the process's buffers: beside what other tests left, the loop's own are not among the largest.
    monkeypatch.setattr("capibara.memory.autopsy._LISTED", 1_000_000)
    batches, loop = _batches(), _loop(folder=tmp_path)

    def runs() -> None:
        with loop.autopsy(), MetricsLog(tmp_path) as log:
            loop.prepare(batches[0])
            loop.run(wrap_dataset(batches, tokens=False), until=STEPS, log=log)

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        runs()
    found = autopsy_of(caught.value)
    assert found is not None
    assert found.asked_bytes == 4096
    assert found.prediction is not None
    assert found.prediction.on == "2 simulated devices"
    assert found.prediction.arguments >= 3 * 8 * 4 * 4  # the weights and two moments of each
    assert any("float32[8,4]" in name for name, _ in found.prediction.largest)
    if where == "step":
        assert any("float32[8,4]" in row.arrays for row in found.buffers)
    written = json.loads((tmp_path / AUTOPSY).read_text(encoding="utf-8"))
    assert written["error"] == found.error
    assert "predicted for" in caught.value.__notes__[0]
