"""`capibara kernels`: every command, what it prints and how it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from capibara.cli.main import app
from capibara.kernels.core import tables
from capibara.kernels.core.op import Op, register, unregister
from capibara.kernels.core.spec import Case, Implementation


def run(*arguments: str) -> Result:
    made = CliRunner().invoke(app, ["kernels", *arguments])
    if made.exception is not None and not isinstance(made.exception, SystemExit):
        raise made.exception
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    tables.forget()
    yield tmp_path
    tables.forget()


@pytest.fixture
def wrong_op() -> Iterator[Op]:
    made = Op(
        "halving",
        family="test",
        reference=lambda x: x / 2,
        operands=("x",),
        cases=(Case("small", ((64,),), "float32", tags=frozenset({"bench", "tune", "test"})),),
    )
    made.implement(Implementation("xla", lambda x: x / 3))
    register(made)
    yield made
    unregister("halving")


@pytest.mark.quick
def test_list() -> None:
    made = run("list")
    assert made.exit_code == 0
    for word in ("gemm", "linalg", "xla", "pallas_tpu", "hopper"):
        assert word in made.stdout
    rows = json.loads(run("list", "--on", "v4", "--json").stdout)
    assert rows["device_kind"] == "TPU v4"
    gemm = {row["implementation"]: row for row in rows["implementations"] if row["op"] == "gemm"}
    assert gemm["pallas_tpu"]["accepts"] > 0
    assert gemm["hopper"]["accepts"] == 0
    assert "for gpu" in gemm["hopper"]["refuses_because"]


@pytest.mark.parametrize("chip", ["cpu", "v4", "h200"])
def test_a_list_of_80_columns_has_one_line_an_implementation(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table, _, notes = run("list", "--on", chip).stdout.partition("takes: ")
    lines = [line.split() for line in table.splitlines()]
    assert max(map(len, table.splitlines())) <= 80
    expected = json.loads(run("list", "--on", chip, "--json").stdout)["implementations"]
    # An implementation's line says "m of n"; a folded cell would make lines without, or names cut in two.
    rows = [line for line in lines if "of" in line]
    assert [" ".join(row[row.index("of") - 1 : row.index("of") + 2]) for row in rows] == [
        f"{one['accepts']} of {one['cases']}" for one in expected
    ]
    for row, one in zip(rows, expected, strict=True):
        assert one["implementation"] in row
        if one["refuses_because"] is not None:
            number = row[-1]
            assert f"{number} {one['refuses_because']}" in " ".join(notes.split())


@pytest.mark.quick
def test_explain() -> None:
    made = run(
        "explain", "gemm", "bf16[4096,4096]", "bf16[4096,4096]", "bf16[4096]", "-",
        "--param", "activation=gelu", "--on", "h200",
    )  # fmt: skip
    assert made.exit_code == 0
    assert "on NVIDIA H200:" in made.stdout
    assert "because" in made.stdout
    assert "not pallas_tpu: it is for tpu" in made.stdout
    assert "activation=gelu" in made.stdout
    assert "bf16[4096,4096]" in made.stdout, "brackets are not markup"
    assert "at least" in made.stdout


@pytest.mark.parametrize(
    ("chip", "platform", "kind"),
    [("v4", "tpu", "TPU v4"), ("h200", "gpu", "NVIDIA H200"), ("cpu", "cpu", "cpu"), (None, "cpu", "cpu")],
)
def test_explain_as_json(chip: str | None, platform: str, kind: str) -> None:
    extra = [] if chip is None else ["--on", chip]
    made = run("explain", "gemm", "f32[8,16]", "f32[16,4]", "--json", *extra)
    found = json.loads(made.stdout)
    assert (found["platform"], found["device_kind"]) == (platform, kind)
    assert found["flops"] == 2 * 8 * 16 * 4
    assert found["implementation"] == "xla"
    assert found["limit_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gemm", "f32[2,3]", "f32[4,5]"], "contracted axes"),
        (["gemm", "f32[2,3]", "f32(3,5)"], "An operand is"),
        (["gemm", "f32[2,3]", "f32[3,5]", "--on", "v44"], "Unknown chip"),
        (["gemm", "f32[2,3]", "f32[3,5]", "--param", "activation=tanh"], "Unknown activation"),
        (["gemm", "f32[2,3]", "f32[3,5]", "--param", "colour=red"], "Unknown parameter of gemm"),
        (["gemm", "-", "f32[3,5]"], "gemm multiplies two arrays"),
        (["gemm", "f32[2,3]", "f32[3,5]", "-", "-", "-"], "takes the operands"),
    ],
)
def test_explain_refuses(arguments: list[str], said: str) -> None:
    made = run("explain", *arguments)
    assert made.exit_code == 2
    assert said in made.stderr
    assert made.stderr.count("\n") == 1


@pytest.mark.quick
def test_bench() -> None:
    made = run("bench", "gemm", "--case", "odd", "--against", "xla,reference,pallas_tpu", "--samples", "3")
    assert made.exit_code == 0
    assert "gemm odd" in made.stdout
    assert "vs reference" in made.stdout
    assert "no pallas_tpu: it is for tpu" in made.stdout


def test_a_bench_of_80_columns_has_one_line_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("bench", "gemm", "--case", "odd", "--against", "xla,reference", "--samples", "1").stdout.splitlines()
    (row,) = [line.split() for line in lines if line.startswith(" gemm odd")]
    assert row[2] == "xla"
    assert row[-1] == "(1)"
    assert max(map(len, lines)) <= 80


def test_bench_as_json_with_gradients() -> None:
    made = run("bench", "gemm", "--case", "odd", "--case", "one", "--grad", "--samples", "1", "--json")
    document = json.loads(made.stdout)
    assert [row["case"] for row in document["rows"]] == ["odd", "one"]
    assert {row["direction"] for row in document["rows"]} == {"forward+backward"}
    assert document["device"]["platform"] == "cpu"
    assert document["command"].startswith("capibara")
    assert document["left_out"] == []


def test_bench_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.kernels.lab import bench

    monkeypatch.setattr(bench, "affordable", lambda op, cases: ([op.case("odd")], list(cases)))
    made = run("bench", "gemm", "--samples", "1")
    assert "Left out as too large for this CPU: gemm: square-4096" in made.stdout
    assert "capibara kernels bench gemm --case square-4096" in made.stdout


def test_bench_of_a_wrong_op_fails(wrong_op: Op) -> None:
    made = run("bench", "halving", "--samples", "1")
    assert made.exit_code == 1
    assert "WRONG: halving small on xla" in made.stdout


def test_bench_of_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it draws, how long, and where rows go; the run itself is tests/kernels/lab/lattice."""
    from capibara.kernels.lab.lattice import run as lattice

    asked: list[lattice.Settings] = []

    def drawn(settings: lattice.Settings, on_row: Any) -> int:
        asked.append(settings)
        row = {"family": "norm", "model": "phi-4", "held_back": True, "what": "rms 9x16", "direction": "forward"}
        times = {"microseconds": {"dispatch": [4.0], "plain": [2.0]}, "right": {"dispatch": True, "plain": True}}
        on_row({**row, **times, "notes": {}, "decisions": [{"implementation": "xla"}], "against_best_peer": 0.5,
                "against_own_best": 1.0})  # fmt: skip
        return 7

    monkeypatch.setattr(lattice, "run", drawn)
    file = tmp_path / "rows.json"
    made = run("bench", "--models", "--minutes", "0.5", "--seed", "3", "--family", "norm", "--skip", "2",
               "--results", str(file), "--commit", "abc")  # fmt: skip
    assert made.exit_code == 0, made.stdout
    assert asked[0] == lattice.Settings(0.5, 3, ("norm",), shrink=64, workers=0, skip=2)
    assert "norm: rms 9x16 forward (phi-4, held back): 0.50x the best peer" in made.stdout
    assert "a run with --skip 9 goes on after them" in made.stdout
    assert json.loads(file.read_text())["runs"][0]["commit"] == "abc"
    document = json.loads(run("bench", "--models", "--json").stdout)
    assert (document["drawn"], document["summary"][0]["mean"], asked[1].minutes) == (7, 0.5, 15.0)
    assert len(json.loads(file.read_text())["rows"]) == 1  # without --results nothing is kept


