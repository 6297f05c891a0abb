"""What measured runs say about one prediction: how much each unit of the chip is off, and how far that can be trusted.

A run's surplus over its prediction is either work that went slower, which grows with the work, or what every step costs
beside its work (its start, its input), which does not. Which of the two it was cannot be seen in one run, so both are
fitted at once, each held near nothing by what is likely before any run was seen: a run of a millisecond that took three
is read as a late start, a run of ten seconds that took thirteen as slow units. Few runs move a factor part of the way.

A run speaks for steps like it. What it says of a step that is n times longer or shorter counts about 1 / sqrt(n), and
beyond a thousand nothing; what it says of a unit that it hardly used is less than half of what it says of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from capibara.cost.calibration import Run

__all__ = ["UNITS", "Correction", "Witness", "correction", "not_the_planned_program", "trust"]

UNITS = ("matrix", "vector", "memory", "host", "links")
# What is likely before a run was seen, as standard deviations. The stock factors of a chip are off together (its power
# limit, its clock) and each for itself; the second is the larger, since they come from different sources.
_ALL_UNITS, _EACH_UNIT = 0.2, 0.25
# Programs on one chip differ from each other by so much: the line to which single ops are predicted.
_BETWEEN_PROGRAMS = 0.15
# What a step costs beside its work: a dispatch from Python takes a millisecond or two.
_STEP_SECONDS = 2e-3
# Bytes beside the predicted: a runtime's own reservation, the growth of all buffers, and programs between each other.
_RESERVED_BYTES, _GROWTH, _BYTES_BETWEEN_PROGRAMS = 2**29, 0.1, 0.05
_FARTHEST = 1000.0
# Beyond this the run was not what was planned.
_LARGEST = 4.0
_ROUNDS = 10


@dataclass(frozen=True)
class Witness:
    """One run, as seen from the prediction that it corrects."""

    name: str
    seconds: float
    """Measured."""
    bound: str
    """The unit that most of its predicted time is spent on."""
    times: float
    """Its predicted seconds over the prediction's: 0.01 is a hundred times shorter."""
    weight: float
    """From 0, unheard, to 1, a run of the same length that agrees with the others."""


@dataclass(frozen=True)
class Correction:
    """What is to be done to one prediction."""

    predicted_seconds: float
    """Uncorrected."""
    factors: Mapping[str, float]
    """Of each unit, seconds to expect over seconds predicted."""
    step_seconds: float
    """To be added to every step."""
    bytes: float
    """To be added to the predicted ones."""
    witnesses: tuple[Witness, ...]
    """Timed runs, the heaviest first."""

    def seconds(self, parts: Mapping[str, float], predicted: float) -> float:
        """The corrected seconds of a step; what is in no part (bubbles) is scaled as the parts together are."""
        return sum(self.factors[unit] * taken for unit, taken in _shares(parts, predicted).items()) + self.step_seconds


def trust(times: float) -> float:
    """How much a run counts for a step of another length: 1 for the same, falling as 1 / sqrt, 0 from a thousand."""
    longer = max(times, 1 / times)
    least = 1 / math.sqrt(_FARTHEST)
    return max(0.0, (1 / math.sqrt(longer) - least) / (1 - least))


def not_the_planned_program(run: Run) -> bool:
    """Whether a run is too far from its prediction to be a run of what was predicted."""
    assert run.measured_seconds is not None
    late = run.measured_seconds - 10 * _STEP_SECONDS
    return late > _LARGEST * run.predicted_seconds or run.measured_seconds < run.predicted_seconds / _LARGEST


def correction(
    runs: Sequence[Run], parts: Mapping[str, float], predicted_seconds: float, predicted_bytes: float
) -> Correction:
    """What `runs` say about a step that is predicted to take so long, by so much of each unit."""
    timed = [run for run in runs if run.measured_seconds is not None and not not_the_planned_program(run)]
    solved, weights = _times(timed, predicted_seconds)
    step_seconds, *off = solved
    factors = {unit: min(_LARGEST, max(1 / _LARGEST, 1 + float(one))) for unit, one in zip(UNITS, off, strict=True)}
    seen = [
        Witness(
            run.name,
            float(run.measured_seconds or 0.0),
            max(UNITS, key=lambda unit: run.parts.get(unit, 0.0)),
            run.predicted_seconds / predicted_seconds if predicted_seconds else math.inf,
            float(weight),
        )
        for run, weight in zip(timed, weights, strict=True)
    ]
    seen.sort(key=lambda one: -one.weight)
    return Correction(
        predicted_seconds, factors, max(0.0, float(step_seconds)), _bytes(runs, predicted_bytes), tuple(seen)
    )


