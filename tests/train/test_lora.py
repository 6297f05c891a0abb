"""LoRA: what is trained is what is merged, the weights stay, and targets are held to the model's products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.train.tiny_runs import DENSE, packed_batches, tiny_model

from capibara.models import decoder
from capibara.models.preset import OptimizerSettings, TrainSettings
from capibara.models.restored import from_checkpoint
from capibara.train.config import LoraSettings, load_run
from capibara.train.data.wrapped import wrap_dataset
from capibara.train.logs import MetricsLog
from capibara.train.loop import Loop, LoopOptions
from capibara.train.lora import LoraTrainable, adapter_weights, merged
from capibara.train.run import train


def test_the_merged_model_is_the_one_that_was_trained(tmp_path: Path) -> None:
    model, batches = tiny_model(tmp_path), packed_batches(3, 4)
    before = jax.tree.map(np.asarray, model.params)
    lora = LoraSettings(rank=2, alpha=8.0)
    trainable = LoraTrainable(model, lora, "float32")
    loop = Loop(
        trainable,
        TrainSettings(steps=3, batch_size=4, precision="float32", remat="none", accumulate=1),
        OptimizerSettings(learning_rate=0.1, warmup_steps=0),
        LoopOptions(axes={"data": 1}, devices=jax.devices()[:1]),
    )
    loop.prepare(batches[0])
    with MetricsLog(None) as log:
        result = loop.run(wrap_dataset(batches), until=3, log=log)
    trained = jax.jit(trainable.loss())(loop._loss_params(), batches[0], None)[0]

    @jax.jit
    def loss(params: Any) -> jax.Array:
        return decoder.loss(model.config, params, batches[0], dtype=jnp.float32)[0]

    # The factors begin as no change, and learn.
    assert result.history[0]["loss"] == pytest.approx(float(loss(before)), rel=1e-6)
    assert abs(float(trained) - float(loss(before))) > 1e-2
    trainable.publish(loop.params)
    assert float(loss(model.params)) == pytest.approx(float(trained), rel=1e-5)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, jax.tree.map(np.asarray, model.params))
    assert not changed["embed"]
    assert {name for block in changed["layers"][0].values() for name, moved in block.items() if moved is True} == set(
        lora.targets
    )


@pytest.mark.quick
def test_the_folder_of_a_run_says_that_it_has_the_factors_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(DENSE + "[lora]\nrank = 2\n")
    with pytest.raises(ValueError, match=r"rank 2 and no merged/.*--resume"):
        from_checkpoint(tmp_path)


@pytest.mark.quick
def test_a_target_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    config = tiny_model(tmp_path).config
    with pytest.raises(ValueError, match=r"target of lora 'valeu'\. Did you mean 'value'"):
        adapter_weights(config, LoraSettings(rank=2, targets=("query", "valeu")))
    with pytest.raises(ValueError, match="target of lora 'in'"):
        adapter_weights(config, LoraSettings(rank=2, targets=("query", "in")))
    layer = adapter_weights(config, LoraSettings(rank=2, targets=("query",)))[0]
    assert {name for block in layer.values() for name in block} == {"query_lora_down", "query_lora_up"}


def test_a_run_from_a_folder_leaves_its_whole_model(tmp_path: Path) -> None:
    """As the command does it: weights in, factors trained, the merged model out and read again."""
    base = tiny_model(tmp_path)
    base.to_hf(tmp_path / "base")
    ids = tmp_path / "ids.npy"
    np.save(ids, (np.arange(600) * 7 % 50 + 5).astype(np.uint16))
    sets = ["train.steps=3", "train.batch_size=2", "train.sequence_length=8", "train.precision=float32", "lora.rank=2"]
    config = load_run(tmp_path / "base", [f"data.path={ids}", "data.pack=stream", *sets])
    trained = train(config, tmp_path / "run", devices=jax.devices()[:1])
    again = from_checkpoint(tmp_path / "run")
    for ours, theirs in zip(jax.tree.leaves(trained.model.params), jax.tree.leaves(again.params), strict=True):
        assert np.array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), again.params["layers"], base.params["layers"])
    names = [name for block in changed[0].values() for name, moved in block.items() if moved is True]
    assert sorted(names) == sorted(LoraSettings.targets), "every one of them, and nothing else"


def test_the_whole_model_is_on_no_device_when_the_changes_are_added(tmp_path: Path) -> None:
    """Weights are read again over the run's mesh, and stay cut as they are read."""
    base = tiny_model(tmp_path)
    weights, meshes = jax.tree.map(np.asarray, base.params), []
    base._params = None

    def load(mesh: Any) -> Any:
        meshes.append(mesh)
        cut = NamedSharding(mesh, PartitionSpec(None, "model"))
        return jax.tree.map(
            lambda x: jax.device_put(x, cut if x.ndim > 1 else NamedSharding(mesh, PartitionSpec())), weights
        )

    lora = LoraSettings(rank=2, alpha=8.0)
    trainable = LoraTrainable(base, lora, "float32", load=load)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    trainable.frozen(mesh)
    assert base._params is None
    factors = jax.tree.map(lambda x: x + 0.5, trainable.init(jax.random.key(0)))
    trainable.publish(jax.device_put(factors, NamedSharding(mesh, PartitionSpec())))
    assert meshes == [mesh, mesh]
    wanted = merged(base.config, weights, factors, lora)
    for mine, right in zip(jax.tree.leaves(base.params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)
        assert mine.ndim == 1 or mine.addressable_shards[0].data.size * 2 == mine.size
