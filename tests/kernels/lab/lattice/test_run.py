"""A run ends in time, goes on where another ended, and a row that fails is a row."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from capibara.kernels.lab.lattice import measure, run
from capibara.kernels.lab.lattice.workloads import draw

FAMILIES = ("norm", "activation", "rope")


def _settings(**given: Any) -> run.Settings:
    return run.Settings(**{"minutes": 1.0, "families": FAMILIES, "shrink": 64, "most_rows": 3, **given})


class _Row:
    """In place of programs that are compiled."""

    def __init__(self, workload: Any, pool: Any, seed: int) -> None:
        self.workload, self.seed = workload, seed

    def time(self) -> dict[str, Any]:
        if self.workload.family == "rope":
            raise ZeroDivisionError("no time at all")
        return {"what": str(self.workload), "seed": self.seed}


def _wanted(settings: run.Settings, count: int) -> list[str]:
    stream = draw(settings.seed, settings.families, settings.shrink)
    return [str(w) for w in itertools.islice(stream, settings.skip, settings.skip + count)]


@pytest.mark.quick
def test_skip_goes_on_after_the_rows_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "prepare", _Row)
    rows: list[dict[str, Any]] = []
    settings = _settings(seed=4, skip=2, families=("norm", "activation"))
    assert run.run(settings, rows.append) == 3
    assert [row["what"] for row in rows] == _wanted(settings, 3)
    assert {row["seed"] for row in rows} == {4}


@pytest.mark.quick
def test_a_failure_is_a_row_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "prepare", _Row)
    rows: list[dict[str, Any]] = []
    run.run(_settings(), rows.append)
    (failed,) = [row for row in rows if "failed" in row]
    assert failed["family"] == "rope"
    assert "ZeroDivisionError: no time at all (test_run.py:" in failed["failed"]
    assert len(rows) == 3


def test_a_run_ends_before_its_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(*given: Any) -> _Row:
        nonlocal now
        now += 0.2
        return _Row(*given)

    monkeypatch.setattr(measure, "prepare", slow)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now))
    rows: list[dict[str, Any]] = []
    run.run(_settings(minutes=1 / 60, most_rows=None), rows.append)
    assert 2 <= len(rows) <= 5
    assert now <= 1


@pytest.mark.slow
def test_processes_share_the_rows() -> None:
    """Two that compile at once and are timed in turns, with nothing put in their place."""
    rows: list[dict[str, Any]] = []
    settings = _settings(workers=2, most_rows=3, families=("norm", "rope"), minutes=2.0)
    assert run.run(settings, rows.append) == 3
    assert sorted(f"{r['family']}: {r['what']}, {r['direction']} ({r['model']})" for r in rows) == sorted(
        _wanted(settings, 3)
    )
    assert all(row["right"]["dispatch"] for row in rows)
