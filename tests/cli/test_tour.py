"""`capibara tour`: ends in time, and in failure when anything mismatches."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from capibara.cli import tour
from capibara.cli.main import app
from capibara.kernels import op as ops
from capibara.kernels.op import Case, Implementation, Op


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Op]:
    """A registry of its own, so that the tour is as long as a test wants."""
    made: dict[str, Op] = {}
    monkeypatch.setattr(ops, "registry", lambda: dict(made))
    return made


def _op(name: str, factor: float) -> Op:
    made = Op(
        name,
        family="test",
        reference=lambda x: 2 * x,
        operands=("x",),
        cases=(Case("small", ((64,),), "float32", tags=frozenset({"test"})),),
    )
    made.implement(Implementation("xla", lambda x: factor * x))
    return made


def test_a_tour_where_all_match(registry: dict[str, Op]) -> None:
    registry["good"] = _op("good", 2.0)
    made = CliRunner().invoke(app, ["tour"])
    assert made.exit_code == 0, made.output
    for text in ("Attached:", "Versions: capibara", "good small", "all match", "capibara kernels explain"):
        assert text in made.stdout


@pytest.mark.newest
def test_a_mismatch_fails_the_tour(registry: dict[str, Op]) -> None:
    registry["good"], registry["bad"] = _op("good", 2.0), _op("bad", 2.1)
    made = CliRunner().invoke(app, ["tour"])
    assert made.exit_code == 1
    assert "WRONG: bad small on xla" in made.stdout
    assert "1 do NOT match" in made.stdout


def test_a_tour_of_the_real_ops_cut_short() -> None:
    made = CliRunner().invoke(app, ["tour", "--seconds", "1"])
    assert made.exit_code == 0, made.output
    assert "TPU kernels, emulated" in made.stdout
    assert "left out for time, size or number of devices" in made.stdout


def test_ops_take_turns() -> None:
    assert list(tour._in_turns([[1, 2, 3], [4], [], [5, 6]])) == [1, 4, 5, 2, 6, 3]
