"""Figures in words, and what a correction says of itself."""

from __future__ import annotations

from collections.abc import Callable

from capibara.cost.calibration import Calibration, Run
from capibara.plan import words
from capibara.plan.result import Plan

Make = Callable[..., Plan]


def _with_runs(make_plan: Make, *runs: Run) -> list[str]:
    """What is said of a step of 2 s."""
    made = make_plan().candidates[0].estimate
    return words.corrections(Calibration("v4", runs).corrected(made), "tpu_v4")


def test_small_memory_keeps_its_digits() -> None:
    assert words.gib(14.58 * 2**30) == "14.58 GiB"
    assert words.gib(0.5 * 2**30) == "0.50 GiB"
    assert words.gib(3.5 * 2**20) == "3.5 MiB"
    assert words.gib(0) == "0.00 GiB"


def test_a_correction_says_which_runs_it_rests_on_and_how_far_they_are(make_plan: Make) -> None:
    assert words.corrections(make_plan().candidates[0].estimate, "tpu_v4") == []
    near = Run({"matrix": 1.0}, 1.0, 1.2, name="llama on v4-8")
    toy = Run({"matrix": 1e-3}, 1e-3, 3e-3, name="toy on v4-8")
    (told,) = _with_runs(make_plan, near)
    assert "from 2 s to 2." in told
    assert "llama on v4-8: 1.2 s measured, 2 times shorter, counts 0.68 of 1" in told
    (told,) = _with_runs(make_plan, toy)
    assert "1 measured run on tpu_v4 says next to nothing about this step: it is 2,000 times shorter" in told
    both = _with_runs(make_plan, near, toy)
    assert len(both) == 2
    sized = Run({"matrix": 1.0}, 1.0, None, 20e9, 21e9)
    assert any("MiB more than predicted" in one for one in _with_runs(make_plan, sized))
