"""A user's own runs on a chip, which correct the cost model for programs like them; kept in the cache folder."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cost.correction import UNITS, Correction, correction, not_the_planned_program
from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import chip
from capibara.hardware.facts import Chip

if TYPE_CHECKING:
    from capibara.cost.result import Estimate

__all__ = ["Calibration", "Fit", "Run", "calibration_path", "fit", "load", "save"]

FORMAT = 2


@dataclass(frozen=True)
class Run:
    """One run beside its plan."""

    parts: Mapping[str, float]
    """Predicted seconds of each bound ("matrix", "vector", "memory", "host", "links"), without any calibration."""
    predicted_seconds: float
    measured_seconds: float | None = None
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    date: str = ""
    """The day, as 2026-11-15."""
    name: str = ""

    def __post_init__(self) -> None:
        figures = (self.predicted_seconds, self.measured_seconds, self.predicted_bytes, self.measured_bytes)
        if not all(one is None or (_is_number(one) and one > 0) for one in figures):
            raise rule_error(
                "A run has predicted and measured figures above zero",
                f"predicted {self.predicted_seconds!r} s and {self.predicted_bytes!r} bytes, measured "
                f"{self.measured_seconds!r} s and {self.measured_bytes!r} bytes",
                "leave out what was not measured",
            )
        if not isinstance(self.parts, Mapping) or not all(_is_number(one) and one >= 0 for one in self.parts.values()):
            raise rule_error("A run's parts are seconds from 0 up", repr(self.parts), "store what the plan says")
        for unit in self.parts:
            if unit not in UNITS:
                raise unknown_name("unit of a run's parts", unit, UNITS)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Calibration:
    """The runs of one chip. Each prediction for that chip is corrected by those that are like it."""

    chip: str
    runs: tuple[Run, ...] = ()

    def must_be_for(self, which: Chip) -> None:
        """A ValueError where this calibration is another chip's."""
        if chip(self.chip) != which:
            raise rule_error(
                "A calibration corrects the chip that it was measured on",
                f"one of {self.chip} for {which.name}",
                f"load the one of {which.name}, or pass none",
            )

    @property
    def dates(self) -> tuple[str, ...]:
        """Days of the runs, oldest first."""
        return tuple(sorted({run.date for run in self.runs if run.date}))

    def correction(self, parts: Mapping[str, float], seconds: float, bytes: float = 0.0) -> Correction:
        """What the runs say about a step that is predicted to take `seconds`, spent on units as in `parts`."""
        return correction(self.runs, parts, seconds, bytes)

    def corrected(self, found: Estimate) -> Estimate:
        """An estimate of the stock model, with what the runs say about a step like it."""
        asked = self.correction(found.seconds_by_bound, found.seconds, found.memory.total)
        seconds = asked.seconds(found.seconds_by_bound, found.seconds)
        ratio = seconds / found.seconds if found.seconds else 1.0
        factors, links = asked.factors, asked.factors["links"]
        before = sum(part.seconds for part in found.parts)
        work = sum(factors[part.bound] * part.seconds for part in found.parts) / before if before else 1.0
        # Runs may say that programs need less than was predicted, but never less than nothing.
        temporaries = max(0.0, found.memory.temporaries + asked.bytes)
        made = replace(
            found,
            memory=replace(found.memory, temporaries=temporaries),
            seconds=seconds,
            low=found.low * ratio,
            high=found.high * ratio,
            compute_seconds=found.compute_seconds * work,
            bubble_seconds=found.bubble_seconds * work,
            link_seconds=found.link_seconds * links,
            exposed_seconds=found.exposed_seconds * links,
            mfu=found.mfu / ratio,
            links=tuple(replace(use, seconds=use.seconds * links) for use in found.links),
            parts=tuple(replace(part, seconds=part.seconds * factors[part.bound]) for part in found.parts),
            correction=asked,
        )
        bounds = {**made.seconds_by_bound, "bubble": made.bubble_seconds}
        return replace(made, bound=max(bounds, key=lambda one: bounds[one]))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Fit:
    """A calibration and what it changes."""

    calibration: Calibration
    correction: Correction
    """Of a step of the runs' median length."""
    error_before: float
    """Median of |predicted / measured - 1| over the timed runs, uncorrected."""
    error_after: float
    """The same, each run corrected by all of them."""
    error_held_out: float | None
    """The same, each run corrected by the others: what a program that was not run can expect. None with one run."""
    notes: tuple[str, ...] = ()


def fit(which: str | Chip, runs: Sequence[Run]) -> Fit:
    """A calibration from runs beside their plans, and how much nearer to them it brings the model."""
    made = Calibration(chip(which).name, tuple(runs))
    timed = [run for run in runs if run.measured_seconds is not None]
    if not timed:
        raise rule_error("A calibration needs a timed run with its plan", "none", "store one with `plan.record(...)`")
    notes = [
        f"{run.name or 'a run'} took {run.measured_seconds:.3g} s where {run.predicted_seconds:.3g} s were predicted: "
        "it is not a run of what was planned, and is left out"
        for run in timed
        if not_the_planned_program(run)
    ]
    heard = [run for run in timed if not not_the_planned_program(run)]
    if len(heard) == 1:
        notes.append("one run: nothing is left to check its correction with")
    middle = sorted(heard or timed, key=lambda run: run.predicted_seconds)[len(heard or timed) // 2]
    held_out = [
        _off(run, [other for place, other in enumerate(runs) if place != mine])
        for mine, run in enumerate(runs)
        if any(run is one for one in heard)
    ]
    return Fit(
        made,
        made.correction(middle.parts, middle.predicted_seconds, middle.predicted_bytes or 0.0),
        statistics.median(_off(run, ()) for run in timed),
        statistics.median(_off(run, runs) for run in timed),
        statistics.median(held_out) if len(heard) > 1 else None,
        tuple(notes),
    )


def _off(run: Run, by: Sequence[Run]) -> float:
    """How far off a run's prediction is, corrected by some runs."""
    assert run.measured_seconds is not None
    expected = correction(by, run.parts, run.predicted_seconds, 0.0).seconds(run.parts, run.predicted_seconds)
    return abs(expected / run.measured_seconds - 1)


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
            raise ValueError("another version wrote it")
        made = Calibration(document.pop("chip"), tuple(Run(**run) for run in document.pop("runs")))
        if document:
            raise ValueError(f"it has {', '.join(document)} beside chip and runs")
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
