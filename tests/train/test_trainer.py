"""`TpuDistributedTrainer`: each flag changes the compiled program, and anything with a loss can be trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train.tiny_runs import packed_batches, run_loop, tiny_model

from capibara.mesh import create_training_mesh, training_mesh_config
from capibara.models import decoder
from capibara.models.preset import OptimizerSettings, TrainSettings
from capibara.parallel.run import lower_program
from capibara.train.data.wrapped import wrap_dataset
from capibara.train.logs import MetricsLog
from capibara.train.loop import Diverged
from capibara.train.trainer import TpuDistributedTrainer

WIDTH, LAYERS = 32, 8
DATA_8 = training_mesh_config(8, 8, 1)
OPTIMIZER = OptimizerSettings(name="adamw", learning_rate=1e-2, warmup_steps=0, schedule="constant", clip=0.0)


def toy_loss(params: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def toy_params() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "layers": (draw.normal(size=(LAYERS, WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32),
        "head": (draw.normal(size=(WIDTH, 4)) / np.sqrt(WIDTH)).astype(np.float32),
    }


def toy_batches(count: int = 2, rows: int = 32) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(1)
    return [
        {
            "x": draw.normal(size=(rows, WIDTH)).astype(np.float32),
            "y": draw.normal(size=(rows, 4)).astype(np.float32),
        }
        for _ in range(count)
    ]


def trained(batches: Any = None, epochs: int = 1, **flags: Any) -> TpuDistributedTrainer:
    mesh = flags.pop("mesh", None) or DATA_8
    trainer = TpuDistributedTrainer((toy_loss, toy_params()), mesh, precision="float32", optimizer=OPTIMIZER, **flags)
    trainer.train(batches or toy_batches(), epochs=epochs)
    return trainer


def lowered(trainer: TpuDistributedTrainer) -> str:
    assert trainer.loop is not None
    return str(lower_program(trainer.loop.compiled.program).as_text())


@pytest.fixture(scope="module")
def plain() -> TpuDistributedTrainer:
    return trained()


def same_params(one: TpuDistributedTrainer, other: TpuDistributedTrainer, bound: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=bound, atol=bound)


@pytest.mark.quick
def test_gradient_accumulation_is_a_loop(plain: TpuDistributedTrainer) -> None:
    found = trained(gradient_accumulation_steps=4)
    text = lowered(found)
    assert text.count("stablehlo.while") > lowered(plain).count("stablehlo.while")
    assert "tensor<4x" in text
    same_params(plain, found)


def test_gradient_checkpointing_computes_again_and_keeps_less(plain: TpuDistributedTrainer) -> None:
    found = trained(use_gradient_checkpointing=True)
    assert lowered(found).count("stablehlo.tanh") > lowered(plain).count("stablehlo.tanh")
    assert plain.loop is not None
    assert found.loop is not None
    temporaries = [t.loop.compiled.memory_analysis().temp_size_in_bytes for t in (plain, found)]
    assert temporaries[1] < temporaries[0]
    same_params(plain, found)


def test_async_communication_lets_buckets_go_together() -> None:
    """A bucket is 32 MiB at the most: a head this wide is more than one."""
    wide = {"a": np.zeros((1, 2**23 + 1), np.float32), "b": np.zeros((1, 2**23 + 1), np.float32)}

    def flat(params: Any, batch: Any) -> jax.Array:
        return batch["x"].mean() * (params["a"].mean() + params["b"].mean())

    texts = {}
    for together in (False, True):
        trainer = TpuDistributedTrainer(
            (flat, wide),
            DATA_8,
            async_gradient_communication=together,
            precision="float32",
            optimizer=OptimizerSettings(name="sgd", warmup_steps=0),
        )
        trainer.train(toy_batches(1))
        texts[together] = lowered(trainer)
    assert texts[True].count("all_reduce") >= 2
    assert texts[False].count("all_reduce") >= 2
    assert texts[False].count("optimization_barrier") > texts[True].count("optimization_barrier")


def test_offloaded_activations_go_to_the_host_on_a_chip(plain: TpuDistributedTrainer) -> None:
    said: list[str] = []
    found = trained(activation_offloading=True, tell=said.append)
    assert any("a CPU has one memory" in line for line in said)
    same_params(plain, found)
    from capibara.parallel.remat import checkpoint_scans

    step = jax.jit(jax.grad(checkpoint_scans(toy_loss, "offload")))
    for platform in ("tpu", "cuda"):
        assert (
            "pinned_host"
            in jax.export.export(step, platforms=[platform])(toy_params(), toy_batches(1)[0]).mlir_module()
        )
    assert found.loop is not None
    assert dict(found.loop.compiled.program.layout.choices)["remat"] == "offload"


def test_optimizer_sharding_cuts_its_state(plain: TpuDistributedTrainer) -> None:
    found = trained(optimizer_sharding=True)

    def largest(trainer: TpuDistributedTrainer) -> Any:
        return max(jax.tree.leaves(trainer.state["optimizer"]), key=lambda leaf: leaf.size)

    assert largest(plain).sharding.is_fully_replicated
    assert largest(found).addressable_shards[0].data.size * 8 == largest(found).size
    same_params(plain, found)


def test_compressed_sums_train_and_their_rest_is_kept_in_checkpoints(tmp_path: Path) -> None:
    settings = TrainSettings(communication="compressed", checkpoint_every=2)
    batches = toy_batches(6)
    whole = trained(batches, settings=settings)
    assert any(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(whole.state["unsent"]))
    leaf = jax.tree.leaves(whole.state["unsent"])[0]
    assert leaf.addressable_shards[0].data.shape[0] == 1, "each device has its own rest"
    trained(batches[:4], settings=settings, checkpoint_folder=tmp_path)
    again = trained(batches, settings=settings, checkpoint_folder=tmp_path)
    assert again.loop is not None
    assert again.loop.step == 6
    for a, b in zip(jax.tree.leaves(whole.state["unsent"]), jax.tree.leaves(again.state["unsent"]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)
    mesh = create_training_mesh(8, 4, 2)
    with pytest.raises(ValueError, match="on a mesh of the data axis alone"):
        trained(batches, mesh=mesh, settings=settings)


def test_what_was_not_sent_begins_anew_on_another_number_of_devices(tmp_path: Path) -> None:
    told: list[str] = []
    batches, emergency = toy_batches(4), tmp_path / "kept"
    settings = TrainSettings(communication="compressed", checkpoint_every=2)
    trained(batches[:2], settings=settings, checkpoint_folder=emergency)
    four = training_mesh_config(4, 4, 1)
    found = trained(batches, mesh=four, settings=settings, checkpoint_folder=emergency, tell=told.append)
    assert any("begins at nothing" in text for text in told)
    assert found.loop is not None
    assert found.loop.step == 4
    assert {leaf.shape[0] for leaf in jax.tree.leaves(found.state["unsent"])} == {4}
    same_params(found, trained(batches), bound=0.05)  # Adam's steps of 1e-2, of gradients that are a hundredth off
    # Sums by the compiler have none, and leave it out.
    plain_sums = trained(batches, mesh=four, checkpoint_folder=emergency, async_gradient_communication=True)
    assert "unsent" not in plain_sums.state


def test_calls_that_were_done_are_not_made_again(tmp_path: Path) -> None:
    """A program of two calls, ended in the second and started again: three steps of each call, no more."""
    first, second = toy_batches(3), toy_batches(6)[3:]
    settings = TrainSettings(checkpoint_every=1)

    def trainer() -> TpuDistributedTrainer:
        return TpuDistributedTrainer(
            (toy_loss, toy_params()), DATA_8, precision="float32", optimizer=OPTIMIZER, settings=settings,
            checkpoint_folder=tmp_path / "kept",
        )  # fmt: skip

    whole = TpuDistributedTrainer((toy_loss, toy_params()), DATA_8, precision="float32", optimizer=OPTIMIZER)
    history = [*whole.train(first).history, *whole.train(second).history]
    dying = trainer()
    dying.train(first)

    class Cut(list[Any]):
        """Batches whose file is gone after the first."""

        def __iter__(self) -> Iterator[Any]:
            yield self[0]
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        dying.train(Cut(second))
    again = trainer()
    assert again.train(first).history == []
    losses = [row["loss"] for row in again.train(second).history]
    assert again.loop is not None
    assert again.loop.step == 6
    assert losses == pytest.approx([row["loss"] for row in history[-len(losses) :]], rel=1e-6)
    same_params(whole, again)
    assert again.train(first).step == 9, "and the next call is a new one"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"accumulate": 2}, "gradient_accumulation_steps="),
        ({"remat": "full"}, "use_gradient_checkpointing="),
        ({"precision": "bfloat16"}, "precision="),
        ({"steps": 7}, "epochs="),
        ({"batch_size": 4}, "batches have it"),
        ({"sequence_length": 4}, "batches have it"),
        ({"eval_every": 4}, "capibara train"),
    ],
)
def test_settings_that_would_not_be_read_are_refused(changes: dict[str, Any], fix: str) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=rf"leave {name} to its other arguments.*{fix}"):
        TpuDistributedTrainer((toy_loss, toy_params()), precision="float32", settings=TrainSettings(**changes))


@pytest.mark.quick
def test_sums_of_gradients_are_asked_for_once() -> None:
    with pytest.raises(ValueError, match="Gradients are summed in one way"):
        TpuDistributedTrainer(
            (toy_loss, toy_params()),
            async_gradient_communication=True,
            settings=TrainSettings(communication="sequential"),
        )


def test_bad_flags_say_the_rule() -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps is a whole number"):
        TpuDistributedTrainer((toy_loss, toy_params()), gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match="pass loss="):
        TpuDistributedTrainer(object())
    with pytest.raises(ValueError, match="z_loss is part of a capibara model's loss"):
        TpuDistributedTrainer((toy_loss, toy_params()), settings=TrainSettings(z_loss=1e-4))
    trainer = TpuDistributedTrainer((toy_loss, toy_params()))
    with pytest.raises(ValueError, match="epochs is a whole number"):
        trainer.train(toy_batches(), epochs=0)
    with pytest.raises(ValueError, match="call train"):
        _ = trainer.params
    with pytest.raises(ValueError, match="at least one batch"):
        trainer.train([])
    with pytest.raises(ValueError, match="one number"):
        TpuDistributedTrainer((lambda p, b: b["x"], toy_params())).train(toy_batches())


def test_batches_of_another_shape_or_keys_are_refused() -> None:
    batches = toy_batches(2)
    short = [batches[0], jax.tree.map(lambda x: x[:16], batches[1])]
    with pytest.raises(ValueError, match="Every batch has the first one's shape"):
        trained(short)
    with pytest.raises(ValueError, match="Every batch has the same arrays"):
        trained([batches[0], {"x": batches[1]["x"]}])


# What can be trained.


@pytest.mark.quick
def test_a_loss_of_tuples_learns_on_a_mesh() -> None:
    def pair_loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        x, y = batch
        error = jnp.mean((x @ params["w"] - y) ** 2)
        return error, {"error": error}

    draw = np.random.default_rng(0)
    x = draw.normal(size=(16, 4)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 3.0, 0.5])).astype(np.float32)
    trainer = TpuDistributedTrainer(
        (pair_loss, {"w": np.zeros(4, np.float32)}),
        DATA_8,
        precision="float32",
        optimizer=OptimizerSettings(
            name="sgd", learning_rate=0.1, warmup_steps=0, schedule="constant", weight_decay=0.0
        ),
    )
    result = trainer.train([(x, y)], epochs=40)
    assert result.step == 40
    assert result.history[-1]["error"] < 0.01 * result.history[0]["error"]


def test_an_nnx_module_learns_and_is_updated() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.inner = nnx.Linear(WIDTH, 64, rngs=rngs)
            self.outer = nnx.Linear(64, 4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.outer(jax.nn.relu(self.inner(x)))

    net = Net(nnx.Rngs(0))
    before = np.asarray(net.inner.kernel[...])
    _learns(net, lambda module, batch: jnp.mean((module(batch["x"]) - batch["y"]) ** 2))
    assert np.abs(np.asarray(net.inner.kernel[...]) - before).max() > 0
    assert np.isfinite(np.asarray(net(jnp.zeros((1, WIDTH))))).all()


def test_an_equinox_module_learns_and_the_trained_one_is_handed_back() -> None:
    equinox = pytest.importorskip("equinox")
    net = equinox.nn.MLP(WIDTH, 4, 64, 1, key=jax.random.key(0))
    trainer = _learns(net, lambda module, batch: jnp.mean((jax.vmap(module)(batch["x"]) - batch["y"]) ** 2))
    after = trainer.trainable.module  # type: ignore[attr-defined]
    assert np.abs(np.asarray(after.layers[0].weight) - np.asarray(net.layers[0].weight)).max() > 0
    assert after.activation is net.activation


def _learns(module: Any, loss: Any) -> TpuDistributedTrainer:
    trainer = TpuDistributedTrainer(
        module,
        DATA_8,
        loss=loss,
        precision="float32",
        optimizer=OPTIMIZER,
    )
    result = trainer.train(toy_batches(1), epochs=20)
    assert result.history[-1]["loss"] < 0.7 * result.history[0]["loss"]
    return trainer


def test_a_capibara_model_is_updated_and_a_second_call_goes_on(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    trainer = TpuDistributedTrainer(model, DATA_8)
    first = trainer.train(packed_batches(2, 8))
    second = trainer.train(packed_batches(2, 8))
    assert (first.step, second.step) == (2, 4)
    assert jax.tree.leaves(model.params)[0] is jax.tree.leaves(trainer.params)[0]
    assert model(np.zeros((1, 4), np.int32)).shape == (1, 4, 64)


def test_a_second_call_ends_with_its_epoch_where_batches_do_not() -> None:
    batches = wrap_dataset(toy_batches(2), tokens=False)  # again and again, as those of files
    trainer = trained(batches)
    assert trainer.train(batches, epochs=2).step == 6


def test_after_an_error_the_weights_so_far_are_there() -> None:
    trainer = trained()
    before = np.asarray(trainer.trainable._params["head"])

    def failing() -> Iterator[Any]:
        yield from toy_batches(1)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train(failing())
    assert not np.array_equal(np.asarray(trainer.trainable._params["head"]), before)


def test_a_run_moves_from_32_devices_to_8_and_back(tmp_path: Path) -> None:
    """Each goes on from the other's checkpoint, on a mesh of its own; the losses are those of one device."""
    batches = packed_batches(6, 32)
    meshes = [create_training_mesh(32, 4, 8), create_training_mesh(8, 8, 1), create_training_mesh(32, 16, 2)]
    losses = []
    for number, mesh in enumerate(meshes):
        model = tiny_model(tmp_path)
        trainer = TpuDistributedTrainer(
            model, mesh, optimizer_sharding=number == 1, optimizer=OPTIMIZER, checkpoint_folder=tmp_path / "kept"
        )
        result = trainer.train(batches[: 2 * number + 2])
        assert result.step == 2 * number + 2
        losses += [row["loss"] for row in result.history]
    alone = TpuDistributedTrainer(tiny_model(tmp_path), training_mesh_config(1, 1, 1), optimizer=OPTIMIZER)
    expected = [row["loss"] for row in alone.train(batches).history]
    assert losses == pytest.approx(expected, abs=1e-5)


