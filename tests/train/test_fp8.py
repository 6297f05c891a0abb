"""Training in fp8: the loss beside bfloat16's, what "delayed" keeps from step to step, meshes, and what is refused."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import target
from capibara.mesh import training_mesh_config
from capibara.models import ModularModelConfig, decoder
from capibara.models.modular import ModularCapibaraModel
from capibara.models.preset import OptimizerSettings, TrainSettings, load_preset
from capibara.parallel.optimizers import make_optimizer
from capibara.parallel.remat import checkpoint_scans
from capibara.parallel.trainer_step import (
    FP8_HISTORY,
    StepOptions,
    WithHistory,
    initial_state,
    step_function,
    trainer_job,
)
from capibara.precision import Fp8Settings
from capibara.train.compiled_step import CompiledStep, StepMaker
from capibara.train.trainable import as_trainable
from capibara.train.trainer import TpuDistributedTrainer

VOCAB, LENGTH = 32, 24
BLOCKS = {"attention": {"heads": 2, "kv_heads": 1}, "mlp": {"ffn": 64}}
MODEL = ModularModelConfig(hidden=32, layers=2, vocab=VOCAB, blocks=BLOCKS, max_length=64)
DELAYED = Fp8Settings(scaling="delayed", history=3)
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, warmup_steps=0, schedule="constant")


def batches(count: int, rows: int = 8) -> list[dict[str, np.ndarray]]:
    """A token decides the next one, but for one in eight."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        ids = np.empty((rows, LENGTH + 1), np.int32)
        ids[:, 0] = draw.integers(0, VOCAB, rows)
        for place in range(LENGTH):
            other = draw.integers(0, VOCAB, rows)
            ids[:, place + 1] = np.where(draw.random(rows) < 1 / 8, other, (5 * ids[:, place] + 3) % VOCAB)
        made.append({"inputs": ids[:, :-1], "targets": ids[:, 1:]})
    return made


def loss_in(fp8: Fp8Settings | None) -> Any:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        params, history = params if isinstance(params, WithHistory) else (params, None)
        return decoder.loss(MODEL, params, batch, fp8=fp8, fp8_history=history)

    return loss


@functools.cache  # a program is compiled once for all that it shows
def step_in(fp8: Fp8Settings | None, accumulate: int = 1, remat: str = "none") -> tuple[Any, Any, Any]:
    """(the step, parameters, state) to start from."""
    optimizer = make_optimizer("adamw", 1e-2)
    options = StepOptions("mixed" if fp8 is None else "fp8")
    params = decoder.init(MODEL, jax.random.key(0))
    history = None if fp8 is None else decoder.fp8_history_shapes(MODEL, fp8)
    state = initial_state(optimizer, params, options, fp8_history=history)
    return jax.jit(step_function(checkpoint_scans(loss_in(fp8), remat), optimizer, options, accumulate)), params, state


@functools.cache  # bfloat16's stand beside all of them
def losses(fp8: Fp8Settings | None, steps: int = 80) -> np.ndarray:
    step, params, state = step_in(fp8)
    found = []
    for batch in batches(steps):
        params, state, metrics = step(params, state, batch)
        found.append(metrics["loss"])
    return np.asarray([float(x) for x in found])


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "fp8", [Fp8Settings(), DELAYED, Fp8Settings(scales="block")], ids=["current", "delayed", "block"]
)
def test_the_loss_stays_beside_that_of_bfloat16(fp8: Fp8Settings) -> None:
    plain, narrow = losses(None), losses(fp8)
    assert plain[-10:].mean() < 0.6 * plain[0]
    assert abs(narrow[-10:].mean() / plain[-10:].mean() - 1) < 0.02
    assert (narrow != plain).any()


# What "delayed" keeps.


def test_a_history_has_the_magnitudes_of_the_last_steps_and_a_skipped_step_leaves_it() -> None:
    step, params, state = step_in(DELAYED)
    shapes = jax.tree.map(lambda h: h.shape, state[FP8_HISTORY], is_leaf=lambda h: hasattr(h, "shape"))
    assert shapes == [
        {
            "attention": {"query+key+value": (2, 4, 3), "out": (2, 2, 3)},
            "mlp": {"gate+up": (2, 3, 3), "down": (2, 2, 3)},
        }
    ]
    first, second = batches(2)
    params, state, _ = step(params, state, first)
    once = jax.tree.map(np.asarray, state[FP8_HISTORY])
    params, state, _ = step(params, state, second)
    twice = jax.tree.map(np.asarray, state[FP8_HISTORY])
    for before, after in zip(*map(jax.tree.leaves, (once, twice)), strict=True):
        assert (before[..., 0] > 0).all()
        assert not before[..., 1:].any()
        np.testing.assert_array_equal(after[..., 1], before[..., 0])
    broken = jax.tree.map(lambda p: p.at[0].set(jnp.nan), params)
    _, skipped, metrics = step(broken, state, second)
    assert not np.isfinite(metrics["loss"])
    for kept, now in zip(*map(jax.tree.leaves, (twice, skipped[FP8_HISTORY])), strict=True):
        np.testing.assert_array_equal(kept, now)


