"""`capibara train` and `capibara generate`: a tiny run, its folder, going on with it, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.memory.autopsy import autopsy
from capibara.train import run
from capibara.train.logs import read_metrics
from capibara.train.report import read_lives

TINY = (
    "model.hidden=16", "model.layers=1", "model.max_length=64", "model.blocks.attention.heads=2",
    "model.blocks.mlp.ffn=32", "train.batch_size=2", "train.sequence_length=16", "train.steps=4",
    "train.checkpoint_every=2", "train.eval_every=0", "train.eval_batches=1", "optimizer.warmup_steps=1", "log.every=1",
    "data.workers=0", "data.prefetch=0", "train.remat=none", "train.accumulate=1", "log.elsewhere=v4-8",
)  # fmt: skip


def _settings(*more: str) -> list[str]:
    return [word for setting in (*TINY, *more) for word in ("--set", setting)]


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the devices of this one are 32, and were counted long ago."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "CAPIBARA_CACHE_DIR": str(folder),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
    }
    return subprocess.run(
        [sys.executable, "-m", "capibara", *words], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run of four steps on two devices: its folder, the summary it printed, and what it told meanwhile."""
    base = tmp_path_factory.mktemp("runs")
    ran = _run(base, "train", "dev", "--devices", "2", "--out", str(base / "tiny"), "--json", *_settings())
    assert ran.returncode == 0, ran.stderr
    return base / "tiny", json.loads(ran.stdout), ran.stderr


def test_a_second_start_compiles_nothing(trained: tuple[Path, dict[str, Any], str]) -> None:
    folder, first, told = trained
    assert first["compiled"] > 5
    assert first["from_disk"] == 0
    assert f"{first['first_step']['compiled']} programs compiled, 0 from disk" in told
    again = ("train", "dev", "--devices", "2", "--out", f"{folder}-again", "--json")
    ran = _run(folder.parent, *again, *_settings("log.elsewhere="))
    assert ran.returncode == 0, ran.stderr
    second = json.loads(ran.stdout)
    assert (second["compiled"], second["from_disk"]) == (0, first["compiled"])
    assert (second["loss"], second["eval_loss"]) == (first["loss"], first["eval_loss"])


@pytest.mark.quick
def test_a_run_fills_its_folder_and_says_how_it_went(trained: tuple[Path, dict[str, Any], str]) -> None:
    folder, summary, told = trained
    assert summary["step"] == 4
    assert summary["first_step"]["cpu_seconds"] > 0
    assert summary["folder"] == str(folder)
    assert 0 < summary["loss"] < 8
    assert 0 < summary["eval_loss"] < 8
    assert summary["tokens_per_second"] > 0
    page = Path(summary["report"]).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "On v4-8, predicted" in page
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] == summary["loss"]
    (life,) = read_lives(folder)
    assert (life.step, life.devices, life.simulated, life.ended["step"]) == (0, 2, True, 4)
    assert {"attention", "cross_entropy", "norm"} <= {entry["op"] for entry in life.kernels}
    assert life.memory is not None
    assert life.memory["arguments"] > 0
    assert len(life.ended["sample"]) == 2
    assert "step 1: loss" in told
    # The layout is planned for chips that are not here: what their kernels refuse is not said.
    assert "instead of" not in told
    assert "WARNING" not in told


@pytest.mark.quick
def test_a_folder_is_one_runs_own_and_bad_keys_are_refused(trained: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, _ = trained
    taken = CliRunner().invoke(app, ["train", "dev", "--out", str(folder), *_settings()])
    assert taken.exit_code == 2
    assert "--resume" in taken.output
    assert (folder / "metrics.jsonl").exists()

    strange = CliRunner().invoke(app, ["train", "dev", "--out", str(folder / "b"), "--set", "train.step=3", "--json"])
    assert strange.exit_code == 2
    assert "Did you mean 'steps'?" in json.loads(strange.stdout)["error"]["message"]
    wrong = CliRunner().invoke(app, ["train", "dev", "--out", str(folder / "b"), "--set", "data.pack=streams"])
    assert wrong.exit_code == 2
    assert "'stream'" in wrong.output
    # What the report at the end would be told is looked at first.
    misspelt = CliRunner().invoke(app, ["train", "dev", "--out", str(folder / "b"), "--set", "log.elsewhere=v4-33"])
    assert misspelt.exit_code == 2
    assert "v4-33" in misspelt.output
    assert not (folder / "b").exists()


def test_a_run_goes_on_and_writes_text(trained: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, _ = trained
    base = folder.parent
    before = read_metrics(folder / "metrics.jsonl")
    settings = _settings("train.steps=6", "log.elsewhere=")
    ran = _run(base, "train", "dev", "--devices", "1", "--out", str(folder), "--resume", *settings)
    assert ran.returncode == 0, ran.stderr
    assert "restored step 4" in ran.stderr
    assert "step 6 of 6" in ran.stdout
    assert "after step 4" in ran.stdout
    assert "On v4-8" not in ran.stdout
    rows = read_metrics(folder / "metrics.jsonl")
    assert rows[: len(before)] == before
    assert [row["step"] for row in rows[len(before) :] if "loss" in row] == [5, 6]
    assert [(life.step, life.devices) for life in read_lives(folder)] == [(0, 2), (4, 1)]

    wrote = _run(base, "generate", str(folder), "--prompt", "The ", "--max-tokens", "5", "--json")
    assert wrote.returncode == 0, wrote.stderr
    document = json.loads(wrote.stdout)
    assert 1 <= len(document["tokens"]) <= 5
    assert document["prompt"] == "The "


@pytest.mark.slow
def test_the_demonstration_kills_its_run_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    settings = _settings("train.steps=60", "train.checkpoint_every=20")
    ran = _run(tmp_path, "demo", "--devices", "2", "--out", str(folder), "--json", *settings)
    assert ran.returncode == 0, ran.stderr
    assert "killed with SIGKILL" in ran.stderr
    assert json.loads(ran.stdout)["step"] == 60
    lives = read_lives(folder)
    assert len(lives) == 2
    assert not lives[0].ended
    assert lives[1].step >= 20
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row] == list(range(1, 61))
    again = _run(tmp_path, "demo", "--out", str(folder))
    assert again.returncode == 2
    assert "another folder" in again.stderr


@pytest.mark.quick
@pytest.mark.parametrize("json_asked", [False, True])
def test_out_of_memory_is_3_with_what_lay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_asked: bool
) -> None:
    def runs_out(*_: Any, **__: Any) -> None:
        with autopsy():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.")

    monkeypatch.setattr(run, "train", runs_out)
    words = ["train", "dev", "--out", str(tmp_path / "run"), *(["--json"] if json_asked else [])]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 3
    if json_asked:
        error = json.loads(ran.stdout)["error"]
        assert (error["kind"], error["exit_code"]) == ("out_of_memory", 3)
        assert "asked for: 4096 bytes" in error["message"]
    else:
        assert "asked for: 4096 bytes" in ran.stderr
        assert "in use on cpu:0" in ran.stderr
        assert "Traceback" not in ran.stderr