def test_z_loss_is_minimised_and_is_no_part_of_the_loss_that_is_told(tmp_path: Path) -> None:
    """The metric is the cross-entropy alone, in training and evaluation; the gradient is of both."""
    (batch,) = packed_batches(1, 8)
    model = tiny_model(tmp_path)
    _, without = run_loop(model, [batch])
    loop, with_it = run_loop(tiny_model(tmp_path), [batch], settings={"z_loss": 0.1, "eval_batches": 1})
    assert with_it.history[0]["loss"] == pytest.approx(without.history[0]["loss"], rel=1e-6)

    def both(params: Any) -> jax.Array:
        scores = model.apply(params, batch["inputs"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        highest = jax.nn.logsumexp(scores, -1)
        picked = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
        return ((highest - picked + 0.1 * highest**2) * batch["mask"]).sum() / batch["mask"].sum()

    slopes = jax.jit(jax.grad(both))(tiny_model(tmp_path).params)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(slopes)))
    assert with_it.history[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert norm > 1.05 * without.history[0]["grad_norm"]
    with MetricsLog(None) as log:
        held_out = loop.evaluate(lambda: wrap_dataset([batch]), log)
    plain = decoder.loss(model.config, loop.params, batch, dtype=jnp.float32)[0]
    assert held_out == pytest.approx(float(plain), rel=1e-5)


# The guard against NaN.


def poisoned(count: int, bad: set[int]) -> list[dict[str, np.ndarray]]:
    found = toy_batches(count)
    for number in bad:
        found[number]["x"][0, 0] = np.nan
    return found


@pytest.mark.quick
def test_a_poisoned_batch_is_skipped_and_counted() -> None:
    said: list[str] = []
    settings = TrainSettings(skip_nonfinite=2)
    found = trained(poisoned(4, {1}), settings=settings, tell=said.append)
    assert int(found.state["skipped"]) == 1
    assert found.loop is not None
    assert found.loop.step == 4
    assert any("step 2: loss or gradient is not finite, the step was skipped (1 in a row)" in line for line in said)
    without = trained([batch for number, batch in enumerate(toy_batches(4)) if number != 1], settings=settings)
    same_params(found, without)


def test_too_many_in_a_row_stop_with_the_batch_kept(tmp_path: Path) -> None:
    batches = poisoned(6, {2, 3, 4, 5})
    with pytest.raises(Diverged, match=r"3 in a row, more than train\.skip_nonfinite = 2") as stopped:
        trained(batches, settings=TrainSettings(skip_nonfinite=2), checkpoint_folder=tmp_path)
    (file,) = tmp_path.glob("diverged_step_5_*.npz")
    assert str(file) in str(stopped.value)
    with np.load(file) as kept:
        np.testing.assert_array_equal(kept["x"], batches[4]["x"])
        np.testing.assert_array_equal(kept["y"], batches[4]["y"])


def test_without_a_guard_the_first_stops() -> None:
    with pytest.raises(Diverged, match="at step 2"):
        trained(poisoned(4, {1}), settings=TrainSettings(skip_nonfinite=0))
