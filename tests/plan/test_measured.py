"""Runs kept beside their plans, and the correction that follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from capibara.cost.calibration import load
from capibara.plan.measured import calibrate, measured_path, measurements, read_measured
from capibara.plan.result import Plan

Make = Callable[..., Plan]
GiB = 2**30


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.quick
def test_a_run_is_kept_beside_its_plan(make_plan: Make) -> None:
    made = make_plan().record(step_seconds=2.5, peak_bytes=22 * GiB, note="first")
    assert measurements() == (made,)
    assert made.time_error == pytest.approx(2.0 / 2.5 - 1)
    assert made.memory_error == pytest.approx(20 / 22 - 1)
    assert (made.on, made.chip) == ("v4-64", "tpu_v4")
    make_plan().record(peak_bytes=21 * GiB)
    assert len(measurements()) == 2
    assert measurements("h200") == ()


def test_the_correction_makes_the_error_smaller(make_plan: Make) -> None:
    for seconds in (2.4, 2.5, 2.6):
        make_plan().record(step_seconds=seconds, peak_bytes=22 * GiB)
    (one,) = calibrate()
    assert one.fit is not None
    # The prediction is 2 s of a median of 2.5: 20 % before. Three runs correct most of it.
    assert one.fit.error_before == pytest.approx(0.2)
    assert one.fit.error_after < 0.05
    assert one.memory_before == pytest.approx(2 / 22)
    assert one.memory_after is not None
    assert one.memory_after < 0.02
    kept = load("v4")
    assert kept == one.fit.calibration
    assert kept is not None
    assert [run.name for run in kept.runs] == ["tiny & small on v4-64"] * 3


def test_runs_that_were_sized_and_not_timed_correct_the_memory(make_plan: Make) -> None:
    make_plan().record(peak_bytes=22 * GiB)
    (one,) = calibrate()
    assert one.fit is None
    kept = load("v4")
    assert kept is not None
    assert kept.correction({"matrix": 2.0}, 2.0, 20 * GiB).bytes > GiB


def test_nothing_is_kept_when_only_looking(make_plan: Make) -> None:
    make_plan().record(step_seconds=2.5)
    (one,) = calibrate(save=False)
    assert one.saved is None
    assert load("v4") is None


def test_a_torn_line_is_left_out_with_a_warning(make_plan: Make) -> None:
    make_plan().record(step_seconds=2.5)
    with measured_path().open("a", encoding="utf-8") as out:
        out.write('{"name": "torn')
    with pytest.warns(UserWarning, match="line 2"):
        assert len(measurements()) == 1
    make_plan().record(step_seconds=2.6)
    with pytest.warns(UserWarning, match="line 2"):
        assert [one.step_seconds for one in measurements()] == [2.5, 2.6], "the next run has a line of its own"


def test_bad_runs_are_refused(make_plan: Make) -> None:
    with pytest.raises(ValueError, match="neither step_seconds nor peak_bytes"):
        make_plan().record()
    with pytest.raises(ValueError, match="step_seconds is a number above 0"):
        make_plan().record(step_seconds=0.0)
    with pytest.raises(ValueError, match="without a layout"):
        make_plan(candidates=()).record(step_seconds=1.0)
    with pytest.raises(ValueError, match="none kept"):
        calibrate()


def test_the_file_that_a_run_writes(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"step_seconds": 0.5, "peak_bytes": None}), encoding="utf-8")
    assert read_measured(file) == {"step_seconds": 0.5}
    file.write_text('{"step_second": 0.5}', encoding="utf-8")
    with pytest.raises(ValueError, match="Did you mean 'step_seconds'"):
        read_measured(file)
    for text, said in (
        ('{"step_seconds": "fast"}', "number above 0"),
        ("{}", "neither"),
        ('{"peak_bytes": true}', "True"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            read_measured(file)
    file.write_text("half", encoding="utf-8")
    with pytest.raises(ValueError, match="JSON file"):
        read_measured(file)
    with pytest.raises(ValueError, match="No such file"):
        read_measured(tmp_path / "gone.json")


@pytest.mark.parametrize(
    "change",
    [
        {"step_seconds": float("nan")},
        {"step_seconds": 0.0},
        {"peak_bytes": -1.0},
        {"step_seconds": True},
        {"step_seconds": "2"},
        {"parts": {"warp": 1.0}},
        {"parts": [1.0]},
        {"chip": "tpu_v99"},
    ],
)
def test_a_line_with_no_figures_is_left_out_and_not_the_other_runs(make_plan: Make, change: dict[str, object]) -> None:
    kept = make_plan().record(step_seconds=2.5)
    line = json.loads(measured_path().read_text())
    measured_path().write_text(json.dumps({**line, **change}) + "\n" + json.dumps(line) + "\n")
    with pytest.warns(UserWarning, match="line 1 of .* is left out"):
        (one,) = calibrate()
    assert one.runs == (kept,)
    assert one.fit is not None
