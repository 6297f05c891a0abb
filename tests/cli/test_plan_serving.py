"""`capibara plan MODEL --serve`: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capibara.cli.main import app

runner = CliRunner()
SMALL = ["--max-sequences", "1", "--max-batch-tokens", "64", "--prompt", "48", "--output", "16"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path / "cache"))


def test_a_report() -> None:
    made = runner.invoke(app, ["plan", "dev", "--serve", "--on", "h200", *SMALL], env={"COLUMNS": "200"})
    assert made.exit_code == 0, made.output
    for words in (
        "dev served on h200 (1 chip, one engine). Predicted, not run.",
        "48 tokens in, 16 out, no target",
        "FITS: of 104.25 GiB a chip",
        "HOLDS 1 user:",
        "a million tokens out",
        "3.5 USD a chip-hour (on demand, us-central1, 2026-11-15)",
        "A step of single tokens then: ",
        "By users at a time, predicted",
    ):
        assert words in made.stdout, made.stdout


def test_json_of_one_slice_and_of_several() -> None:
    asked = ["plan", "dev", "--serve", *SMALL, "--target-latency-ms", "50", "--weights", "int8", "--page-size", "32"]
    one = runner.invoke(app, [*asked, "--on", "h200", "--json"])
    assert one.exit_code == 0, one.output
    document = json.loads(one.stdout)
    assert (document["users"], document["predicted"], document["target_latency_ms"]) == (1, True, 50)
    assert (document["engine"]["weights"], document["cache"]["page_size"]) == ("int8", 32)
    assert document["memory"]["weights"] < 0.5 * document["memory"]["loaded"]
    assert document["held"]["tokens_out_per_second"] > 0
    both = runner.invoke(app, ["plan", "dev", "--serve", "--on", "h200, v4-8", *SMALL], env={"COLUMNS": "200"})
    lines = [line.split() for line in both.stdout.splitlines()]
    assert [line[:3] for line in lines if line and line[0] in ("h200", "v4-8")] == [
        ["h200", "1", "1"],
        ["v4-8", "4", "4"],
    ]


def test_what_cannot_be_is_said_with_exit_code_3() -> None:
    asked = ["plan", "dev", "--serve", "--on", "h200", *SMALL]
    fast = runner.invoke(app, [*asked, "--target-latency-ms", "0.001", "--json"])
    assert fast.exit_code == 3
    document = json.loads(fast.stdout)
    assert document["error"]["exit_code"] == 3
    assert "is impossible on h200" in document["error"]["message"]
    assert f"{document['best_ms']:.2f} ms" in document["error"]["message"]
    large = runner.invoke(app, [*asked, "--memory-limit", "0.001"], env={"COLUMNS": "200"})
    assert large.exit_code == 3
    assert "DOES NOT FIT: The cache holds one sequence" in large.stdout


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--serve", "--train"], "--train with it"),
        (["--serve", "--target", "memory"], "--target with it"),
        (["--serve", "--trace", "--prompt", "8"], "--trace and --prompt"),
        (["--prompt", "8"], "add --serve"),
        (["--serve", "--output", "4000"], "context of 512 tokens"),
        (["--serve", "--weights", "int4"], "Unknown weights"),
        (["--serve", "--sampling", "beam"], "form of drawing"),
        (["--serve", "--on", "h200,nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_said_with_exit_code_2(options: list[str], message: str) -> None:
    made = runner.invoke(app, ["plan", "dev", *options])
    assert made.exit_code == 2, made.output
    assert message in made.output
