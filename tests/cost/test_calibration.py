"""Corrections from a user's own runs: fitted, stored, and refused where they make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capibara.cost.calibration import Calibration, Run, calibration_path, fit, load, save
from capibara.cost.correction import trust


def _run(measured: float | None, bound: str = "matrix", predicted: float = 1.0, **more: Any) -> Run:
    return Run(_parts(bound, predicted), predicted, measured, date="2026-11-15", **more)


def _parts(bound: str = "matrix", predicted: float = 1.0) -> dict[str, float]:
    other = "memory" if bound == "matrix" else "matrix"
    return {bound: 0.9 * predicted, other: 0.1 * predicted}


def _expected(runs: list[Run], predicted: float = 1.0, bound: str = "matrix") -> float:
    """Corrected over predicted seconds of a step of this length, bound by this unit."""
    parts = _parts(bound, predicted)
    return Calibration("h200", tuple(runs)).correction(parts, predicted).seconds(parts, predicted) / predicted


@pytest.mark.quick
def test_few_runs_go_part_of_the_way() -> None:
    one, three, twenty = (_expected([_run(1.3)] * many) for many in (1, 3, 20))
    # The prior's variance over prior and spread: (0.2² + 0.25² of the unit) / (that + 0.15²) is 0.8 for one run.
    assert 1 + 0.7 * 0.3 < one < 1 + 0.85 * 0.3
    assert one < three < twenty
    assert twenty == pytest.approx(1.3, rel=0.01)


def test_the_start_of_a_short_run_is_not_a_slow_chip() -> None:
    """A millisecond that took three says that steps start late; no step of ten seconds takes thirty for it."""
    toy = _run(3e-3, predicted=1e-3)
    assert _expected([toy], 10.0) == 1.0
    assert _expected([toy] * 20, 10.0) == 1.0
    # A step of 100 ms has the same late start, 2 %, and little else.
    assert 1.01 < _expected([toy] * 20, 0.1) < 1.07
    # The same program again is met.
    assert _expected([toy], 1e-3) == pytest.approx(3.0, rel=0.02)
    # Nor does a toy that was faster than predicted make a pod faster.
    assert _expected([_run(0.6e-3, predicted=1e-3)] * 20, 10.0) == 1.0


def test_the_nearer_run_counts_more() -> None:
    near, far = _run(1.3, predicted=1.0), _run(0.08, predicted=0.1)
    long, short = _expected([near, far], 2.0), _expected([near, far], 0.05)
    assert long > 1.1
    assert short < 0.95
    assert [trust(times) for times in (1.0, 1e3, 1e-3, 1e5)] == [1.0, 0.0, 0.0, 0.0]
    assert trust(4.0) == pytest.approx(trust(0.25)) == pytest.approx(0.48, abs=0.01)
    asked = Calibration("h200", (far, near)).correction(_parts("matrix", 2.0), 2.0)
    assert [one.times for one in asked.witnesses] == pytest.approx([0.5, 0.05]), "the nearest is named first"


def test_an_odd_run_does_not_move_the_factor() -> None:
    usual = [_run(1.1), _run(1.12), _run(1.13)]
    assert _expected([*usual, _run(3.9)]) == pytest.approx(_expected(usual), abs=0.02)


def test_runs_speak_for_the_unit_that_bounds_them() -> None:
    runs = [_run(1.2), _run(1.2), _run(0.9, "memory"), _run(0.9, "memory")]
    factors = fit("v4", runs).correction.factors
    assert factors["matrix"] > 1.15
    assert factors["memory"] < 0.95
    # No run is bound by links: they have half of what all units have in common.
    assert 0.97 < factors["links"] < 1.1
    found = fit("v4", runs)
    assert found.error_after < 0.3 * found.error_before
    assert found.error_held_out is not None
    assert found.error_after < found.error_held_out < found.error_before
    alone = fit("v4", runs[:1])
    assert alone.error_held_out is None
    assert any("one run" in note for note in alone.notes)


def test_bytes_beyond_the_predicted() -> None:
    def more(predicted: float, measured: float, planned: float, many: int = 3) -> float:
        runs = (_run(1.0, predicted_bytes=predicted, measured_bytes=measured),) * many
        return Calibration("h200", runs).correction(_parts(), 1.0, planned).bytes

    assert more(10e9, 10.8e9, 10e9) == pytest.approx(0.8e9, rel=0.15)
    # A runtime's half a gigabyte beside a small program is beside a large one too, and does not grow with it.
    assert more(1e8, 6e8, 20e9) == pytest.approx(5e8, rel=0.2)
    # What a large program had beyond its plan is no fixed sum: a small one does not get it.
    assert more(30e9, 36e9, 1e9) < 0.3e9
    odd = [_run(1.0, predicted_bytes=10e9, measured_bytes=10e9 + extra) for extra in (1e8, 2e8, 3e8, 20e9)]
    assert Calibration("h200", tuple(odd)).correction(_parts(), 1.0, 10e9).bytes < 0.5e9


def test_a_run_of_something_else_is_left_out_and_said() -> None:
    found = fit("h200", [_run(50.0, name="toy on h200")])
    assert any("toy on h200 took 50 s where 1 s" in note for note in found.notes)
    assert found.error_after == found.error_before
    assert _expected([_run(50.0)]) == _expected([_run(0.2)]) == 1.0


def test_bad_input_says_the_rule() -> None:
    with pytest.raises(ValueError, match="needs a timed run"):
        fit("h200", [_run(None, measured_bytes=1e9, predicted_bytes=1e9)])
    with pytest.raises(ValueError, match="above zero"):
        _run(0.0)
    with pytest.raises(ValueError, match="seconds from 0 up"):
        Run({"matrix": float("nan")}, 1.0, 1.0)


def test_it_is_stored_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    assert load("h200") is None
    made = fit("h200", [_run(1.2, name="one")]).calibration
    assert save(made) == calibration_path("NVIDIA H200")
    assert load("h200") == made
    assert made.dates == ("2026-11-15",)
    assert load("v4") is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 1, "chip": "h200", "matrix": 1.2, "dates": []}',
        '{"format": 2, "chip": "h200", "runs": [{"parts": {}, "predicted_seconds": NaN}]}',
        '{"format": 2, "chip": "h200", "runs": [{"parts": {}, "predicted_seconds": "long"}]}',
        '{"format": 2, "chip": "h200", "runs": [{"seconds": 1}]}',
        '{"format": 2, "chip": "h200", "runs": [], "matrix": 1.2}',
        '{"format": 2, "chip": "no such chip", "runs": []}',
    ],
)
def test_a_torn_file_is_set_aside(text: str, tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="moved to h200.corrupt"):
        assert load("h200", path) is None
    assert not path.exists()
    assert (tmp_path / "h200.corrupt").read_text() == text


def test_another_chips_file_is_not_taken(tmp_path: Path) -> None:
    path = save(Calibration("v4"), tmp_path / "h200.json")
    with pytest.warns(UserWarning, match="the chip that it was measured on"):
        assert load("h200", path) is None


def test_a_run_has_units_that_the_model_has() -> None:
    with pytest.raises(ValueError, match=r"Unknown unit of a run's parts 'warp'.*'matrix'"):
        Run({"warp": 1.0}, 1.0, 1.3)
    with pytest.raises(ValueError, match="parts are seconds from 0 up"):
        Run([1.0], 1.0, 1.3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="figures above zero"):
        Run({"matrix": 1.0}, True, 1.3)


def test_a_run_that_is_there_twice_is_held_out_once() -> None:
    same = _run(1.3)
    found = fit("h200", [same] * 20)
    # Nineteen that say the same are left: what they say is met nearly, as by all twenty.
    assert found.error_held_out == pytest.approx(found.error_after, abs=0.01)


@pytest.mark.parametrize(("one", "other"), [(1.3, 0.7), (3.9, 0.26), (1.0, 3.9)])
def test_two_runs_that_contradict_each_other_leave_the_time_between_them(one: float, other: float) -> None:
    both = [_run(one), _run(other)]
    assert min(one, other) < _expected(both) < max(one, other)
    assert _expected(both) == pytest.approx(_expected(both[::-1])), "whichever came first"
