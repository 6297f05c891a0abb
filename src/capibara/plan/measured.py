"""What runs measured, kept beside what was predicted, and the correction that follows from it.

One JSON line a run, in the user's cache folder. Predictions are kept as the uncorrected model made them, so that an
old correction is never corrected again.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import chip as chip_by_name

if TYPE_CHECKING:
    from capibara.cost.calibration import Calibration, Fit, Run
    from capibara.cost.result import Estimate
    from capibara.hardware.topology import Slice
    from capibara.plan.result import Plan

__all__ = [
    "Calibrated",
    "Measurement",
    "calibrate",
    "measured_path",
    "measurements",
    "read_measured",
    "record",
    "record_step",
]

_KEYS = ("step_seconds", "peak_bytes", "note")


@dataclass(frozen=True)
class Measurement:
    """One run beside its plan."""

    name: str
    on: str
    chip: str
    layout: str
    date: str
    predicted_seconds: float
    predicted_bytes: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds by what bounds them."""
    step_seconds: float | None = None
    peak_bytes: float | None = None
    note: str = ""

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.step_seconds is None else self.predicted_seconds / self.step_seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.peak_bytes is None else self.predicted_bytes / self.peak_bytes - 1


@dataclass(frozen=True)
class Calibrated:
    """What the runs on one chip say."""

    chip: str
    runs: tuple[Measurement, ...]
    fit: Fit | None
    """None where no run was timed."""
    memory_before: float | None
    """Median of |predicted / measured - 1| for memory, and the same after the correction."""
    memory_after: float | None
    saved: Path | None


def measured_path() -> Path:
    """Where runs are kept: $CAPIBARA_CACHE_DIR, else the platform's cache folder."""
    chosen = os.environ.get("CAPIBARA_CACHE_DIR")
    base = (
        Path(chosen)
        if chosen
        else Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "capibara"
    )
    return base / "plans" / "measured.jsonl"


def record(
    plan: Plan, *, step_seconds: float | None = None, peak_bytes: float | None = None, note: str = ""
) -> Measurement:
    """Keep one run of the plan's best layout."""
    if plan.best is None:
        raise rule_error("A run is kept beside the layout it had", "a plan without a layout", "plan what was run")
    _check_figures({"step_seconds": step_seconds, "peak_bytes": peak_bytes})
    return record_step(
        plan.name,
        plan.where,
        plan.best.layout.name,
        _uncorrected(plan),
        step_seconds=step_seconds,
        peak_bytes=peak_bytes,
        note=note,
    )


def record_step(
    name: str,
    where: Slice,
    layout: str,
    estimate: Estimate,
    *,
    step_seconds: float | None = None,
    peak_bytes: float | None = None,
    note: str = "",
) -> Measurement:
    """Keep one run of a layout beside what the model predicts of it, which no calibration has corrected."""
    _check_figures({"step_seconds": step_seconds, "peak_bytes": peak_bytes})
    if estimate.correction is not None:
        raise rule_error(
            "A run is kept beside an uncorrected prediction", "a corrected one", "estimate without a calibration"
        )
    measurement = Measurement(
        name=name,
        on=where.name,
        chip=where.chip.name,
        layout=layout,
        date=datetime.date.today().isoformat(),
        predicted_seconds=estimate.seconds,
        predicted_bytes=estimate.memory.total,
        parts=estimate.seconds_by_bound,
        step_seconds=step_seconds,
        peak_bytes=peak_bytes,
        note=note,
    )
    path = measured_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    # One write of one line: runs that end together do not mix. A line that a crash left open is ended first.
    with path.open("a+b") as out:
        out.seek(max(0, out.seek(0, os.SEEK_END) - 1))
        torn = out.read(1) not in (b"", b"\n")
        out.write((b"\n" if torn else b"") + json.dumps(dataclasses.asdict(measurement)).encode() + b"\n")
    return measurement


