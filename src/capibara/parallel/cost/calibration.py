"""What a user's own runs say about a chip: factors that correct the cost model, kept in the user's cache folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import rule_error
from capibara.hardware.chips import Chip, chip

__all__ = ["Calibration", "Fit", "Run", "calibration_path", "fit", "load", "save"]

FORMAT = 1
# A correction beyond this says that the run was not what was predicted, not that the chip is so much slower.
_LARGEST = 4.0
# With fewer runs than this, parts cannot be told apart from each other: all of them get the overall factor.
_RUNS_FOR_PARTS = 4
# A run speaks for a part when so much of its predicted time is spent there.
_DOMINANT = 0.6


@dataclass(frozen=True)
class Calibration:
    """Seconds measured over seconds predicted, for each unit of one chip; 1.0 leaves the model as it is."""

    chip: str
    matrix: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    overhead_bytes: float = 0.0
    """Bytes that runs needed beyond the predicted, on every chip."""
    runs: int = 0
    dates: tuple[str, ...] = ()
    """Days of the runs, oldest first."""

    def __post_init__(self) -> None:
        for name in ("matrix", "memory", "links"):
            factor = getattr(self, name)
            if not (isinstance(factor, int | float) and 1 / _LARGEST <= factor <= _LARGEST):
                raise rule_error(
                    f"A calibration's {name} is measured over predicted seconds, from {1 / _LARGEST} to {_LARGEST}",
                    repr(factor),
                    "check that the run and the plan are of the same program",
                )
        if not math.isfinite(self.overhead_bytes):
            raise rule_error("overhead_bytes is a finite number", repr(self.overhead_bytes), "use 0.0")

    def must_be_for(self, which: Chip) -> None:
        """A ValueError where this calibration is another chip's."""
        if chip(self.chip) != which:
            raise rule_error(
                "A calibration corrects the chip that it was measured on",
                f"one of {self.chip} for {which.name}",
                f"load the one of {which.name}, or pass none",
            )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Run:
    """One run beside its plan."""

    parts: Mapping[str, float]
    """Predicted seconds of each bound ("matrix", "vector", "memory", "links"), without any calibration."""
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    date: str = ""
    """The day, as 2026-11-15."""


@dataclass(frozen=True)
class Fit:
    """A calibration and what it changes."""

    calibration: Calibration
    error_before: float
    """Median of |predicted / measured - 1| over the runs, uncorrected."""
    error_after: float
    notes: tuple[str, ...] = ()


def _clamped(factor: float) -> float:
    return min(_LARGEST, max(1 / _LARGEST, factor))


def _check(run: Run) -> None:
    if not all(0 < seconds < math.inf for seconds in (run.measured_seconds, run.predicted_seconds)):
        raise rule_error(
            "A run has predicted and measured seconds above zero",
            f"predicted {run.predicted_seconds!r}, measured {run.measured_seconds!r}",
            "leave out runs that were not timed",
        )


def fit(which: str | Chip, runs: Sequence[Run]) -> Fit:
    """Factors from runs beside their plans: the median ratio, which one odd run does not move.

    With fewer than four runs all units get one factor; with more, runs that one unit dominates speak for that unit.
    """
    name = chip(which).name
    if not runs:
        raise rule_error("A calibration needs a run with its plan", "none", "store one with `plan.record(...)`")
    for run in runs:
        _check(run)
    overall = statistics.median(run.measured_seconds / run.predicted_seconds for run in runs)
    factors = dict.fromkeys(("matrix", "memory", "links"), overall)
    notes = []
    if len(runs) >= _RUNS_FOR_PARTS:
        for part in factors:
            speaking = [
                run.measured_seconds / run.predicted_seconds
                for run in runs
                if run.parts.get(part, 0.0) >= _DOMINANT * sum(run.parts.values())
            ]
            if len(speaking) >= 2:
                factors[part] = statistics.median(speaking)
            else:
                notes.append(f"{part}: no two runs are bound by it, so it has the overall factor")
    else:
        notes.append(f"{len(runs)} run{'s' * (len(runs) > 1)}: one factor for everything")
    for part, factor in factors.items():
        if factor != _clamped(factor):
            notes.append(f"{part}: a factor of {factor:.3g} was held at {_clamped(factor):.3g}")
            factors[part] = _clamped(factor)
    extra = [
        run.measured_bytes - run.predicted_bytes
        for run in runs
        if run.measured_bytes is not None and run.predicted_bytes is not None
    ]
    made = Calibration(
        name,
        **factors,
        overhead_bytes=statistics.median(extra) if extra else 0.0,
        runs=len(runs),
        dates=tuple(sorted({run.date for run in runs if run.date})),
    )
    before = statistics.median(abs(run.predicted_seconds / run.measured_seconds - 1) for run in runs)
    after = statistics.median(abs(_corrected(run, made) / run.measured_seconds - 1) for run in runs)
    return Fit(made, before, after, tuple(notes))


def _corrected(run: Run, made: Calibration) -> float:
    """The run's prediction with its parts scaled; what is in no part (launches, bubbles) stays as it is."""
    scale = {"matrix": made.matrix, "memory": made.memory, "links": made.links, "vector": made.memory}
    total = sum(run.parts.values())
    if not total:
        return run.predicted_seconds * made.matrix
    weighted = sum(seconds * scale.get(part, 1.0) for part, seconds in run.parts.items())
    return run.predicted_seconds * weighted / total


def calibration_path(which: str | Chip) -> Path:
    """Where a chip's calibration is kept: $CAPIBARA_CACHE_DIR, else the platform's cache folder."""
    chosen = os.environ.get("CAPIBARA_CACHE_DIR")
    base = (
        Path(chosen)
        if chosen
        else Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "capibara"
    )
    slug = re.sub(r"[^a-z0-9]+", "_", chip(which).name.lower())
    return base / "calibration" / f"{slug}.json"


def save(made: Calibration, path: Path | None = None) -> Path:
    """Write it; a reader never sees half a file."""
    path = path or calibration_path(made.chip)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"format": FORMAT, **made.as_dict()}, out, indent=1)
            out.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def load(which: str | Chip, path: Path | None = None) -> Calibration | None:
    """The chip's calibration; None when there is none. A file that cannot be read is set aside with a warning."""
    path = path or calibration_path(which)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(raw.decode("utf-8"))
        if document.pop("format") != FORMAT:
            raise ValueError("written by another version")
        made = Calibration(**{**document, "dates": tuple(document["dates"])})
        made.must_be_for(chip(which))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        aside = path.with_suffix(".corrupt")
        os.replace(path, aside)
        warnings.warn(
            f"The calibration {path} cannot be read ({type(error).__name__}: {error}). It was moved to {aside.name}; "
            "plans go on with the stock factors, and `capibara plan --calibrate` writes a new one.",
            stacklevel=2,
        )
        return None
    return made