def test_bench_of_models_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.kernels.lab.lattice import run as lattice

    row = {"family": "norm", "model": "phi-4", "held_back": True, "what": "rms 9x16", "failed": "no memory"}
    monkeypatch.setattr(lattice, "run", lambda settings, on_row: on_row(row) or 1)
    made = run("bench", "--models")
    assert made.exit_code == 1
    assert "norm: rms 9x16 FAILED: no memory" in made.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gemm", "--models"], "--models draws the cases of every op"),
        (["--models", "--family", "norms"], "Did you mean 'norm'"),
        (["gemm", "--against", "cudnm"], "Unknown implementation or peer 'cudnm'"),
        (["gemm", "--case", "sqare-4096"], "Did you mean 'square-4096'"),
        (["gmm"], "Did you mean 'gemm'"),
    ],
)
def test_bench_refuses(arguments: list[str], said: str) -> None:
    made = run("bench", *arguments)
    assert made.exit_code == 2
    assert said in made.stderr


def test_tune(cache: Path) -> None:
    made = run("tune", "gemm", "--case", "odd", "--implementations", "xla")
    assert made.exit_code == 0
    path = cache / "tuned" / "cpu" / "gemm.json"
    assert f"Stored in {path}" in made.stdout
    assert json.loads(path.read_text())["entries"][0]["implementation"] == "xla"
    assert "the user's table measured it fastest" in run("explain", "gemm", "f32[3,5]", "f32[5,7]").stdout