def _check_figures(given: Mapping[str, Any]) -> None:
    figures = {name: given[name] for name in ("step_seconds", "peak_bytes") if given.get(name) is not None}
    if not figures:
        raise rule_error("A run measured something", "neither step_seconds nor peak_bytes", "pass one or both")
    for name, value in figures.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise rule_error(f"{name} is a number above 0", repr(value), "pass what was measured, or leave it out")


def _uncorrected(plan: Plan) -> Any:
    assert plan.best is not None
    if plan.calibration is None or plan.job is None:
        return plan.best.estimate
    from capibara.plan.search.evaluation import PaperModel

    return PaperModel(plan.job, plan.where).estimate(plan.best.layout)


def read_measured(path: str | Path) -> dict[str, Any]:
    """A file that a run wrote: {"step_seconds": 0.41, "peak_bytes": 4.2e10}."""
    file = Path(path)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise rule_error("What was measured is in a JSON file", f"{path}: {error.strerror}", "name it") from error
    except json.JSONDecodeError as error:
        raise rule_error("What was measured is in a JSON file", f"{path}: {error}", "mend it") from error
    if not isinstance(document, dict):
        raise rule_error("What was measured is a JSON object", repr(document), 'write {"step_seconds": 0.41}')
    for key in document:
        if key not in _KEYS:
            raise unknown_name(f"key of {file.name}", key, _KEYS)
    # Said before anything is planned, which may take minutes.
    _check_figures(document)
    return {key: value for key, value in document.items() if value is not None}


def measurements(chip: str | None = None) -> tuple[Measurement, ...]:
    """Every run that was kept, oldest first; those on one chip when it is named."""
    path = measured_path()
    if not path.is_file():
        return ()
    wanted = None if chip is None else chip_by_name(chip).name
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = Measurement(**json.loads(line))
            # A figure that is none, or a chip that nobody knows: one line is left out, and not the other runs.
            chip_by_name(one.chip)
            _as_run(one)
        except (ValueError, TypeError) as error:
            warnings.warn(f"line {number} of {path} is left out: it cannot be read ({error})", stacklevel=2)
            continue
        if wanted is None or one.chip == wanted:
            found.append(one)
    return tuple(found)


def calibrate(chip: str | None = None, *, save: bool = True) -> tuple[Calibrated, ...]:
    """The correction that the runs on each chip ask for; kept for later plans when `save`."""
    from capibara.cost import calibration as model

    kept = measurements(chip)
    if not kept:
        raise rule_error(
            "A calibration is made from runs beside their plans",
            f"none kept{'' if chip is None else f' of {chip}'} in {measured_path()}",
            "keep one with plan.record(step_seconds=...), or capibara plan TARGET --on ... --measured FILE",
        )
    answers = []
    for name in dict.fromkeys(one.chip for one in kept):
        runs = tuple(one for one in kept if one.chip == name)
        calibration = model.Calibration(name, tuple(_as_run(one) for one in runs))
        fit = model.fit(name, calibration.runs) if any(one.step_seconds is not None for one in runs) else None
        path = model.save(calibration) if save else None
        before, after = _memory_errors(calibration)
        answers.append(Calibrated(name, runs, fit, before, after, path))
    return tuple(answers)


def _as_run(one: Measurement) -> Run:
    from capibara.cost.calibration import Run

    return Run(
        one.parts,
        one.predicted_seconds,
        one.step_seconds,
        one.predicted_bytes,
        one.peak_bytes,
        one.date,
        f"{one.name or 'program'} on {one.on}",
    )


def _memory_errors(calibration: Calibration) -> tuple[float | None, float | None]:
    """Median of how far the predicted bytes were off, before the correction and after it."""
    before, after = [], []
    for run in calibration.runs:
        if run.predicted_bytes is None or run.measured_bytes is None:
            continue
        more = calibration.correction(run.parts, run.predicted_seconds, run.predicted_bytes).bytes
        before.append(abs(run.predicted_bytes / run.measured_bytes - 1))
        after.append(abs((run.predicted_bytes + more) / run.measured_bytes - 1))
    return (statistics.median(before), statistics.median(after)) if before else (None, None)
