"""`capibara launch`: processes of this machine for real, the files it writes, what each engine refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.errors import CapibaraError
from capibara.fleet.launch import ENGINES, launch


def _script(tmp_path: Path, code: str) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(f"import os, sys\nme = os.environ['CAPIBARA_PROCESS_ID']\n{code}\n", encoding="utf-8")
    return [sys.executable, "-S", str(file)]


@pytest.mark.quick
def test_processes_of_this_machine(tmp_path: Path) -> None:
    output = io.StringIO()
    code = "print(me, os.environ['CAPIBARA_PROCESS_COUNT'], os.environ['MINE'], sys.argv[1:])"
    command = [*_script(tmp_path, code), "--a"]
    launched = launch("processes", command, processes=2, environment={"MINE": "x"}, output=output)
    assert (launched.exit_code, launched.processes, launched.starts) == (0, 2, 1)
    assert sorted(output.getvalue().splitlines()) == ["[0] 0 2 x ['--a']", "[1] 1 2 x ['--a']"]


@pytest.mark.quick
def test_restarts_are_counted_and_only_training_is_told_to_resume(tmp_path: Path) -> None:
    """`capibara` is run by this interpreter; here it is another one, which fails."""
    (tmp_path / "capibara.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)\n", encoding="utf-8")
    said = {}
    for word in ("train", "tour"):
        output = io.StringIO()
        launched = launch(
            "processes", ["capibara", word], max_restarts=1, environment={"PYTHONPATH": str(tmp_path)}, output=output
        )
        assert (launched.exit_code, launched.starts) == (5, 2)
        said[word] = [line for line in output.getvalue().splitlines() if line.startswith("[")]
    assert said == {"train": ["['train']", "['train', '--resume']"], "tour": ["['tour']", "['tour']"]}


@pytest.mark.quick
def test_the_command_line_passes_the_exit_code_on(tmp_path: Path) -> None:
    command = _script(tmp_path, "print('{}')\nsys.exit(42)")
    ran = CliRunner().invoke(app, ["launch", "--engine", "processes", "--json", "--", *command, "--json"])
    assert ran.exit_code == 42
    document = json.loads(ran.stdout)
    assert (document["engine"], document["processes"], document["starts"]) == ("processes", 1, 1)
    assert (document["error"]["kind"], document["error"]["exit_code"]) == ("preempted", 42)
    odd = CliRunner().invoke(
        app, ["launch", "--engine", "processes", "--max-restarts", "0", "--", *_script(tmp_path, "sys.exit(77)")]
    )
    assert odd.exit_code == 77


@pytest.mark.quick
def test_files_are_written_and_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--engine", "jobset", "--on", "v4-64", "--image", "image:1", "--env", "A=b=c"]
    command = ["--", "capibara", "train", "llama-7b", "--json"]
    ran = CliRunner().invoke(app, [*words, *command])
    assert ran.exit_code == 0, ran.output
    assert ran.output == "capibara.jobset.yaml: 8 processes. Now run: kubectl apply -f capibara.jobset.yaml\n"
    assert yaml.safe_load(Path("capibara.jobset.yaml").read_text(encoding="utf-8"))["kind"] == "JobSet"
    assert CliRunner().invoke(app, [*words, *command]).exit_code == 0  # the same once more
    before = Path("capibara.jobset.yaml").read_bytes()
    other = CliRunner().invoke(app, [*words, "--spot", *command])
    assert other.exit_code == 2
    assert "not written over" in other.output
    assert Path("capibara.jobset.yaml").read_bytes() == before

    sky = ["launch", "--engine", "sky", "--on", "v4-32", "--name", "mine", "--json", *command]
    document = json.loads(CliRunner().invoke(app, sky).stdout)
    assert (document["processes"], document["next"]) == (4, "sky jobs launch mine.sky.yaml")
    assert yaml.safe_load(Path("mine.sky.yaml").read_text(encoding="utf-8"))["name"] == "mine"
    nowhere = CliRunner().invoke(app, [*sky[:5], "--out", "no/folder.yaml", *command])
    assert nowhere.exit_code == 2
    assert "can be written" in nowhere.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capibara.jobset.yaml", "mine.sky.yaml"]


@pytest.mark.quick
def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"Unknown engine 'slurm'"):
        launch("slurm", ["true"])
    for engine in ENGINES:
        with pytest.raises(ValueError, match="after --"):
            launch(engine, [])
        with pytest.raises(ValueError, match="--processes is a whole number from 1 up"):
            launch(engine, ["true"], processes=0)
        with pytest.raises(ValueError, match="--max-restarts"):
            launch(engine, ["true"], max_restarts=-1)
        with pytest.raises(ValueError, match="NAME=VALUE"):
            launch(engine, ["true"], environment={"A-B": "c"})
        with pytest.raises(ValueError, match="set by the engine"):
            launch(engine, ["true"], environment={"CAPIBARA_PROCESS_ID": "0"})
        with pytest.raises(ValueError, match=r"Unknown option 'procesess'. Did you mean 'processes'"):
            launch(engine, ["true"], procesess=2)
    with pytest.raises(ValueError, match="--on is for --engine sky and jobset"):
        launch("ray", ["true"], on="v4-8")
    with pytest.raises(ValueError, match="--address is for --engine ray"):
        launch("processes", ["true"], address="auto")
    with pytest.raises(ValueError, match="--image is for --engine jobset"):
        launch("sky", ["true"], image="image")
    with pytest.raises(ValueError, match="needs --on"):
        launch("sky", ["true"])
    with pytest.raises(ValueError, match="needs --image"):
        launch("jobset", ["true"], on="v4-8")
    with pytest.raises(ValueError, match="--gpus is a number from 0 up"):
        launch("ray", ["true"], gpus=-1.0)
    with pytest.raises(ValueError, match="a share of something"):
        launch("ray", ["true"], cpus=0.0)
    ran = CliRunner().invoke(app, ["launch", "--engine", "ray", "--env", "A", "--", "true"])
    assert ran.exit_code == 2
    assert "NAME=VALUE" in ran.output


@pytest.mark.quick
def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CapibaraError, match=r"extra `ray`.*pip install '\.\[ray\]'"):
        launch("ray", ["true"])
