"""Every run teaches the plan: its measured step is kept beside the predicted one, where `capibara plan` calibrates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capibara.plan.measured import Measurement, record_step
from capibara.train.report.summary import speed_of

if TYPE_CHECKING:
    from capibara.train.loop import Loop

__all__ = ["teach_plan"]

_LEAST_STEPS = 10
"""Fewer say more of the machine's warming up than of the step."""


def teach_plan(loop: Loop, name: str, rows: Sequence[Mapping[str, Any]], peak_bytes: int | None) -> Measurement | None:
    """Keep the median step of these rows of metrics, and the peak, beside what was predicted of the layout.

    None, and nothing is kept: where devices only stand for other chips, where nothing was planned or the step is not
    the planned one (activations sent to the host), or after too few steps.
    """
    chosen = loop.compiled.chosen
    if chosen.simulated or chosen.estimate is None or loop.options.offload_activations:
        return None
    speed = speed_of([dict(row) for row in rows])
    if speed is None or speed.steps < _LEAST_STEPS:
        return None
    measurement = record_step(
        name,
        chosen.where,
        chosen.layout.name,
        chosen.estimate,
        step_seconds=speed.seconds[1],
        peak_bytes=peak_bytes,
        note=f"capibara train, median of {speed.steps} steps",
    )
    loop.tell(f"kept for `capibara plan --calibrate`: the prediction was {measurement.time_error:+.0%} off")
    return measurement
