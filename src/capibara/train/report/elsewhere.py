"""What a run would take and cost on TPU chips, by the planner: predicted, as nothing of it ran there."""

from __future__ import annotations

from dataclasses import dataclass

from capibara.models.preset import Preset

__all__ = ["SLICE", "Elsewhere", "planned_elsewhere"]

SLICE = "v4-32"
_SEARCH_SECONDS = 10.0


@dataclass(frozen=True)
class Elsewhere:
    """A run's tokens on another slice."""

    where: str
    chips: int
    refusal: str = ""
    """Why there is no answer: it does not fit, or nothing divides. The figures are None then."""
    layout: str = ""
    step_seconds: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_second: float | None = None
    dollars: tuple[tuple[str, float], ...] = ()
    """By kind of price, for the run's tokens."""


def planned_elsewhere(preset: Preset, tokens: int, where: str = SLICE) -> Elsewhere:
    """The planner's best layout of this preset's step there, and what so many tokens cost."""
    from capibara.errors import unsaid
    from capibara.plan.api import plan
    from capibara.plan.place import place
    from capibara.plan.target import preset_job

    chips = place(where).chips
    try:
        with unsaid():  # which kernels a TPU would fall back to is not what ran here
            planned = plan(preset_job(preset), on=where, top=1, time_limit=_SEARCH_SECONDS)
    except ValueError as refusal:
        return Elsewhere(where, chips, str(refusal))
    if not planned.fits or planned.best is None:
        nearest = planned.changes[0].what if planned.changes else ""
        return Elsewhere(where, chips, "it does not fit" + (f"; it would with {nearest}" if nearest else ""))
    estimate = planned.best.estimate
    return Elsewhere(
        where,
        chips,
        layout=planned.best.layout.name,
        step_seconds=estimate.seconds,
        low=estimate.low,
        high=estimate.high,
        tokens_per_second=planned.tokens_per_second,
        dollars=tuple(
            (bill.price.kind.replace("_", " "), bill.usd_per_billion_tokens * tokens / 1e9)
            for bill in planned.bills
            if bill.usd_per_billion_tokens is not None
        ),
    )
