"""`capibara doctor`: what is wrong and the fix, in words and as JSON, exit code 1; the story of a run's files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.observe import Recorder

runner = CliRunner()


@pytest.mark.quick
def test_a_missing_host() -> None:
    shown = runner.invoke(app, ["doctor", "--hosts", "127.0.0.1,no-such-host.invalid", "--host-deadline-s", "2"])
    assert shown.exit_code == 1, shown.output
    assert "WRONG: Host no-such-host.invalid, number 1 of 2, is missing: its name is not known" in shown.output
    assert "Fix: start or replace no-such-host.invalid" in shown.output
    assert "not run: devices:" in shown.output
    assert "Nothing is wrong" not in shown.output


@pytest.mark.quick
def test_a_missing_host_as_json() -> None:
    shown = runner.invoke(app, ["doctor", "--hosts", "no-such-host.invalid", "--json"])
    assert shown.exit_code == 1
    told = json.loads(shown.stdout)
    assert told["healthy"] is told["all_chips_online"] is False
    assert told["memory_healthy"] is None
    assert [one["subject"] for one in told["findings"]] == ["host no-such-host.invalid"]
    assert told["error"]["exit_code"] == 1
    assert told["error"]["fix"] == told["findings"][0]["fix"]


def test_its_options_reach_the_check(as_a_reader: dict[str, str], tmp_path: Path) -> None:
    """In a process of its own, whose devices are as many as it says."""
    words = ["--devices", "2", "--expected-devices", "3", "--memory-share", "0.000001", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "capibara", "doctor", *words],
        env={**as_a_reader, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    told = json.loads(ran.stdout)
    assert [one["text"] for one in told["findings"]] == ["2 devices are there and 3 should be"]
    assert told["memory_healthy"] is told["interconnect_ok"] is told["host_ok"] is True
    assert len(told["details"]["devices"]) == 2
    assert max(told["details"]["memory_bytes"].values()) < 1 << 20


@pytest.mark.quick
def test_the_story_of_a_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recordings", 0, 2)
    recorder.step(41, seconds=0.5, loss=2.0)
    recorder.phase("step")
    recorder.dump_stacks("process 0 made no progress for 60.0 s")
    shown = runner.invoke(app, ["doctor", str(tmp_path)])
    assert shown.exit_code == 1
    assert "the last finished step is 41" in shown.output
    assert "after step 41 in 'step': nothing says that it ended" in shown.output
    assert "missing: process 1 left no recording here" in shown.output
    shown = runner.invoke(app, ["doctor", str(recorder.file), "--json"])
    assert shown.exit_code == 1
    told = json.loads(shown.stdout)
    assert (told["last_step"], told["missing"]) == (41, ["process 1 left no recording here"])
    assert told["processes"][0]["stack"]
    assert told["error"]["message"] == "process 1 left no recording here"


@pytest.mark.quick
def test_a_run_that_ended_in_order(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.step(3)
    shown = runner.invoke(app, ["doctor", str(tmp_path)])
    assert shown.exit_code == 0
    assert "all ended in order" in shown.output


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["runs/none"], "A story is told from process_0.recording"),
        (["runs/none", "--hosts", "a"], "--hosts is for a machine"),
        (["--hosts", "worker:http"], "A host is NAME or NAME:PORT"),
        (["--memory-share", "2"], "memory_share is above 0"),
        (["--max-temperature", "-3"], "max_temperature is in degrees"),
        (["--deadline-s", "0"], "deadline_s is above 0"),
    ],
)
def test_bad_input(words: list[str], text: str) -> None:
    shown = runner.invoke(app, ["doctor", *words])
    assert shown.exit_code == 2, shown.output
    assert text in shown.output
