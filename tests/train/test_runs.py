"""`capibara train` as people run it: killed, told to stop, in several processes; its losses are those of a run that was
left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from capibara.train.logs import read_metrics

CONFIG = """
[model]
hidden = 32
layers = 2
vocab = 259
max_length = 32
[model.blocks.attention]
heads = 4
kv_heads = 2
[model.blocks.mlp]
ffn = 64
[train]
steps = 40
batch_size = 8
sequence_length = 32
precision = "float32"
checkpoint_every = 5
eval_every = 20
eval_batches = 1
remat = "none"
accumulate = 1
[optimizer]
learning_rate = 3e-3
warmup_steps = 4
[log]
elsewhere = ""
[data]
path = "python:topics"
"""
STEPS, EVERY = 40, 5


class Runs:
    """Starts `capibara train` on the tiny config, each run in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._finished: set[str] = set()
        (folder / "tiny.toml").write_text(CONFIG)
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
        self.environment = {
            **os.environ,
            "XLA_FLAGS": " ".join(flags),
            "CAPIBARA_CACHE_DIR": str(folder / "cache"),
            # Every start compiles the same program.
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(self, out: str, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "capibara", "train", self.folder / "tiny.toml", "--out", self.folder / out, *more],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, out: str, *more: str) -> str:
        process = self.start(out, *more)
        text, _ = process.communicate(timeout=500)
        assert process.returncode == 0, text
        return text

    def finished(self, processes: int, mesh: str) -> str:
        """The run of so many processes on a mesh of 4 devices, made once."""
        out = f"processes_{processes}_{mesh.replace(' ', '_')}"
        if out not in self._finished:
            self.finish(out, *self.several(processes, mesh))
            self._finished.add(out)
        return out

    @staticmethod
    def several(processes: int, mesh: str) -> list[str]:
        settings = [word for axis in mesh.split() for word in ("--set", f"mesh.{axis}")]
        return ["--processes", str(processes), "--devices", "4", *settings]

    def losses(self, out: str) -> list[tuple[int, float]]:
        return [(r["step"], r["loss"]) for r in self.rows(out) if "loss" in r]

    def held_out(self, out: str) -> list[tuple[int, float]]:
        return [(r["step"], r["eval_loss"]) for r in self.rows(out) if "eval_loss" in r]

    def rows(self, out: str) -> list[dict[str, Any]]:
        return read_metrics(self.folder / out / "metrics.jsonl")

    def last_step(self, out: str) -> int:
        return max((step for step, _ in self.losses(out)), default=0)

    def wait_for_step(self, process: subprocess.Popen[str], out: str, step: int) -> bool:
        """Until the run has logged the step; False where it ended first."""
        deadline = time.monotonic() + 400
        while self.last_step(out) < step:
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.005)
        return True


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("runs"))
    found.finish("alone", "--devices", "1")
    assert [step for step, _ in found.losses("alone")] == list(range(1, STEPS + 1))
    return found


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_the_same_losses_to_the_last_bit(runs: Runs, kills: int) -> None:
    out, draw, killed = f"killed_{kills}", random.Random(kills), 0
    while killed < kills:
        process = runs.start(out, "--devices", "1", *(["--resume"] if killed else []))
        before = runs.last_step(out)
        # Each kill is somewhere in what is left, and most of the run is left for later kills.
        target = before + draw.randint(1, max(1, (STEPS - 2 - before) // (kills - killed)))
        if not runs.wait_for_step(process, out, min(target, STEPS - 1)):
            break
        time.sleep(draw.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += 1
    assert killed == kills, "the run ended before it was killed so often"
    logged = runs.last_step(out)
    text = runs.finish(out, "--devices", "1", "--resume")
    restored = [
        int(line.split("restored step ")[1].split()[0]) for line in text.splitlines() if "restored step" in line
    ]
    # A save is written beside the next steps, and done before the next save: so much can be lost of steps this short.
    assert logged - (restored or [0])[0] <= 2 * EVERY
    assert runs.losses(out) == runs.losses("alone")
    assert runs.held_out(out) == runs.held_out("alone")


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(runs: Runs) -> None:
    process = runs.start("stopped", "--devices", "1")
    assert runs.wait_for_step(process, "stopped", 2)  # early: steps are short, and it must not be done before it hears
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 42, text
    assert "go on with --resume" in text
    stopped = runs.last_step("stopped")
    text = runs.finish("stopped", "--devices", "1", "--resume")
    assert f"restored step {stopped} " in text, "not a step is lost"
    assert runs.losses("stopped") == runs.losses("alone")


def test_a_folder_with_a_run_is_not_written_over(runs: Runs) -> None:
    before = (runs.folder / "alone" / "metrics.jsonl").read_bytes()
    process = runs.start("alone", "--devices", "1", "--json")
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "--resume" in json.loads(text[text.index("{") :])["error"]["fix"]
    assert (runs.folder / "alone" / "metrics.jsonl").read_bytes() == before


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("processes", "mesh"),
    [
        (2, "data=4"),
        (2, "model=4"),  # every process has all rows
        pytest.param(4, "data=4", marks=pytest.mark.slow),
        pytest.param(4, "data=2 model=2", marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_as_one(runs: Runs, processes: int, mesh: str) -> None:
    out = runs.finished(processes, mesh)
    for kind in (runs.losses, runs.held_out):
        assert [step for step, _ in kind(out)] == [step for step, _ in kind("alone")]
        for (_, mine), (_, its) in zip(kind(out), kind("alone"), strict=True):
            assert mine == pytest.approx(its, abs=1e-5)


def test_the_supervisor_restarts_all_when_one_process_is_killed(runs: Runs) -> None:
    out, left_alone = "one_of_two", runs.finished(2, "data=4")
    process = runs.start(out, *runs.several(2, "data=4"))
    assert runs.wait_for_step(process, out, 12)
    os.kill(_child_with(process.pid, "CAPIBARA_PROCESS_ID=1"), signal.SIGKILL)
    text, _ = process.communicate(timeout=500)
    assert process.returncode == 0, text
    assert "process 1 ended" in text
    assert "restart 1 of all 2 processes" in text
    assert "restored step" in text
    assert runs.losses(out) == runs.losses(left_alone)


def _child_with(parent: int, variable: str) -> int:
    """The child process of `parent` that has this in its environment."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            ppid = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue  # it ended meanwhile, or is somebody else's
        if ppid == parent and variable.encode() in environment:
            return int(entry.name)
    raise AssertionError(f"no child of {parent} with {variable}")
