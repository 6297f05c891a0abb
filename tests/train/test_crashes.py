"""What a run leaves when it is killed, out of memory or hangs: steps, stacks and sensors, in one file, as one story."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import pytest
from tests.train.test_run import tiny_run
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.observe import read_crash_story, read_recording
from capibara.train import run as runs

SETTINGS = ("log.sensor_seconds=0.05", "train.eval_every=0", "log.elsewhere=")


def _environment(as_a_reader: dict[str, str]) -> dict[str, str]:
    return {**as_a_reader, "JAX_PLATFORMS": "cpu"}


def test_a_killed_run_and_one_out_of_memory_are_told_from_one_file(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    tiny_run(tmp_path)
    out = tmp_path / "run"
    settings = (*SETTINGS, "train.steps=1000000", "train.checkpoint_every=5", f"data.cache_dir={tmp_path / 'cache'}")
    words = [word for setting in settings for word in ("--set", setting)]
    running = subprocess.Popen(
        [sys.executable, "-m", "capibara", "train", str(tmp_path / "tiny.toml"), "--out", str(out), *words],
        env=_environment(as_a_reader),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    file = out / "recordings" / "process_0.recording"
    try:
        deadline = time.monotonic() + 600  # of a machine that has much else to do
        while not (file.exists() and _is_under_way(file)):
            assert running.poll() is None, running.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.5)
    finally:
        running.send_signal(signal.SIGKILL)
        running.communicate()

    shown = CliRunner().invoke(app, ["doctor", str(out), "--save", str(tmp_path / "story.json")])
    assert shown.exit_code == 1
    assert "nothing says that it ended" in shown.output
    assert "    host: utilization " in shown.output
    assert "memory_usage" in shown.output
    [one] = read_crash_story(tmp_path / "story.json").processes
    assert one.last_step is not None
    assert one.steps[-1].step == one.last_step
    assert one.pid == running.pid
    assert all(0 < value <= 1 for value in one.sensors["host"]["memory_usage"] if value is not None)
    assert one.sensors_at(one.steps[-1].time)["memory_usage"] > 0, "the sensors at the last step"
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "story.json")]).output == shown.output

    # Nobody saw it end: the next start writes it down before it goes on in the same recording. That one runs out of
    # memory, which is then the last crash.
    crash = out / "recordings" / "crash.json"
    kept = []

    def runs_out(step: int, row: object) -> None:
        kept.append(read_crash_story(crash).processes[0])
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.")

    resumed = tiny_run(tmp_path, *SETTINGS, f"train.steps={one.last_step + 2}", "log.sensor_seconds=0")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        runs.train(resumed, out, resume=True, devices=jax.devices()[:1], on_step=runs_out)
    assert (kept[0].pid, kept[0].last_step, kept[0].sensors) == (one.pid, one.last_step, one.sensors)
    story = read_crash_story(crash)
    assert not story.ended_in_order
    assert story.autopsy is not None
    assert story.autopsy["asked_bytes"] == 4096
    assert "out of memory: " in str(story)
    assert story.processes[0].alerts[-1].startswith("ended by JaxRuntimeError: RESOURCE_EXHAUSTED")
    assert story.processes[0].sensors == {}, "log.sensor_seconds=0 takes none"


def _is_under_way(file: Path) -> bool:
    recording = read_recording(file)
    return (recording.last_step or 0) > 5 and len(recording.samples.times) > 5


@pytest.mark.quick
def test_samples_are_not_taken_more_often_than_a_monitor_can(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log\.sensor_seconds is 0\.01 or more, or 0 for none"):
        tiny_run(tmp_path, "log.sensor_seconds=0.001")


def test_a_hang_is_in_the_same_file(tmp_path: Path, as_a_reader: dict[str, str]) -> None:
    tiny_run(tmp_path)
    program = f"""
        import time
        from capibara.train.config import load_run
        from capibara.train.run import train

        def hangs_here(step, row):
            if step == 3:
                time.sleep(600)

        told = ["train.steps=9", "log.hang_seconds=8", "log.sensor_seconds=0.05", "train.eval_every=0",
                "data.cache_dir={tmp_path / "cache"}"]
        train(load_run("{tmp_path / "tiny.toml"}", told), "{tmp_path / "run"}", on_step=hangs_here)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=_environment(as_a_reader),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 43, ran.stderr
    told = json.loads((tmp_path / "run" / "recordings" / "crash.json").read_text(encoding="utf-8"))
    [process] = told["processes"]
    assert process["last_step"] == 3
    assert "made no progress" in process["reason"]
    assert any("hangs_here" in frame for frame in process["stack"])
    assert len(process["sample_times"]) > 5
    assert process["steps"][-1]["step"] == 3
