"""`capibara profile`: what it prints, what it refuses, and its gate."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import capibara
from capibara.cli.main import app

runner = CliRunner()

PROGRAM = """
import sys
import jax
import jax.numpy as jnp

extra = int(sys.argv[1]) if len(sys.argv) > 1 else 0
assert __name__ == "__main__"

@jax.jit
def step(x, w):
    with jax.named_scope("body"):
        x = x @ w
    with jax.named_scope("head"):
        for _ in range(2 + extra):
            x = x @ w
    return x

x = w = jnp.eye(256)
for _ in range(30):
    x = step(x, w)
print("the program's own words")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("steps.py").write_text(PROGRAM)
    return "steps.py"


@pytest.fixture
def times_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are made of the work: a busy machine has its own."""
    from capibara.observe.profiler import session

    measured = session._op_row

    def by_work(*arguments: Any) -> Any:
        row = measured(*arguments)
        seconds = row.flops / 1e9 / max(row.count, 1)
        return dataclasses.replace(row, seconds=seconds * row.count, best_seconds=seconds, median_seconds=seconds)

    monkeypatch.setattr(session, "_op_row", by_work)


def ran(*arguments: str, code: int = 0) -> Any:
    answer = runner.invoke(app, ["profile", *arguments])
    assert answer.exit_code == code, answer.output
    return answer


@pytest.mark.quick
def test_a_script_its_arguments_and_json(script: str) -> None:
    before = list(sys.argv), list(sys.path)
    answer = ran(script, "1", "--json")
    document = json.loads(answer.stdout)
    assert "own words" in answer.stderr
    (program,) = [one for one in document["profile"]["programs"] if one["name"] == "jit_step"]
    assert (program["runs"], program["flops"]) == (30, 30 * 4 * 2 * 256**3)
    assert document["profile"]["trace_file"] is None  # not kept
    assert document["against"] is None
    assert (sys.argv, sys.path) == before


def test_a_table_for_people(script: str, tmp_path: Path, times_of_work: None) -> None:
    answer = ran(script, "--trace-dir", "kept", "--top", "1")
    assert "runs of" in answer.stdout
    assert "jit(step)/" in answer.stdout
    assert "... and" in answer.stdout
    assert list((tmp_path / "kept").rglob("*.xplane.pb"))


def test_what_is_in_the_way_is_said(tmp_path: Path) -> None:
    """A function that is compiled anew in every step of a loop."""
    script = tmp_path / "again.py"
    script.write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef grows(x):\n    return (x * 2).sum()\n\n\n"
        "step = jax.jit(grows)\nfor number in range(6):\n    step(jnp.ones((number + 1, 3)))\n"
    )
    document = json.loads(ran(str(script), "--json").stdout)
    (told,) = [one for one in document["bottlenecks"] if one["kind"] == "recompilation"]
    assert "was compiled 6 times" in told["description"]
    shown = " ".join(ran(str(script)).stdout.split())
    assert "in the way (recompilation): grows at" in shown
    assert "make the jitted function once" in shown


def test_a_program_may_ask_for_devices_first(tmp_path: Path) -> None:
    """Which jax takes before its backends are up only; in a process of its own, for in this one they are."""
    script = tmp_path / "devices.py"
    script.write_text(f"import jax\njax.config.update('jax_num_cpu_devices', 2)\n{PROGRAM}print(len(jax.devices()))")
    command = [sys.executable, "-m", "capibara", "profile", str(script), "--json"]
    source = str(Path(capibara.__file__).parents[1])
    variables = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**variables, "PYTHONPATH": source}, timeout=300
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.strip().endswith("2")
    found = json.loads(answer.stdout)["profile"]
    assert [one["runs"] for one in found["programs"] if one["name"] == "jit_step"] == [30]
    # The trace began with the first call.
    assert [one["median_seconds"] > 0 for one in found["ops"] if one["source"].endswith("body/dot_general")] == [True]


def test_counting_has_no_times(script: str) -> None:
    document = json.loads(ran(script, "--counting", "--json").stdout)["profile"]
    assert document["mode"] == "counting"
    assert document["metrics"]["comm_overhead_ms"] is None
    assert document["ops"]
    assert all(op["seconds"] is None for op in document["ops"])


def test_a_module(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    document = json.loads(ran("-m", "steps", "--json").stdout)["profile"]
    assert document["name"] == "-m steps"
    assert any(program["name"] == "jit_step" for program in document["programs"])


def test_an_operation_that_became_slower_is_named(script: str, times_of_work: None) -> None:
    """Half as much work again in one of two."""
    Path("base.json").write_text(ran(script, "--repeats", "3", "--json").stdout)
    kept = json.loads(Path("base.json").read_text())["profile"]
    assert kept["repeats"] == 3
    assert all(len(one["seconds"]) == 3 for one in kept["op_times"])
    answer = ran(script, "--against", "base.json", "--trace-dir", "kept")
    assert "none of 2 operations is slower" in answer.stdout
    assert answer.stdout.count("own words") == 1  # the repeats' go to stderr
    assert answer.stderr.count("own words") == 3
    assert len(list(Path("kept").rglob("*.xplane.pb"))) == 1
    answer = ran(script, "1", "--against", "base.json", "--json", code=1)
    document = json.loads(answer.stdout)
    (slow,) = document["against"]["slower"]
    assert slow["op"] == "jit(step)/head/dot_general"
    assert slow["slower_by"] == pytest.approx(0.5)
    assert document["against"]["repeats"] == 3  # as the base was taken
    assert document["error"]["kind"] == "slower"
    assert "head" in document["error"]["message"]
    assert ran(script, "1", "--against", "base.json", "--tolerance", "0.6").exit_code == 0


def test_on_a_machine_that_is_much_busier_it_is_taken_once_more(
    script: str, times_of_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capibara.observe.profiler import compare as comparing

    Path("base.json").write_text(ran(script, "--repeats", "3", "--json").stdout)
    paces = iter((1.2, 1.8, 1.7))
    compare = comparing.compare
    monkeypatch.setattr(comparing, "compare", lambda *args: dataclasses.replace(compare(*args), pace=next(paces)))
    assert "once more" not in ran(script, "--against", "base.json").stderr
    answer = ran(script, "--against", "base.json")  # and no third time
    assert "took 1.80 times as long" in answer.stderr
    assert "operations took 1.70 times as long" in answer.stdout
    assert (answer.stdout + answer.stderr).count("own words") == 8


def test_a_first_run_in_a_process_does_not_count(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.observe.profiler import session

    runs: list[int] = []
    read = session.read_trace

    def slow_first(file: Path) -> Any:
        runs.append(len(runs))
        found = read(file)
        longer = 10.0 if len(runs) == 1 else 1.0
        rows = [dataclasses.replace(row, start=0.0, end=longer * 1e-3) for row in found.rows]
        return dataclasses.replace(found, rows=rows)

    monkeypatch.setattr(session, "read_trace", slow_first)
    document = json.loads(ran(script, "--repeats", "3", "--json").stdout)["profile"]
    assert len(runs) == 4
    assert {tuple(one["seconds"]) for one in document["op_times"] if "body" in one["op"]} == {(1e-3,) * 3}


def test_what_is_refused(script: str, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"profile": {"format": "capibara-prof')
    once = json.loads(ran(script, "--counting", "--json").stdout)
    (tmp_path / "once.json").write_text(json.dumps(once))
    once["profile"].update(mode="tracing", repeats=3)
    (tmp_path / "base.json").write_text(json.dumps(once))
    (tmp_path / "once.py").write_text("open('there', 'x')")
    (tmp_path / "fails.py").write_text("raise RuntimeError('on purpose')")
    (tmp_path / "ends.py").write_text("import sys; sys.exit(3)")
    for arguments, code, said in [
        (["train.sh"], 2, "Python file"),
        (["nvidia-smi"], 2, "Python file"),
        (["nowhere.py"], 2, "not there"),
        ([], 2, "named"),
        (["-m", "no_such_module"], 2, "import"),
        ([script, "--against", "cut.json"], 2, "cut short"),
        ([script, "--against", "once.json"], 2, "--repeats 8"),
        ([script, "--against", "base.json", "--repeats", "4"], 2, "taken alike"),
        ([script, "--repeats", "2"], 2, "3 repeats or more"),
        ([script, "--repeats", "3", "--counting"], 2, "--counting"),
        (["once.py", "--repeats", "3"], 1, "repeat 1 of 3"),
        ([script, "--against", "nowhere.json"], 2, "is there"),
        ([script, "--against", "cut.json", "--counting"], 2, "--counting"),
        (["fails.py"], 1, "on purpose"),
        (["ends.py"], 1, "ended with 3"),
    ]:
        document = json.loads(ran(*arguments, "--json", code=code).stdout)
        assert said in document["error"]["message"], document
        assert document["error"]["exit_code"] == code


@pytest.mark.quick
@pytest.mark.parametrize(
    ("installed", "before", "after"),
    [
        (True, "", "--xla_gpu_enable_command_buffer="),
        (True, "--xla_dump_to=d", "--xla_dump_to=d --xla_gpu_enable_command_buffer="),
        (True, "--xla_gpu_enable_command_buffer=FUSION", "--xla_gpu_enable_command_buffer=FUSION"),
        (False, "--xla_dump_to=d", "--xla_dump_to=d"),
    ],
)
def test_a_gpu_is_traced_without_command_buffers(
    monkeypatch: pytest.MonkeyPatch, installed: bool, before: str, after: str
) -> None:
    from capibara.cli import profile

    monkeypatch.setattr(profile.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setenv("XLA_FLAGS", before)
    profile._without_command_buffers()
    assert os.environ["XLA_FLAGS"] == after
