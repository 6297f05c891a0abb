"""`capibara cost`: prices, the cheapest offer, and exit code 3 where nothing keeps to the limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capibara.cli.main import app

runner = CliRunner()

PROGRAM = """
import jax
import jax.numpy as jnp

def product(x, w):
    return x @ w

def shapes():
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    return {"args": (shape, shape), "tokens": 1024}
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return "program.py:product"


@pytest.mark.quick
def test_prices(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[[price]]\nchip = "v4"\nregion = "home"\nflex_start = 1.25\ndate = "2026-01-02"\n')
    shown = runner.invoke(app, ["cost", "--pricing", str(mine)])
    assert shown.exit_code == 0, shown.output
    assert "3.22" in shown.stdout
    assert "1.25" in shown.stdout
    document = json.loads(runner.invoke(app, ["cost", "--json"]).stdout)
    assert {"chip": "tpu_v4", "region": "us-central2", "kind": "spot", "usd": 0.9215}.items() <= next(
        row for row in document["prices"] if (row["chip"], row["kind"]) == ("tpu_v4", "spot")
    ).items()


def test_a_job_within_limits(target: str) -> None:
    made = runner.invoke(app, ["cost", target, "--on", "v4-8,v4-16", "--steps", "1000000", "--json"])
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)
    offers = document["offers"]
    assert [offer["dollars"] for offer in offers] == sorted(offer["dollars"] for offer in offers)
    assert document["best"] == offers[0]
    assert {offer["kind"] for offer in offers} == {"on_demand", "spot"}
    tight = str(0.5 * min(offer["hours"] for offer in offers))
    nothing = runner.invoke(app, ["cost", target, "--on", "v4-8", "--tokens", "1024000000", "--deadline", tight])
    assert nothing.exit_code == 3, nothing.output
    assert "over the deadline" in nothing.stdout


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "3"], "--steps is for a job"),
        (["llama-1b", "--cost-model", "tpu_v4_price"], "Unknown cost model"),
        (["llama-1b", "--max-cost-per-hour", "-1"], "max_cost_per_hour"),
        (["llama-1b", "--target", "speed"], "'cost_efficiency', 'deadline'"),
        (["program.py:product"], "A job has a length"),
        (["--pricing", "holes.toml"], "A row has a price"),
    ],
)
def test_bad_input(arguments: list[str], words: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "holes.toml").write_text('[[price]]\nchip = "v4"\nregion = "us-central2"\n')
    made = runner.invoke(app, ["cost", *arguments, "--json"])
    assert made.exit_code == 2, made.output
    assert words in json.loads(made.stdout)["error"]["message"]
