"""Files of presets: how they are found, what they build on, and what is laid over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.models.config import ModularModelConfig
from capibara.models.preset import load_preset
from capibara.models.preset_files import FOLDER, load_table, name_of, preset_names

BASE = """
[model]
hidden = 8
layers = 2
vocab = 16
pattern = "mlp"

[model.blocks.mlp]
ffn = 8

[train]
steps = 1
batch_size = 2
"""


def _file(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.quick
def test_a_shipped_preset_is_found_by_name_and_by_path_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = load_preset("production/tpu_v4").model
    assert wanted.tpu is not None
    for path in (
        "capibara/config/configs_toml/production/tpu_v4.toml",
        "src/capibara/config/configs_toml/production/tpu_v4.toml",
        "configs_toml/production/tpu_v4.toml",
        FOLDER / "production" / "tpu_v4.toml",
    ):
        model = ModularModelConfig.from_toml(path)
        assert model.with_overrides(name=wanted.name) == wanted
        assert name_of(path) == "tpu_v4"
    assert name_of("production/tpu_v4") == "production/tpu_v4"


def test_a_file_of_the_readers_own_comes_after_the_shipped_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _file(tmp_path, "dev.toml", BASE)
    assert load_preset("dev.toml").model.hidden == 8
    assert load_preset("dev").model.hidden == 192


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-8b", "Unknown preset 'llama-8b'. Did you mean 'llama-7b'"),
        ("production/tpu_v5", "Did you mean 'production/tpu_v4'"),
        ("nowhere/tiny.toml", "which is not there.*name a file, or one of dev, gpu"),
        ("configs_toml/nothing.toml", "which is not there"),
    ],
)
def test_what_is_not_there(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_table(name)


@pytest.mark.quick
def test_a_file_lies_over_those_that_it_builds_on(tmp_path: Path) -> None:
    _file(tmp_path, "low.toml", BASE)
    _file(tmp_path, "inner/middle.toml", 'base = "../low.toml"\n[train]\nsteps = 2\nseed = 7\n')
    top = _file(tmp_path, "top.toml", 'base = "inner/middle.toml"\n[train]\nsteps = 3\n[model.blocks.mlp]\nffn = 12\n')
    preset = load_preset(top)
    assert (preset.train.steps, preset.train.seed, preset.train.batch_size) == (3, 7, 2)
    assert (preset.model.blocks["mlp"].ffn, preset.model.hidden) == (12, 8)
    table = load_table(top)
    assert table.place("train.steps") == f"{top}:3"
    assert str(table.place("train.seed")).endswith("middle.toml:4")
    assert str(table.place("model.hidden")).endswith("low.toml:3")
    shipped = load_preset(_file(tmp_path, "mine.toml", 'base = "small"\n[train]\nsteps = 9\n'))
    assert (shipped.train.steps, shipped.model.hidden) == (9, 768)


def test_a_circle_and_a_base_that_is_not_there(tmp_path: Path) -> None:
    _file(tmp_path, "a.toml", 'base = "b.toml"\n')
    _file(tmp_path, "b.toml", 'base = "a.toml"\n')
    with pytest.raises(ValueError, match=r"at most 8 bases.*look for a circle"):
        load_table(tmp_path / "a.toml")
    with pytest.raises(ValueError, match="Did you mean 'small'"):
        load_table(_file(tmp_path, "c.toml", 'base = "smal"\n'))
    with pytest.raises(ValueError, match=r"base is text.*3"):
        load_table(_file(tmp_path, "d.toml", "base = 3\n"))


@pytest.mark.quick
def test_overrides_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "low.toml", BASE)
    environment = {
        "CAPIBARA__TRAIN__STEPS": "5",
        "CAPIBARA__TRAIN__BATCH_SIZE": "6",
        "CAPIBARA_PRICING": "x",
        "PATH": "/",
    }
    preset = load_preset(file, ["train.steps=7", "model.blocks.mlp.activation=gelu"], environment)
    assert (preset.train.steps, preset.train.batch_size) == (7, 6)
    assert preset.model.blocks["mlp"].activation == "gelu"
    assert load_preset(file, ["train.steps=7", "train.steps=8"], {}).train.steps == 8, "the last one counts"
    with pytest.raises(ValueError, match=r"at \$CAPIBARA__TRAIN__STEP 'step'\. Did you mean 'steps'"):
        load_preset(file, environment={"CAPIBARA__TRAIN__STEP": "5"})
    with pytest.raises(ValueError, match=r"train.steps is a whole number\. Got 'many' at --set train.steps=many"):
        load_preset(file, ["train.steps=many"], environment)


def test_the_processes_own_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPIBARA__TRAIN__STEPS", "11")
    assert load_preset("dev").train.steps == 11
    assert load_preset("dev", environment={}).train.steps == 400


def test_every_shipped_file_is_read_by_itself() -> None:
    for name in preset_names():
        assert load_table(name, environment={}).values["model"]["hidden"] > 0