def test_the_history_of_microbatches_is_of_the_largest_and_of_recomputed_layers_the_same() -> None:
    (batch,) = batches(1)
    whole = {}
    for name, options in {"plain": {}, "parts": {"accumulate": 2}, "again": {"remat": "full"}}.items():
        step, params, state = step_in(DELAYED, **options)  # type: ignore[arg-type]
        _, state, metrics = step(params, state, batch)
        whole[name] = jax.tree.map(np.asarray, (state[FP8_HISTORY], metrics["loss"]))
    for one, other in zip(*(jax.tree.leaves(whole[name]) for name in ("plain", "again")), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-7)
    # What enters is the same in parts and in all, row by row; a gradient is of a mean over half as many rows.
    for one, other in zip(*(jax.tree.leaves(whole[name][0]) for name in ("plain", "parts")), strict=True):
        np.testing.assert_allclose(one[:, 0], other[:, 0], rtol=2**-6)
        np.testing.assert_allclose(2 * one[:, 1:], other[:, 1:], rtol=0.25)


_compile = StepMaker.compile


@pytest.fixture(scope="module")
def compiled() -> dict[Any, CompiledStep]:
    return {}


@pytest.fixture
def compiled_once(compiled: dict[Any, CompiledStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one setting on one mesh have one program: the batches of all tests below have one shape."""

    def once(self: StepMaker, batch: Any, options: Any, devices: Any) -> CompiledStep:
        key = self.trainable.fp8, tuple(options.axes.items()), tuple(devices)  # type: ignore[attr-defined]
        if key not in compiled:
            compiled[key] = _compile(self, batch, options, devices)
        return compiled[key]

    monkeypatch.setattr(StepMaker, "compile", once)


def trained(data: Any, **flags: Any) -> TpuDistributedTrainer:
    model = ModularCapibaraModel(MODEL, precision="fp8", fp8=flags.pop("fp8", DELAYED))
    trainer = TpuDistributedTrainer(
        model, flags.pop("mesh", training_mesh_config(1, 1, 1)), optimizer=OPTIMIZER, **flags
    )
    trainer.result = trainer.train(data)  # type: ignore[attr-defined]
    return trainer


@pytest.mark.usefixtures("compiled_once")
def test_a_run_that_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    data = batches(4)
    settings = TrainSettings(checkpoint_every=1)
    whole = trained(data)
    trained(data[:2], settings=settings, checkpoint_folder=tmp_path)
    told: list[str] = []
    again = trained(data, settings=settings, checkpoint_folder=tmp_path, tell=told.append)
    assert any("restored step 2" in line for line in told)
    assert not any("begins anew" in line for line in told)
    for one, other in zip(
        *(jax.tree.leaves((run.params, run.state[FP8_HISTORY])) for run in (whole, again)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    # A history of another length begins anew, and that is told.
    trained(
        data, fp8=Fp8Settings("delayed", history=5), settings=settings, checkpoint_folder=tmp_path, tell=told.append
    )
    assert any("begins anew: the checkpoint has no history of this length" in line for line in told)


# Meshes.


@functools.cache
def on_one_device(fp8: Fp8Settings) -> tuple[Any, Any]:
    run = trained(batches(2), fp8=fp8)
    return run.result, run.state  # type: ignore[attr-defined]


@pytest.mark.spread(1)
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    ("fp8", "shape"),
    [(Fp8Settings(), (8, 4, 2)), (DELAYED, (8, 4, 2)), (DELAYED, (8, 8, 1))],
    ids=["current, data 4, model 2", "delayed, data 4, model 2", "delayed, data 8"],
)
def test_on_a_mesh_it_is_the_same_loss(fp8: Fp8Settings, shape: tuple[int, int, int]) -> None:
    result, state = on_one_device(fp8)
    run = trained(batches(2), fp8=fp8, mesh=training_mesh_config(*shape))
    for a, b in zip(result.history, run.result.history, strict=True):  # type: ignore[attr-defined]
        # Sums of bfloat16 in another order, and what falls to another fp8 number for it: a hundredth of their steps.
        assert abs(a["loss"] / b["loss"] - 1) < 5e-3
    for a, b in zip(*map(jax.tree.leaves, (state.get(FP8_HISTORY), run.state.get(FP8_HISTORY))), strict=True):
        # A largest magnitude is one number's: two steps of fp8. Gradients summed by hand are of each device's own mean,
        # over an eighth of the rows, and are not compared.
        np.testing.assert_allclose(np.asarray(a)[:, 0], np.asarray(b)[:, 0], rtol=0.25)


# One place says it, and each word of it changes the program.


def test_each_setting_changes_the_program() -> None:
    (batch,) = batches(1)
    texts = set()
    with target("gpu", "NVIDIA H200"):
        for fp8 in (None, Fp8Settings(), DELAYED, Fp8Settings("delayed"), Fp8Settings(scales="block")):
            history = None if fp8 is None else decoder.fp8_history_shapes(MODEL, fp8)
            params = WithHistory(decoder.param_shapes(MODEL), history)
            run = jax.value_and_grad(lambda p, b, fp8=fp8: loss_in(fp8)(p, b, None)[0])
            texts.add(str(jax.make_jaxpr(run)(params, batch)))
    assert len(texts) == 5


@pytest.mark.quick
def test_settings_say_it(tmp_path: Path) -> None:
    told = ["train.precision=fp8", "train.fp8.scaling=delayed", "train.fp8.history=8"]
    train = load_preset("dev", told).train
    assert train.fp8_products == Fp8Settings("delayed", history=8)
    assert load_preset("dev").train.fp8_products is None
    with pytest.raises(ValueError, match=r'train\.fp8 is for precision = "fp8"'):
        load_preset("dev", told[1:])
    with pytest.raises(ValueError, match=r"fp8\.scaling"):
        load_preset("dev", [told[0], "train.fp8.scaling=late"])
    with pytest.raises(ValueError, match='fp8= is for precision="fp8"'):
        ModularCapibaraModel(MODEL, fp8=DELAYED)
    with pytest.raises(ValueError, match="for the products of a capibara model"):
        as_trainable((lambda p, b: 0.0, {}), precision="fp8")
    model = ModularCapibaraModel(MODEL, precision="fp8", fp8=DELAYED)
    assert TpuDistributedTrainer(model).settings.fp8 == DELAYED
    block = TrainSettings(precision="fp8", fp8=Fp8Settings(scales="block"))
    assert TpuDistributedTrainer(model, settings=block).settings.fp8 == block.fp8
    assert TpuDistributedTrainer(model, precision="mixed").settings.fp8_products is None


def test_a_pipeline_keeps_no_history() -> None:
    (batch,) = batches(1)
    job = trainer_job(
        loss_in(DELAYED),
        decoder.param_shapes(MODEL),
        jax.eval_shape(lambda: batch),
        make_optimizer("adamw", 1e-2),
        StepOptions("fp8"),
        fp8_history=decoder.fp8_history_shapes(MODEL, DELAYED),
    )
    assert job.why_no_stages is not None
    assert "scaled by a history" in job.why_no_stages()
    assert job.staged is not None
    with pytest.raises(ValueError, match="A pipeline scales fp8 products by the tensors themselves"):
        job.staged(2)


@pytest.mark.usefixtures("nothing_said_yet")
def test_experts_and_states_stay_bfloat16_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    blocks = {**BLOCKS, "moe": {"experts": 4, "top_k": 2, "ffn": 32}}
    mixture = ModularModelConfig(
        hidden=32, layers=1, vocab=VOCAB, blocks=blocks, pattern="attention+moe", max_length=64
    )
    (batch,) = batches(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(
                lambda p: decoder.loss(mixture, p, batch, fp8=Fp8Settings())[0], decoder.param_shapes(mixture)
            )
    said = [record.getMessage() for record in caplog.records if "stay bfloat16" in record.getMessage()]
    assert said == ["fp8 is for the products of attention and of an mlp: those of moe stay bfloat16 (said once)"]
    groups = decoder.fp8_history_shapes(mixture, DELAYED)
    assert list(groups[0]) == ["attention"]


def test_logits_are_those_of_bfloat16() -> None:
    ids = batches(1)[0]["inputs"]
    plain, narrow = (ModularCapibaraModel(MODEL, precision=word)(ids) for word in ("mixed", "fp8"))
    np.testing.assert_array_equal(plain, narrow)
