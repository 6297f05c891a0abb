"""`capibara migrate`: reports, fixes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capibara.cli.main import app

runner = CliRunner()
OLD = "import jax\ny = jax.tree_map(f, x)\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(OLD)
    return Path("a.py")


@pytest.mark.quick
def test_a_report_and_its_exit_code(file: Path) -> None:
    shown = runner.invoke(app, ["migrate", "."])
    assert shown.exit_code == 1
    assert "a.py:2:5: CAP203 error: jax.tree_map is gone" in shown.stdout
    shown = runner.invoke(app, ["migrate", "a.py", "--json", "--ignore", "CAP1"])
    document = json.loads(shown.stdout)
    assert [one["code"] for one in document["issues"]] == ["CAP203"]
    assert document["error"]["exit_code"] == shown.exit_code == 1
    assert runner.invoke(app, ["migrate", "a.py", "--ignore", "CAP2"]).exit_code == 0


@pytest.mark.quick
def test_diff_changes_nothing_and_fix_does(file: Path) -> None:
    shown = runner.invoke(app, ["migrate", "a.py", "--diff"])
    assert "+y = jax.tree.map(f, x)" in shown.stdout
    assert file.read_text() == OLD
    shown = runner.invoke(app, ["migrate", "a.py", "--fix"])
    assert shown.exit_code == 0
    assert file.read_text() == "import jax\ny = jax.tree.map(f, x)\n"
    assert "fixed" not in runner.invoke(app, ["migrate", "a.py", "--fix"]).stdout


def test_what_needs_no_hand_is_printed_when_asked_for(file: Path) -> None:
    shown = runner.invoke(app, ["migrate", "a.py"]).stdout
    assert "CAP101" not in shown
    assert "1 error, 0 warnings, 1 info (--info prints them)" in shown
    shown = runner.invoke(app, ["migrate", "a.py", "--info"]).stdout
    assert "a.py:1:8: CAP101 info: import jax is plain jax. Fix: write import capibara.jax as jax" in shown
    assert "--info prints" not in shown


def test_standard_input(file: Path) -> None:
    shown = runner.invoke(app, ["migrate", "-", "--diff"], input=OLD)
    assert shown.exit_code == 1
    assert "<stdin>:2:5: CAP203" in shown.stdout
    assert "+y = jax.tree.map(f, x)" in shown.stdout


def test_pyproject(file: Path) -> None:
    Path("pyproject.toml").write_text('[tool.capibara.migrate]\nper-file-ignores = {"a.py" = ["CAP203"]}\n')
    assert runner.invoke(app, ["migrate", "a.py"]).exit_code == 0
    Path("pyproject.toml").write_text('[tool.capibara.migrate]\nexclude = ["a.py"]\n')
    assert "0 files" in runner.invoke(app, ["migrate", "."]).stdout
    Path("pyproject.toml").write_text("[tool.capibara.migrate]\nselekt = []\n")
    refused = runner.invoke(app, ["migrate", "a.py"])
    assert refused.exit_code == 2
    assert "selekt" in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["gone.py"],
        [],
        ["a.py", "--json", "--sarif"],
        ["a.py", "--fix", "--diff"],
        ["a.py", "--to", "torch"],
        ["a.py", "--shapes", "f32[1]"],
        ["a.py", "--select", "E501"],
        ["--verify", "a.py:f"],
    ],
)
def test_bad_input(file: Path, arguments: list[str]) -> None:
    assert runner.invoke(app, ["migrate", *arguments]).exit_code == 2


def test_sarif(file: Path) -> None:
    document = json.loads(runner.invoke(app, ["migrate", "a.py", "--sarif"]).stdout)
    (run,) = document["runs"]
    assert document["version"] == "2.1.0"
    result = run["results"][-1]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "CAP203"
    region = result["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 2, "startColumn": 5, "endLine": 2, "endColumn": 17}


def test_several_processes_say_what_one_does(file: Path) -> None:
    for number in range(40):
        Path(f"b{number}.py").write_text(OLD if number % 2 else "def (")
    one, several = (runner.invoke(app, ["migrate", ".", "--jobs", jobs]) for jobs in ("1", "2"))
    assert one.stdout == several.stdout
    assert "41 files, 41 error" in one.stdout


def test_a_file_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.migrate import fixes

    written = fixes.write

    def refused(path: Path, data: bytes) -> None:
        if path.name == "a.py":
            raise PermissionError(13, "Permission denied", str(path))
        written(path, data)

    monkeypatch.setattr(fixes, "write", refused)
    file.with_name("b.py").write_text(OLD)
    shown = runner.invoke(app, ["migrate", ".", "--fix", "--json"])
    assert shown.exit_code == 1
    document = json.loads(shown.stdout)
    assert [(one["file"], one["reason"]) for one in document["not_fixed"]] == [
        ("a.py", "it cannot be written: Permission denied")
    ]
    assert [one["file"] for one in document["fixes"]] == ["b.py"]