def test_tune_to_a_path_as_json(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "shipped"
    made = run("tune", "gemm", "--case", "odd", "--out", str(out), "--json")
    (report,) = json.loads(made.stdout)["reports"]
    assert report["path"] == str(out / "cpu" / "gemm.json")
    assert Path(report["path"]).exists()
    assert not (cache / "tuned").exists()


def test_tune_of_a_wrong_op_fails_and_stores_nothing(wrong_op: Op, cache: Path) -> None:
    made = run("tune", "halving")
    assert made.exit_code == 1
    assert "wrong result" in made.stdout
    assert not (cache / "tuned").exists()


def test_tune_refuses() -> None:
    assert "Unknown implementation of gemm" in run("tune", "gemm", "--implementations", "cublas").stderr
    assert run("tune", "gemm", "--case", "nope").exit_code == 2


def test_compile_lowers_where_there_is_no_compiler() -> None:
    made = run("compile", "gemm", "--for", "v4-32", "--case", "odd", "--json")
    document = json.loads(made.stdout)
    assert made.exit_code == (0 if document["compiled"] else 4), "what was only lowered is not compiled"
    assert document["slice"] == "v4-32"
    (row,) = document["rows"]
    assert row["ok"]
    assert row["grid_steps"] == 1
    assert row["ours"]["custom_calls"] == ["tpu_custom_call"]
    assert row["xla"]["ok"]
    assert document["date"]
    assert document["command"].split()[0] == "capibara"
    assert document["versions"]["jax"]
    if not document["compiled"]:
        assert "pip install" in document["compiler"]
        assert row["ours"]["evidence"].startswith("lowered only")
        assert document["error"]["kind"] == "only_lowered"
        assert document["error"]["exit_code"] == 4
        assert document["error"]["fix"].startswith("pip install")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--for", "v4-33"], "v4-32 (16 chips"),
        (["--for", "h300"], "Unknown slice or GPU 'h300'"),
        (["gemm", "--for", "v4-32", "--case", "nope"], "Unknown case of gemm"),
        (["gemm", "--for", "v4-32", "--models"], "--models draws the cases of every op"),
        (["--for", "v4-32", "--models", "--family", "nope"], "Unknown family of the lattice"),
    ],
)
def test_compile_refuses(arguments: list[str], said: str) -> None:
    made = run("compile", *arguments)
    assert made.exit_code == 2
    assert said in made.stderr


def test_a_case_that_fails_to_compile_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.compile import kernels
    from capibara.compile.report import CompileReport

    def broken(jobs: list[Any], slice_name: str, **_: Any) -> list[CompileReport]:
        return [
            CompileReport(job.name, "pallas" not in job.name, "a test", error_kind="vmem_oom", error="too large")
            for job in jobs
        ]

    monkeypatch.setattr(kernels, "compile_many", broken)
    made = run("compile", "gemm", "--for", "v4-32", "--case", "odd")
    assert made.exit_code == 1
    assert "FAILS: vmem_oom" in made.stdout
    assert "too large" in made.stdout
