"""Goodput: each second is booked once, over restarts, and what is done again does not count twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capibara.observe import Goodput
from capibara.observe.goodput import SERVER_PHASES


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.quick
def test_phases_add_up(tmp_path: Path) -> None:
    clock = Clock()
    with Goodput(tmp_path / "goodput.jsonl", clock=clock) as goodput:
        with goodput.phase("initialise"):
            clock.passes(4)
            with goodput.phase("compile"):
                clock.passes(6)
            clock.passes(1)
        clock.passes(2)
        for step in range(1, 6):
            with goodput.phase("data_wait"):
                clock.passes(1)
            with goodput.phase("step", step=step):
                clock.passes(3)
        with goodput.phase("checkpoint"):
            clock.passes(1)
        with goodput.phase("evaluation"):
            clock.passes(1)
        report = goodput.report()
    assert report.seconds == {
        "initialise": 5, "compile": 6, "data_wait": 5, "step": 15, "checkpoint": 1, "restart": 0, "evaluation": 1,
        "idle": 2, "lost": 0,
    }  # fmt: skip
    assert report.total == 35
    assert (report.steps, report.goodput) == (5, 15 / 35)
    assert sum(report.fractions().values()) == pytest.approx(1)
    assert str(report).startswith("goodput 42.9% of 35.0 s: 5 steps, 0 restarts; initialise 14.3%")


@pytest.mark.quick
def test_over_restarts_and_steps_done_again(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "goodput.jsonl"

    def steps(goodput: Goodput, first: int, last: int, seconds: float) -> None:
        for step in range(first, last + 1):
            with goodput.phase("step", step=step):
                clock.passes(seconds)

    killed = Goodput(file, clock=clock, flush_seconds=0)
    steps(killed, 1, 10, 2.0)  # and killed: nothing closes it
    clock.passes(30)
    with Goodput(file, clock=clock) as goodput:
        with goodput.phase("restart"):
            clock.passes(5)
        steps(goodput, 7, 12, 1.0)
        steps(goodput, 12, 13, 1.0)  # one step back, in the same process
        report = goodput.report()
    assert (report.steps, report.lost_steps, report.restarts) == (13, 5, 1)
    assert report.seconds["lost"] == pytest.approx(4 * 2.0 + 1.0)
    assert report.seconds["step"] == pytest.approx(6 * 2.0 + 7 * 1.0)
    assert report.seconds["restart"] == 35
    assert sum(report.seconds.values()) == pytest.approx(report.total) == pytest.approx(63)
    assert Goodput(file, clock=clock).report().seconds["lost"] == report.seconds["lost"]


@pytest.mark.quick
def test_a_line_cut_by_a_kill_loses_that_line_only(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "goodput.jsonl"
    goodput = Goodput(file, clock=clock, flush_seconds=0)
    for step in (1, 2):
        with goodput.phase("step", step=step):
            clock.passes(1)
    file.write_text(file.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    with Goodput(file, clock=clock) as goodput, goodput.phase("step", step=2):
        clock.passes(1)
    report = Goodput(file, clock=clock).report()
    assert (report.steps, report.lost_steps, report.restarts) == (2, 0, 2)


@pytest.mark.quick
def test_a_step_that_raises_is_none(tmp_path: Path) -> None:
    clock = Clock()
    goodput = Goodput(tmp_path / "goodput.jsonl", clock=clock)

    def fails() -> None:
        with goodput.phase("step", step=1):
            clock.passes(2)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    report = goodput.report()
    assert (report.steps, report.seconds["step"], report.seconds["idle"]) == (0, 0, 2)


@pytest.mark.quick
def test_many_steps_take_few_lines(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "goodput.jsonl"
    with Goodput(file, clock=clock, flush_seconds=10) as goodput:
        for step in range(1000):
            with goodput.phase("step", step=step):
                clock.passes(0.1)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(rows) < 14
    assert Goodput(file, clock=clock).report().steps == 1000


@pytest.mark.quick
def test_bad_input(tmp_path: Path) -> None:
    goodput = Goodput(tmp_path / "goodput.jsonl")
    with pytest.raises(ValueError, match=r"Unknown phase 'steps'. Did you mean 'step'"):
        goodput.phase("steps").__enter__()
    for name, step in (("step", None), ("compile", 3)):
        with pytest.raises(ValueError, match="step= comes with"):
            goodput.phase(name, step=step).__enter__()


def test_a_server_has_phases_of_its_own_over_restarts_and_they_cost(tmp_path: Path) -> None:
    clock = Clock()

    def server() -> Goodput:
        return Goodput(tmp_path / "time.jsonl", phases=SERVER_PHASES, counts="serving", clock=clock)

    with server() as books:
        with books.phase("load"):
            clock.passes(10)
            with books.phase("warm_up"):
                clock.passes(20)
        with books.phase("serving"):
            clock.passes(30)
        books.move(12, "serving", "compile")
        clock.passes(40)  # nobody asks
    clock.passes(50)
    with server() as books:
        with books.phase("drain"):
            clock.passes(50)
        report = books.report()
    spent = {name: seconds for name, seconds in report.seconds.items() if seconds}
    assert spent == {
        "load": 10, "warm_up": 20, "serving": 18, "compile": 12, "idle": 40, "restart": 50, "drain": 50,
    }  # fmt: skip
    assert (report.total, report.restarts, report.goodput) == (200, 1, 0.09)
    assert report.dollars(36)["serving"] == pytest.approx(0.18)
    assert sum(report.dollars(36).values()) == pytest.approx(2)
    assert "steps" not in str(report)
    with pytest.raises(ValueError, match="Unknown phase 'checkpoint'"), books.phase("checkpoint"):
        pass
    with pytest.raises(ValueError, match="Unknown phase that counts 'step'"):
        Goodput(None, phases=SERVER_PHASES)
    with pytest.raises(ValueError, match="These books have the phases"):
        Goodput(tmp_path / "time.jsonl", clock=clock).report()


def test_books_in_memory_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Goodput(None, phases=SERVER_PHASES, counts="serving") as books, books.phase("serving"):
        pass
    assert not list(tmp_path.iterdir())
