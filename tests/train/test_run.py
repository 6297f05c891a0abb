"""`capibara.train.run.train` in this process: what it does with its settings and its folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from capibara.models.modular import ModularCapibaraModel
from capibara.train import run as runs
from capibara.train.config import RunConfig, load_run
from capibara.train.watchdog import Watchdog

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


def test_tokenising_and_compiling_may_take_longer_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}
    beat = Watchdog.beat

    def noted(self: Watchdog, step: int, phase: str = "step", allow: float | None = None) -> None:
        limits[phase] = self.timeout if allow is None else allow
        beat(self, step, phase, allow)

    monkeypatch.setattr(Watchdog, "beat", noted)
    runs.train(
        tiny_run(tmp_path, "log.hang_seconds=100", "data.held_out=0.5"), tmp_path / "run", devices=jax.devices()[:1]
    )
    assert limits["step"] == limits["evaluation"] == limits["checkpoint"] == 100
    assert limits["compile"] == 3600
    assert limits["data"] == 24 * 3600
