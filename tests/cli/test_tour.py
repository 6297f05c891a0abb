"""`capibara tour`: every op once, ends in time, and in failure when anything mismatches."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from capibara.cli import tour
from capibara.cli.main import app
from capibara.kernels.core import op as ops
from capibara.kernels.core.op import Op, lookup
from capibara.kernels.core.spec import Case, Implementation

REAL = (lookup("norm"), lookup("all_gather"))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Op]:
    """A registry of its own, so that the tour is as long as a test wants."""
    made: dict[str, Op] = {}
    monkeypatch.setattr(ops, "registry", lambda: dict(made))
    return made


def _op(name: str, factor: float) -> Op:
    tags = frozenset({"test"})
    made = Op(
        name,
        family="test",
        reference=lambda x: 2 * x,
        operands=("x",),
        cases=(Case("tiny", ((8,),), "float32", tags=tags), Case("small", ((64,),), "float32", tags=tags)),
    )
    made.implement(Implementation("xla", lambda x: factor * x))
    return made


def test_a_tour_where_all_match(registry: dict[str, Op]) -> None:
    registry["good"] = _op("good", 2.0)
    made = CliRunner().invoke(app, ["tour"])
    assert made.exit_code == 0, made.output
    for text in ("Attached:", "Versions: capibara", "good  small", "1 of 1 ops", "all match", "kernels explain"):
        assert text in made.stdout, text


@pytest.mark.quick
def test_a_mismatch_fails_the_tour(registry: dict[str, Op]) -> None:
    registry["good"], registry["bad"] = _op("good", 2.0), _op("bad", 2.1)
    made = CliRunner().invoke(app, ["tour"])
    assert made.exit_code == 1
    assert "WRONG: bad small on xla" in made.stdout
    assert "2 do NOT match" in made.stdout


@pytest.mark.quick
def test_every_op_is_run_however_little_time_there_is(registry: dict[str, Op], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library's own a kernel's op and a collective, and two more; one case each, the others counted."""
    registry.update({op.name: op for op in REAL}, one=_op("one", 2.0), two=_op("two", 2.0))
    monkeypatch.setattr(tour._Clock, "within", lambda self, section: False)
    made = CliRunner().invoke(app, ["tour", "--seconds", "1", "--json"])
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)
    run = [row for row in document["checks"] if row["section"] == "ops"]
    assert [row["op"] for row in run] == list(registry)
    assert all(row["ok"] and row["error"] <= row["tolerance"] for row in run)
    emulated = [row for row in document["checks"] if row["section"] == "emulated"]
    assert [row["op"] for row in emulated] == ["norm"]
    left = document["left_out"]
    assert left["ops"]["time"] > 0
    assert len(run) + sum(left["ops"].values()) == sum(len(op.cases) for op in registry.values())
    assert left["emulated"]["time"] > 0
    shown = CliRunner().invoke(app, ["tour", "--seconds", "1"]).stdout
    assert "4 of 4 ops" in shown
    assert "Left out, more cases of the ops:" in shown
    assert "capibara tour --seconds" in shown


def test_each_op_has_a_first_case_that_a_laptop_runs() -> None:
    for op in ops.registry().values():
        if op.mesh_axes is not None:
            wanted = [int(case.params["devices"]) for case in op.cases if "test" in case.tags]  # type: ignore[call-overload]
            assert wanted, op.name
            assert max(wanted) <= tour.VIRTUAL_DEVICES
            continue
        first = tour._first_case(op)
        assert first is not None, op.name
        assert tour._work(op, first) <= tour.SMALL_FLOPS, f"{op.name} {first.name}"


def test_a_tour_within_80_columns(registry: dict[str, Op], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    registry["one_of_quite_a_long_name"] = _op("one_of_quite_a_long_name", 2.0)
    lines = CliRunner().invoke(app, ["tour", "--seconds", "1"]).stdout.splitlines()
    (row,) = [line for line in lines if line.startswith(" one_of_quite_a_long_name")][:1]
    assert row.split()[1:3] == ["small", "xla"]
    assert max(map(len, lines[: lines.index(row)])) <= 80 or "TPU compiler" in max(lines, key=len)


def test_ops_take_turns() -> None:
    assert list(tour._in_turns([[1, 2, 3], [4], [], [5, 6]])) == [1, 4, 5, 2, 6, 3]
