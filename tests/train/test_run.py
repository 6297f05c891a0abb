"""`capibara.train.run.train` in this process: what it does with its settings and its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from capibara.models.modular import ModularCapibaraModel
from capibara.train import run as runs
from capibara.train.config import RunConfig, load_run

TINY = """
[model]
hidden = 16
layers = 1
vocab = 259
max_length = 32
[model.blocks.attention]
heads = 2
[model.blocks.mlp]
ffn = 32
[train]
steps = 2
batch_size = 2
sequence_length = 16
precision = "float32"
eval_batches = 1
checkpoint_every = 1
[data]
path = "text.txt"
"""


def tiny_run(folder: Path, *overrides: str) -> RunConfig:
    (folder / "text.txt").write_text("all work and no play makes a dull text. " * 20)
    (folder / "tiny.toml").write_text(TINY.replace("text.txt", str(folder / "text.txt")))
    return load_run(folder / "tiny.toml", [f"data.cache_dir={folder / 'cache'}", *overrides], environment={})


@pytest.mark.quick
def test_a_deterministic_run_on_a_gpu_takes_the_attention_that_adds_up_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for asked, implementation in (("true", "xla"), ("false", None)):
        config = tiny_run(tmp_path, f"train.deterministic={asked}")
        model = ModularCapibaraModel(config.preset.model)
        runs._trainable(config, model)
        assert model.config == dataclasses.replace(config.preset.model, attention_implementation=implementation)


def test_a_resume_that_is_refused_leaves_the_folder_to_its_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    runs.train(tiny_run(tmp_path), out, devices=jax.devices()[:1])
    told = (out / "config.toml").read_text()
    for change in ("model.blocks.mlp.ffn=48", "train.sequence_length=8"):
        with pytest.raises(ValueError, match=r"was saved|goes on with the data"):
            runs.train(tiny_run(tmp_path, change), out, resume=True, devices=jax.devices()[:1])
        assert (out / "config.toml").read_text() == told
    runs.train(tiny_run(tmp_path, "train.steps=3"), out, resume=True, devices=jax.devices()[:1])
    assert "steps = 3" in (out / "config.toml").read_text()


def test_held_out_data_that_is_not_there_is_refused_before_the_first_step(tmp_path: Path) -> None:
    steps: list[int] = []
    config = tiny_run(tmp_path, f"data.held_out={tmp_path / 'not_there.txt'}")
    with pytest.raises((ValueError, FileNotFoundError), match=r"not_there\.txt"):
        runs.train(config, devices=jax.devices()[:1], on_step=lambda step, row: steps.append(step))
    assert not steps
