"""How commands fail: exit codes, and JSON where JSON was asked for."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from capibara.cli import failures
from capibara.cli.main import app
from capibara.errors import TPUError, parts_of, rule_error, unknown_name
from capibara.kernels.core import op as ops
from capibara.kernels.core.op import Op, register, unregister
from capibara.kernels.core.spec import Case, Implementation
from capibara.train import exit_codes

runner = CliRunner()


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from _commands(one, (*path, name))
        else:
            yield (*path, name), one


COMMANDS = dict(_commands(typer.main.get_command(app)))


@pytest.mark.quick
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_json_and_fails_in_json(path: tuple[str, ...]) -> None:
    assert "--json" in {option for one in COMMANDS[path].params for option in one.opts}
    made = runner.invoke(app, [*path, "--no-such-option", "--json"])
    assert made.exit_code == 2
    assert made.stderr == ""
    error = json.loads(made.stdout)["error"]
    assert "--no-such-option" in error["message"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert error["fix"].endswith(f"{' '.join(path)} --help")


def test_there_are_all_the_commands() -> None:
    assert {("plan",), ("tour",), ("kernels", "list"), ("kernels", "compile")} <= set(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "rule", "got", "fix"),
    [
        (["kernels", "explain", "gemm", "f32[2,3]", "f32(3,5)"], "An operand is", "'f32(3,5)'", "write the type"),
        (["kernels", "bench", "gmm"], "The choices of op are", "'gmm'", "use 'gemm'"),
        (["kernels", "tune", "gemm", "--case", "nope"], "The choices of case of gemm are", "'nope'", "use "),
        (["kernels", "compile", "--for", "v4-33"], "The number in a v4 slice's name", "'v4-33'", "use v4-32"),
        (["kernels", "list", "--on", "v44"], "The choices of chip are", "'v44'", "use "),
        (["plan"], "A plan is for a TARGET", "none", "name "),
        (["tour", "--import", "no module"], "What is imported is a module or a file", "'no module'", "write "),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_mistake_under_json(arguments: list[str], rule: str, got: str, fix: str) -> None:
    made = runner.invoke(app, [*arguments, "--json"])
    assert made.exit_code == 2
    assert made.stderr == ""
    error = json.loads(made.stdout)["error"]
    assert error["rule"].startswith(rule)
    assert got in error["got"]
    assert error["fix"].startswith(fix)
    assert (error["kind"], error["exit_code"]) == ("bad_input", 2)
    plain = runner.invoke(app, arguments)
    assert plain.stderr == f"capibara: {error['message']}\n"


def test_what_is_no_mistake_of_the_callers_fails_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> Any:
        def lookup(name: str) -> Any:
            raise error

        return lookup

    monkeypatch.setattr(ops, "lookup", raising(TPUError("The chip is on fire.")))
    made = runner.invoke(app, ["kernels", "explain", "gemm", "f32[2,2]", "--json"])
    assert made.exit_code == 1
    assert json.loads(made.stdout)["error"]["message"] == "The chip is on fire."
    # A fault of the library's own: in JSON what it was, and its traceback where tracebacks go.
    monkeypatch.setattr(ops, "lookup", raising(KeyError("gone")))
    made = runner.invoke(app, ["kernels", "explain", "gemm", "f32[2,2]", "--json"])
    assert isinstance(made.exception, KeyError)
    error = json.loads(made.stdout)["error"]
    assert (error["kind"], error["message"], error["exit_code"]) == ("internal", "KeyError: 'gone'", 1)


@pytest.fixture
def wrong_op() -> Iterator[Op]:
    tags = frozenset({"bench", "tune", "test"})
    made = Op(
        "thirds", family="test", reference=lambda x: x / 2, operands=("x",),
        cases=(Case("small", ((64,),), "float32", tags=tags),),
    )  # fmt: skip
    made.implement(Implementation("xla", lambda x: x / 3))
    yield register(made)
    unregister("thirds")


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_wrong_result_is_in_the_document(command: str, wrong_op: Op) -> None:
    arguments = ["--samples", "1"] if command == "bench" else []
    made = runner.invoke(app, ["kernels", command, "thirds", *arguments, "--json"])
    assert made.exit_code == 1
    document = json.loads(made.stdout)
    assert (document["error"]["kind"], document["error"]["exit_code"]) == ("failed", 1)
    assert "small" in document["error"]["message"]
    assert document["rows" if command == "bench" else "reports"], "the results are there beside the error"


def test_what_follows_two_dashes_is_no_option() -> None:
    assert failures.json_asked(["kernels", "list", "--json"])
    assert not failures.json_asked(["kernels", "explain", "gemm", "--", "--json"])


def test_exit_codes_are_in_the_help() -> None:
    said = " ".join(runner.invoke(app, ["--help"]).stdout.split())
    for code in (failures.Code.FAILED, failures.Code.BAD_INPUT, failures.Code.DOES_NOT_FIT, failures.Code.ONLY_LOWERED):
        assert f"; {code.value} " in said


def test_the_parts_of_an_error() -> None:
    error = rule_error("Rows are even.", 3, "pad them.")
    assert str(error) == "Rows are even. Got 3. Fix: pad them."
    assert type(error) is ValueError
    assert parts_of(pickle.loads(pickle.dumps(error))) == {"rule": "Rows are even", "got": "3", "fix": "pad them"}
    assert parts_of(unknown_name("colour", "rad", ["red", "blue"]))["fix"] == "use 'red'"
    assert parts_of(ValueError("as it is")) == {"rule": None, "got": None, "fix": None}


def test_a_jaxlib_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").write_text("raise ImportError('libxla.so: cannot open shared object file')")
    ours = str(Path(failures.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), ours])}
    command = [sys.executable, "-m", "capibara", "tour", "--json"]
    made = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 1
    assert made.stderr == ""
    told = json.loads(made.stdout)["error"]
    assert "libxla.so" in told["message"]
    assert told["fix"] == "pip install --upgrade --force-reinstall jax jaxlib"
    shown = subprocess.run(command[:-1], env=env, capture_output=True, text=True, check=False)
    assert (shown.returncode, len(shown.stderr.splitlines())) == (1, 1), shown.stderr


@pytest.mark.quick
def test_every_way_a_training_process_ends_is_a_code() -> None:
    ends = {name: getattr(exit_codes, name) for name in exit_codes.__all__ if name != "FINAL"}
    assert sorted(ends.values()) == sorted(code for code in failures.Code if code != failures.Code.INTERRUPTED)
    for code in ends.values():
        assert f"{code} " in failures.CODES
