"""docs/plan.md: its files are accepted, its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models.test_preset import IN_THE_STEP
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.models.preset import load_preset, preset_names
from capibara.prices.table import price_table

TEXT = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def test_its_prices_are_read(tmp_path: Path) -> None:
    (block,) = _blocks("toml")
    file = tmp_path / "pricing.toml"
    file.write_text(block, encoding="utf-8")
    assert price_table(file).price("v4", kind="committed_1y").usd == 2.0


def test_it_names_what_a_plan_reads_of_a_preset_and_every_preset() -> None:
    for key in ("model", "train", "optimizer", *IN_THE_STEP):
        assert f"`{key}`" in TEXT, key
    for name in preset_names():
        assert f"`{name}`" in TEXT
    assert load_preset(Path(__file__).parents[2] / "examples" / "plan" / "small.toml").model.layers == 12


def test_every_option_it_names_is_one() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    commands = "\n".join(line.partition("#")[0] for line in TEXT.splitlines() if "capibara plan" in line)
    options = set(re.findall(r"`(--[a-z-]+)", TEXT)) | set(re.findall(r"(--[a-z-]+)", commands))
    assert len(options) > 10
    for option in options:
        assert option in shown, f"{option} is in the guide and not in the command"
