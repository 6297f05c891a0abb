"""`capibara.train.run.train` in this process: what it does with its settings and its folder."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.models import decoder
from capibara.models.modular import ModularCapibaraModel
from capibara.train import run as runs
from capibara.train.config import RunConfig, load_run
from capibara.train.logs import MetricsLog
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


def test_a_folder_whose_run_never_began_is_free_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = tiny_run(tmp_path)
    missing = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(tmp_path / "not_there.txt")))
    with pytest.raises((ValueError, FileNotFoundError), match=r"not_there\.txt"):
        runs.train(missing, out, devices=jax.devices()[:1])
    assert not (out / "config.toml").exists()
    runs.train(config, out, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="A run has a folder of its own"):
        runs.train(config, out, devices=jax.devices()[:1])
    assert (out / "config.toml").exists()


@pytest.mark.quick
@pytest.mark.parametrize("address", ["gs://bucket/run", "s3:/bucket/run"])
def test_an_object_stores_address_is_no_runs_folder(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="A run's folder is a folder of this machine"):
        runs.train(tiny_run(tmp_path), address)
    with pytest.raises(ValueError, match="A run's folder is a folder of this machine"):
        runs.train(tiny_run(tmp_path), Path(address))


@pytest.mark.quick
def test_tensorboard_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"log\.tensorboard needs tensorboardX.*pip install"):
        MetricsLog(tmp_path, tensorboard=True)


def test_the_held_out_loss_is_of_the_held_out_part(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("0123456789 " * 20)
    config = tiny_run(tmp_path, f"data.held_out={tmp_path / 'other.txt'}", "train.steps=1")
    trained = runs.train(config, devices=jax.devices()[:1])
    losses = {}
    for split in ("train", "eval"):
        with runs._batches(config, trained.model.tokenizer, split) as batches:
            batch = batches.peek()
        losses[split] = float(decoder.loss(config.preset.model, trained.model.params, batch, dtype=jnp.float32)[0])
    assert trained.result.eval_loss == pytest.approx(losses["eval"], rel=1e-5)
    assert trained.result.eval_loss != pytest.approx(losses["train"], rel=1e-2)


def test_a_run_goes_on_from_its_emergency_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two checkpoints: the copy on this machine is newer, and its place in the data goes with it."""
    sets = (
        "train.steps=5", "train.checkpoint_every=4", "checkpoint.emergency_every=1",
        f"checkpoint.emergency_folder={tmp_path / 'local'}",
    )  # fmt: skip
    config, told, losses = tiny_run(tmp_path, *sets), [], []

    class Killed(BaseException):
        pass

    def on_step(step: int, row: Any) -> None:
        losses.append(row["loss"])
        if step == 3:
            raise Killed

    whole = runs.train(config, devices=jax.devices()[:1]).result.history
    with pytest.raises(Killed):
        runs.train(config, tmp_path / "run", devices=jax.devices()[:1], on_step=on_step)
    again = runs.train(config, tmp_path / "run", resume=True, devices=jax.devices()[:1], tell=told.append)
    assert any("restored step 2 from" in text and "local" in text for text in told), told
    assert [row["loss"] for row in again.result.history] == [row["loss"] for row in whole[2:]]
    assert losses == [row["loss"] for row in whole[:3]]
