"""docs/models.md: every key of every table is in its section, its files are accepted, its presets are all there."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from capibara.models.blocks import KINDS
from capibara.models.config import ModularModelConfig, TpuSettings
from capibara.models.preset import MeshSettings, OptimizerSettings, TrainSettings, load_preset, preset_names

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def _part(start: str, end: str) -> str:
    return TEXT[TEXT.index(start) + 1 :].partition(end)[0]


PARTS = {
    ModularModelConfig: _part("\n`[model]`:", "\n`attention`:"),
    **{kind: _part(f"\n`{name}`:", "\n`") for name, kind in KINDS.items()},
    TpuSettings: _part("\n`[tpu]`", "\n##"),
    TrainSettings: _part("\n`[train]`:", "\n`[optimizer]`"),
    OptimizerSettings: _part("\n`[optimizer]`", "\n\n"),
    MeshSettings: _part("\n`[mesh]`", "\n\n"),
}


@pytest.mark.quick
def test_it_has_every_key() -> None:
    for table, text in PARTS.items():
        for field in dataclasses.fields(table):
            # The table [tpu] is beside [model] in a file.
            assert f"`{field.name}`" in text or field.name == "tpu", f"{table.__name__}.{field.name}"


@pytest.mark.quick
def test_its_keys_are_keys() -> None:
    for table, text in PARTS.items():
        names = {field.name for field in dataclasses.fields(table)}
        for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE):
            assert set(re.findall(r"`(\w+)`", row)) <= names, f"{table.__name__}: {row}"


def test_it_has_every_preset_with_its_size() -> None:
    for name in preset_names():
        assert f"`{name}`" in _part("## Presets", "\n## "), name
    sizes = re.findall(r"^\| `(.+?)` \| ([\d.]+) ([MB]) \|", TEXT, re.MULTILINE)
    assert len(sizes) >= 6
    for name, size, unit in sizes:
        exact = load_preset(name).model.parameters / {"M": 1e6, "B": 1e9}[unit]
        assert f"{exact:.{len(size.partition('.')[2])}f}" == size, name


def test_its_files_are_accepted(tmp_path: Path) -> None:
    files = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert len(files) == 3
    for number, text in enumerate(files):
        assert tomllib.loads(text)
        file = tmp_path / f"{number}.toml"
        file.write_text(text, encoding="utf-8")
        assert load_preset(file).model.layers in (12, 16)
    hybrid = load_preset(tmp_path / "0.toml").model
    assert hybrid.parameters == load_preset("hybrid").model.parameters
