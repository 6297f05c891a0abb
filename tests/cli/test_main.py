"""The application: light to start, one line for a mistake."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from capibara import __version__
from capibara.cli.main import app

runner = CliRunner()


@pytest.mark.quick
def test_help_does_not_import_jax() -> None:
    code = (
        "import sys\n"
        "from capibara.cli.main import app\n"
        "try:\n"
        "    app(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code in (0, None), stop.code\n"
        "heavy = {'jax', 'jaxlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for arguments in (["--help"], ["--version"], ["kernels", "bench", "--help"]):
        made = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ,
        )
        assert made.returncode == 0, made.stderr
        assert made.stdout.strip()


@pytest.mark.quick
def test_version() -> None:
    made = runner.invoke(app, ["--version"])
    assert made.exit_code == 0
    assert made.stdout == f"capibara {__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "capibara", "--version"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, check=True)
    assert made.stdout.strip() == f"capibara {__version__}"


def _completed(line: str) -> list[str]:
    """What bash is offered at the end of a line, by a process that must not import jax for it."""
    asked = {"_CAPIBARA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    code = (
        "import sys\n"
        "from capibara.cli.main import app\n"
        "try:\n"
        "    app(prog_name='capibara')\n"
        "finally:\n"
        "    assert 'jax' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **asked})
    assert made.stderr == ""
    return made.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert _completed("capibara ker") == ["kernels"]
    assert _completed("capibara kernels ") == ["list", "explain", "bench", "tune", "compile"]
    assert _completed("capibara kernels bench --imp") == ["--import"]


def test_a_script_for_the_shell_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner.invoke(app, ["--help"])
    assert "--install-completion" in made.stdout
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    made = runner.invoke(app, ["--show-completion", "bash"])
    assert made.exit_code == 0, made.output
    assert "_CAPIBARA_COMPLETE=complete_bash" in made.stdout


def test_no_arguments_shows_the_commands() -> None:
    made = runner.invoke(app, [])
    for command in ("kernels", "tour"):
        assert command in made.output


@pytest.mark.quick
def test_a_mistake_is_one_line_on_standard_error() -> None:
    made = runner.invoke(app, ["kernels", "explain", "gemmm", "f32[2,2]"])
    assert made.exit_code == 2
    assert made.stdout == ""
    assert made.stderr.count("\n") == 1
    assert made.stderr.startswith("capibara: Unknown op 'gemmm'. Did you mean 'gemm'?")


def test_debug_shows_where_it_came_from() -> None:
    made = runner.invoke(app, ["--debug", "kernels", "explain", "gemmm", "f32[2,2]"])
    assert made.exit_code == 1
    assert isinstance(made.exception, ValueError)


def test_an_unknown_command_or_option() -> None:
    assert runner.invoke(app, ["kernel"]).exit_code == 2
    assert runner.invoke(app, ["kernels", "list", "--onn", "v4"]).exit_code == 2
