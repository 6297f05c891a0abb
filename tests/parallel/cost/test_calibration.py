"""Corrections from a user's own runs: fitted, stored, and refused where they make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.parallel.cost.calibration import Calibration, Run, calibration_path, fit, load, save


def _run(measured: float, bound: str = "matrix", predicted: float = 1.0, **more: float) -> Run:
    other = "memory" if bound == "matrix" else "matrix"
    return Run({bound: 0.9 * predicted, other: 0.1 * predicted}, predicted, measured, date="2026-11-15", **more)


@pytest.mark.newest
def test_one_run_scales_everything() -> None:
    found = fit("h200", [_run(1.3)])
    made = found.calibration
    assert (made.matrix, made.memory, made.links, made.runs, made.dates) == (1.3, 1.3, 1.3, 1, ("2026-11-15",))
    assert found.error_before == pytest.approx(1 - 1 / 1.3)
    assert found.error_after == pytest.approx(0, abs=1e-9)
    assert "one factor" in found.notes[0]


def test_an_odd_run_does_not_move_the_factor() -> None:
    assert fit("h200", [_run(1.1), _run(1.12), _run(3.9)]).calibration.matrix == 1.12


def test_runs_speak_for_the_unit_that_bounds_them() -> None:
    runs = [_run(1.2), _run(1.2), _run(0.9, "memory"), _run(0.9, "memory")]
    found = fit("v4", runs)
    assert (found.calibration.matrix, found.calibration.memory) == (1.2, 0.9)
    # No two runs are bound by links: they have the overall factor.
    assert found.calibration.links == pytest.approx(1.05)
    assert any(note.startswith("links") for note in found.notes)
    assert found.error_after < found.error_before


def test_bytes_beyond_the_predicted_are_the_median() -> None:
    runs = [_run(1.0, predicted_bytes=10e9, measured_bytes=10e9 + extra) for extra in (1e8, 3e8, 9e9)]
    assert fit("h200", runs).calibration.overhead_bytes == 3e8


def test_a_factor_out_of_reason_is_held_and_said() -> None:
    found = fit("h200", [_run(50.0)])
    assert found.calibration.matrix == 4
    assert any("held" in note for note in found.notes)


def test_bad_input_says_the_rule() -> None:
    with pytest.raises(ValueError, match="needs a run"):
        fit("h200", [])
    with pytest.raises(ValueError, match="above zero"):
        fit("h200", [_run(0.0)])
    with pytest.raises(ValueError, match="matrix is measured over predicted"):
        Calibration("h200", matrix=9.0)


def test_it_is_stored_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    assert load("h200") is None
    made = fit("h200", [_run(1.2)]).calibration
    assert save(made) == calibration_path("NVIDIA H200")
    assert load("h200") == made
    assert load("v4") is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 99, "chip": "h200", "dates": []}',
        '{"format": 1, "chip": "h200", "dates": [], "matrix": NaN}',
        '{"format": 1, "chip": "h200", "dates": [], "overhead_bytes": NaN}',
        '{"format": 1, "chip": "h200", "dates": [], "overhead_bytes": "much"}',
        '{"format": 1, "chip": "no such chip", "dates": []}',
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
    path = save(Calibration("v4", matrix=1.1), tmp_path / "h200.json")
    with pytest.warns(UserWarning, match="the chip that it was measured on"):
        assert load("h200", path) is None
