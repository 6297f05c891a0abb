"""`capibara doctor`: what is wrong and the fix, in words and as JSON, exit code 1; the story of a run's files."""

from __future__ import annotations

import json
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


def test_a_machine_that_is_well_and_one_with_fewer_devices_than_it_should_have() -> None:
    shown = runner.invoke(app, ["doctor", "--memory-share", "0.0001", "--json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert told["healthy"] is told["interconnect_ok"] is True
    assert told["findings"] == []
    assert "error" not in told
    shown = runner.invoke(app, ["doctor", "--expected-devices", "64"])
    assert shown.exit_code == 1
    assert "WRONG: 32 devices are there and 64 should be" in shown.output
    assert "memory keeps what is written" in shown.output


@pytest.mark.quick
def test_the_story_of_a_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recordings", 0, 2)
    recorder.step(41, seconds=0.5, loss=2.0)
    recorder.phase("step")
    recorder.dump_stacks("process 0 made no progress for 60.0 s")
    shown = runner.invoke(app, ["doctor", str(tmp_path)])
    assert shown.exit_code == 1
    assert "the last finished step is 41" in shown.output
    assert "after step 41 in 'step': was cut off" in shown.output
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
