"""Presets: the shipped ones, their sections, what a job of training takes from them, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.models import decoder
from capibara.models.config import ModularModelConfig
from capibara.models.preset import (
    MeshSettings,
    OptimizerSettings,
    Preset,
    TrainSettings,
    load_preset,
    preset_names,
)
from capibara.plan.target import preset_job
from capibara.program import trace

TINY = """
[model]
hidden = 64
layers = 2
vocab = 256

[model.blocks.attention]
heads = 4
kv_heads = 2

[model.blocks.mlp]
ffn = 128

[train]
batch_size = 2
sequence_length = 16
"""

# Millions of parameters, and of those that a token meets.
SIZES = {
    "dev": (1.72, 1.72),
    "gpu": (1138.0, 1138.0),
    "hybrid": (2975.0, 1037.0),
    "llama-13b": (13016.0, 13016.0),
    "llama-1b": (1138.0, 1138.0),
    "llama-70b": (68977.0, 68977.0),
    "llama-7b": (6738.0, 6738.0),
    "moe": (3328.0, 1214.0),
    "production/tpu_v4": (6738.0, 6738.0),
    "small": (104.0, 104.0),
}


def _file(folder: Path, text: str, name: str = "tiny.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return _file(tmp_path, TINY)


@pytest.mark.quick
def test_the_shipped_presets_have_the_size_that_they_are_known_by() -> None:
    assert preset_names() == sorted(SIZES)
    for name, (parameters, active) in SIZES.items():
        model = load_preset(name).model
        assert model.name == name
        assert model.parameters / 1e6 == pytest.approx(parameters, rel=0.01), name
        assert model.active_parameters / 1e6 == pytest.approx(active, rel=0.01), name


@pytest.mark.quick
def test_every_preset_trains_on_no_more_than_its_context() -> None:
    for name in preset_names():
        preset = load_preset(name)
        assert preset.train.sequence_length <= preset.model.max_length, name
        assert name == "dev" or preset.model.max_length >= 2048, name


def test_a_preset_is_called_as_its_file_or_as_its_model_says(tmp_path: Path) -> None:
    assert load_preset(_file(tmp_path, TINY)).name == "tiny"
    assert load_preset(_file(tmp_path, TINY.replace("[model]", '[model]\nname = "own"'))).name == "own"


def _job_text(preset: Preset) -> str:
    job = preset_job(preset)
    fn, args = job.build(**job.defaults())
    return f"{job.defaults()} {job.tokens} {jax.make_jaxpr(fn)(*args)}"


# What a section's keys change in the planned step of training. Those that only a run has (data, logs, the values of
# rates) are the trainer's, and are tested with it.
IN_THE_STEP = {
    "batch_size": "4",
    "sequence_length": "8",
    "precision": '"bfloat16"',
    "accumulate": "2",
    "remat": '"full"',
    "z_loss": "0.1",
}
OF_A_RUN = {
    "steps", "seed", "unroll", "checkpoint_every", "eval_every", "eval_batches", "skip_nonfinite", "deterministic",
    "communication",
}  # fmt: skip


def test_every_key_of_training_is_in_the_step_or_of_a_run(tiny: Path) -> None:
    assert {field.name for field in dataclasses.fields(TrainSettings)} == {*IN_THE_STEP, *OF_A_RUN, "fp8"}
    plain = _job_text(load_preset(tiny))
    for key, value in IN_THE_STEP.items():
        assert _job_text(load_preset(tiny, [f"train.{key}={value}"])) != plain, key
    assert _job_text(load_preset(tiny, ["train.precision=float32"])) != plain
    narrow = _job_text(load_preset(tiny, ["train.precision=fp8"]))
    assert narrow != plain
    # A history of scales is the trainer's own, a few numbers: tests/train/test_fp8.py has it.
    assert _job_text(load_preset(tiny, ["train.precision=fp8", "train.fp8.scales=block"])) != narrow
    for name in ("sgd", "lion"):
        assert _job_text(load_preset(tiny, [f"optimizer.name={name}"])) != plain


def test_precision_is_of_weights_and_of_products(tiny: Path) -> None:
    def dtypes(precision: str) -> tuple[str, set[str]]:
        job = preset_job(load_preset(tiny, [f"train.precision={precision}"]))
        fn, args = job.build(**job.defaults())
        program = trace(fn, args)
        layers = [inner for node in program.nodes if node.body is not None for inner in node.body.nodes]
        products = [node for node in layers if node.matrix and "mlp.py" in node.name and not node.backward]
        return str(args[0]["embed"].dtype), {program.values[one].dtype for node in products for one in node.inputs}

    assert dtypes("mixed") == ("float32", {"bfloat16"})
    assert dtypes("bfloat16") == ("bfloat16", {"bfloat16"})
    assert dtypes("float32") == ("float32", {"float32"})


def test_constraints_are_named_by_the_models_own_lines(tiny: Path) -> None:
    model = load_preset(tiny).model
    program = trace(decoder.make_loss(model), (decoder.param_shapes(model), decoder.batch_shapes(2, 16)))
    nodes = [*program.nodes, *(inner for node in program.nodes if node.body for inner in node.body.nodes)]
    marked = [node.name for node in nodes if node.primitive == "logical_axes"]
    assert marked
    assert {name.split()[-1].partition(":")[0] for name in marked} == {"decoder.py", "attention.py", "mlp.py"}


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ({}, None),
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}),
        ({"expert": 4}, {"expert": 4, "data": 1, "model": 1}),
        ({"pipeline": 2, "data": 2, "sequence": 2}, {"pipeline": 2, "data": 2, "sequence": 2, "model": 1}),
    ],
)
def test_axes_of_the_mesh(mesh: dict[str, int], axes: dict[str, int] | None) -> None:
    assert MeshSettings(**mesh).axes == axes


def test_the_table_keeps_sections_of_other_rooms(tiny: Path) -> None:
    preset = load_preset(tiny, ["data.path=books/*.txt", "log.tensorboard=true"])
    assert preset.table.values["data"] == {"path": "books/*.txt"}
    assert preset.table.values["log"] == {"tensorboard": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TINY.replace("hidden", "hiden"), r"Unknown key of model at .*tiny.toml:3 'hiden'\. Did you mean 'hidden'"),
        (TINY + "stepz = 3\n", r"key of train at .*tiny.toml:17 'stepz'\. Did you mean 'steps'"),
        (TINY.replace("ffn = 128\n", ""), r"model.blocks.mlp names ffn\. Got .*tiny.toml:11 without"),
        (TINY.replace("heads = 4", "head = 4"), r"blocks.attention at .*tiny.toml:8 'head'\. Did you mean 'heads'"),
        (TINY.replace("heads = 4", "heads = 5"), r"tiny.toml:7: kv_heads must divide heads.*use kv_heads = 1"),
        (TINY.replace("heads = 4\nkv_heads = 2", "heads = 5"), r"tiny.toml:2: heads must divide hidden.*use heads = 4"),
        (TINY.replace("kv_heads = 2", "kv_heads = 3"), r"tiny.toml:7: kv_heads must divide heads.*use kv_heads = 2"),
        (TINY.replace("layers = 2", "layers = 0"), "layers of a model is a whole number"),
        (TINY.replace("layers = 2", 'layers = "two"'), r"model.layers is a whole number\. Got 'two' at .*tiny.toml:4"),
        (TINY.replace("hidden = 64", "hidden = 60"), r"even number wide.*15 in blocks.attention"),
        (TINY.replace("[train]", "[trian]"), r"Unknown section at .*tiny.toml:14 'trian'\. Did you mean 'train'"),
        (TINY + "accumulate = 3\n", "accumulate divides train.batch_size.*use one of 1, 2"),
        (TINY + 'precision = "half"\n', "Choices: 'mixed', 'bfloat16', 'float32'"),
        (TINY + 'remat = "some"\n', "Choices: 'auto', 'none', 'dots', 'full'"),
        (TINY + "steps = 0\n", "train.steps is 1 or more"),
        (TINY + "[mesh]\ndata = -1\n", "mesh.data is 0 or more"),
        (TINY + '[optimizer]\nname = "adan"\n', "Did you mean 'adamw'"),
        (TINY + '[optimizer]\nschedule = "step"\n', "Choices: 'cosine', 'linear', 'constant', 'wsd'"),
        (TINY + "[optimizer]\nlearning_rate = 0\n", "learning_rate is above 0"),
        (TINY + "[optimizer]\nb2 = 1\n", "b2 is from 0 to below 1"),
        (TINY + "[optimizer]\nclip = -1\n", "clip is 0 or more"),
        ("[train]\nsteps = 3\n", r"has a \[model\]"),
        ("[model]\nhidden = \n", "TOML"),
    ],
)
def test_a_bad_preset_says_where_and_what_to_change(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_preset(_file(tmp_path, text))


def test_settings_can_be_built_without_a_file() -> None:
    model = ModularModelConfig(hidden=8, layers=2, vocab=16, blocks={"mlp": {"ffn": 8}}, pattern="mlp")
    preset = Preset(model, TrainSettings(batch_size=4), OptimizerSettings(name="sgd"), MeshSettings(data=2))
    assert preset.train.tokens == 4 * 2048
    assert (preset.optimizer.name, preset.mesh.axes) == ("sgd", {"data": 2, "model": 1})
    shapes: Any = decoder.param_shapes(preset.model, jnp.bfloat16)
    assert shapes["layers"][0]["mlp"]["up"].shape == (2, 8, 8)