def _shares(parts: Mapping[str, float], predicted: float) -> dict[str, float]:
    """Predicted seconds by unit, adding up to the whole step."""
    total = sum(parts.values())
    if not total:
        return dict.fromkeys(UNITS, predicted / len(UNITS))
    return {unit: predicted * parts.get(unit, 0.0) / total for unit in UNITS}


def _times(runs: Sequence[Run], predicted: float) -> tuple[Any, Any]:
    """Seconds of a step beside its work and each unit's share off, from runs; and how much each run counted."""
    import numpy as np

    if not runs or not predicted:
        return np.zeros(1 + len(UNITS)), np.zeros(len(runs))
    used = np.array([[_shares(run.parts, run.predicted_seconds)[unit] for unit in UNITS] for run in runs])
    whole = used.sum(axis=1)
    surplus = np.array([run.measured_seconds for run in runs], dtype=float) - whole
    near = np.array([trust(one / predicted) for one in whole])
    likely = np.zeros((1 + len(UNITS), 1 + len(UNITS)))
    likely[0, 0] = _STEP_SECONDS**2
    likely[1:, 1:] = _ALL_UNITS**2 + _EACH_UNIT**2 * np.eye(len(UNITS))
    table = np.hstack([np.ones((len(runs), 1)), used])
    middle = statistics.median(surplus / whole) * whole
    solved, weights = _robust(table, surplus, likely, _BETWEEN_PROGRAMS * whole, near, middle, _STEP_SECONDS)
    if solved[0] < 0:  # Nothing takes less than no time beside its work.
        likely[0, 0] = 0.0
        solved, weights = _robust(table, surplus, likely, _BETWEEN_PROGRAMS * whole, near, middle, _STEP_SECONDS)
    return solved, weights


def _bytes(runs: Sequence[Run], predicted: float) -> float:
    """Bytes to add to a prediction: a runtime's reservation and a share of the predicted ones."""
    import numpy as np

    sized = [(run.predicted_bytes, run.measured_bytes) for run in runs if run.predicted_bytes and run.measured_bytes]
    if not sized or not predicted:
        return 0.0
    whole = np.array([one for one, _ in sized], dtype=float)
    surplus = np.array([measured for _, measured in sized], dtype=float) - whole
    near = np.array([trust(one / predicted) for one in whole])
    likely = np.diag([_RESERVED_BYTES**2, _GROWTH**2])
    table = np.stack([np.ones(len(sized)), whole], axis=1)
    middle = statistics.median(surplus / whole) * whole
    solved, _ = _robust(table, surplus, likely, _BYTES_BETWEEN_PROGRAMS * whole, near, middle, _RESERVED_BYTES)
    return float(solved[0] + solved[1] * predicted)


def _robust(
    table: np.ndarray,
    surplus: np.ndarray,
    likely: np.ndarray,
    spread: np.ndarray,
    near: np.ndarray,
    middle: np.ndarray,
    beside: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest unknowns, given what was likely before (`likely`, a covariance) and `surplus` of each run.

    A run that is far from what the others say counts less (weights of a Cauchy distribution), from the median on, which
    one odd run does not move.
    """
    import numpy as np

    off = surplus - middle
    deviation = np.hypot(spread, beside)
    weights = near
    solved = np.zeros(table.shape[1])
    for _ in range(_ROUNDS):
        weights = near / (1 + (off / (2 * deviation)) ** 2)
        heard = weights > 0
        if not heard.any():
            return np.zeros(table.shape[1]), weights
        rows = table[heard]
        noise = np.diag(spread[heard] ** 2 / weights[heard])
        solved = likely @ rows.T @ np.linalg.solve(rows @ likely @ rows.T + noise, surplus[heard])
        off, deviation = surplus - table @ solved, spread
    return solved, weights
