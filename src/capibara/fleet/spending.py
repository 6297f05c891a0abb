"""`TpuCostOptimizer`: the cheapest way to run a job within a limit or a deadline, and what was spent so far."""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error, unknown_name
from capibara.fleet import cost_models
from capibara.fleet.cost_models import CostModel
from capibara.hardware.topology import Slice, slice_by_name, slice_names
from capibara.plan.place import hosts_of, place
from capibara.prices.spot import SpotAssumptions, SpotRun, spot_run
from capibara.prices.table import Price, PriceTable

if TYPE_CHECKING:
    from capibara.plan.result import Plan

__all__ = ["TARGETS", "Choice", "FlexStart", "Offer", "PlannedJob", "Spending", "TpuCostOptimizer", "planned_job"]

logger = logging.getLogger(__name__)

TARGETS = ("cost_efficiency", "deadline")
"""What the best offer is best at: the fewest dollars, or the earliest end."""

HOUR = 3600.0
_MOST_SLICES = 5


@dataclass(frozen=True)
class FlexStart:
    """What is assumed of flex-start: chips that one queues for, and that are not taken away."""

    wait_hours: float = 2.0
    """Assumed: nobody publishes how long the queue is."""
    most_hours: float = 168.0
    """Google Cloud's flex-start lasts seven days at the most."""

    def __post_init__(self) -> None:
        if not 0 <= self.wait_hours < math.inf or not self.most_hours > 0:
            raise rule_error(
                "wait_hours is from 0 up and most_hours above 0", f"{self.wait_hours}, {self.most_hours}", "use 2, 168"
            )


@dataclass(frozen=True)
class Placement:
    """A job on one slice by one layout."""

    where: Slice
    layout: str
    step_seconds: float
    bytes_per_chip: float
    fits: bool


@dataclass(frozen=True)
class PlannedJob:
    """As much of a job as money needs: how many steps, and what one takes on each slice that it may have."""

    name: str
    steps: int
    placements: tuple[Placement, ...]
    state_bytes: float
    """Of a checkpoint."""


@dataclass(frozen=True)
class Offer:
    """One way to run a job: where, by which layout, paid how."""

    placement: Placement
    price: Price
    work_hours: float
    """That the steps take, without interruptions and waiting."""
    paid_hours: float
    """With what interruptions take."""
    hours: float
    """Until it is done, with waiting for chips."""
    usd_per_hour: float
    dollars: float
    spot: SpotRun | None = None

    @property
    def kind(self) -> str:
        return self.price.kind

    def __str__(self) -> str:
        place = self.placement
        return (
            f"{place.where.name} {self.kind.replace('_', ' ')}, {place.layout}: {self.dollars:.2f} USD in "
            f"{self.hours:.3g} h at {self.usd_per_hour:.2f} USD an hour"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "on": self.placement.where.name,
            "chips": self.placement.where.chips,
            "layout": self.placement.layout,
            "kind": self.kind,
            "usd_per_chip_hour": self.price.usd,
            "price_date": self.price.date,
            "usd_per_hour": self.usd_per_hour,
            "step_seconds": self.placement.step_seconds,
            "work_hours": self.work_hours,
            "paid_hours": self.paid_hours,
            "hours": self.hours,
            "dollars": self.dollars,
            "spot_efficiency": None if self.spot is None else self.spot.efficiency,
        }


@dataclass(frozen=True)
class Choice:
    """The offers that keep to limit and deadline, the best first, and why each other does not."""

    job: PlannedJob
    offers: tuple[Offer, ...]
    refused: tuple[tuple[str, str], ...]
    deadline_hours: float | None

    @property
    def best(self) -> Offer | None:
        return self.offers[0] if self.offers else None

    def __str__(self) -> str:
        if self.best is not None:
            return str(self.best)
        return "; ".join(f"{what}: {why}" for what, why in self.refused) or "no slice was considered"

    def as_dict(self) -> dict[str, Any]:
        return {
            "job": self.job.name,
            "steps": self.job.steps,
            "deadline_hours": self.deadline_hours,
            "best": None if self.best is None else self.best.as_dict(),
            "offers": [one.as_dict() for one in self.offers],
            "refused": [list(one) for one in self.refused],
        }


def planned_job(plans: Plan | Iterable[Plan], *, steps: int | None = None, tokens: float | None = None) -> PlannedJob:
    """A job of plans of the same program, a plan a slice; so many steps, or as many as so many tokens take."""
    from capibara.plan.result import Plan

    made = [plans] if isinstance(plans, Plan) else list(plans)
    if not made:
        raise rule_error("A job has a plan or more", "none", "plan it on a slice")
    _check_length(steps, tokens)
    if steps is None:
        if not made[0].tokens:
            raise rule_error("A length in tokens needs a program with tokens", made[0].name, "give steps")
        steps = math.ceil(float(tokens or 0) / made[0].tokens)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise rule_error("steps is a whole number from 1 up", repr(steps), "use steps=1000")
    placements = tuple(
        Placement(plan.where, one.layout.name, one.estimate.seconds, one.bytes, plan.fits and one.fits)
        for plan in made
        for one in plan.candidates
    )
    return PlannedJob(made[0].name, steps, placements, made[0].state_bytes)


def _check_length(steps: int | None, tokens: float | None) -> None:
    if (steps is None) == (tokens is None):
        raise rule_error(
            "A job's length is steps or tokens, one of them", f"steps={steps}, tokens={tokens}", "use steps=1000"
        )


@dataclass(frozen=True)
class Spending:
    """What was spent, against what may be."""

    dollars: float
    usd_per_hour: float
    """Of what is rented now."""
    budget: float | None
    hours_left: float | None
    """Until the budget is spent, as things are; None without one, or with nothing rented."""
    alerts: tuple[str, ...]
    """Every one so far, in the order in which they came."""

    @property
    def share(self) -> float | None:
        """Of the budget."""
        return None if not self.budget else self.dollars / self.budget

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


@dataclass
class _Rental:
    chips: int
    usd: float
    began: float
    ended: float | None = None

    def dollars(self, now: float) -> float:
        return self.chips * self.usd * ((now if self.ended is None else self.ended) - self.began) / HOUR


class TpuCostOptimizer:
    """Chooses where a job runs, and keeps account of what running costs.

    Args:
      max_cost_per_hour: dollars; no offer is above it.
      cost_model: "tpu_v4_pricing" weighs every kind of price that the table has for the chip against the others;
        "tpu_v4_spot" and the like are one kind.
      optimization_target: "cost_efficiency", the fewest dollars; or "deadline", the earliest end.
      budget: dollars that may be spent in all; alerts come at the shares `alert_at` of it.
      pricing: a table, or a TOML file laid over the shipped one.
      region: whose prices; the chip's first in the table by default.
      spot: what is assumed about preemptions.
      flex_start: what is assumed about queues.
      alert_at: shares of the budget at which there is an alert.
      on_alert: called with each alert once; what it raises is logged and stops nothing.
      clock: seconds.

    Examples:
        >>> optimizer = TpuCostOptimizer(max_cost_per_hour=100.0, budget=50.0, clock=iter([0.0, 3600.0]).__next__)
        >>> _ = optimizer.rent("v4-8")
        >>> round(optimizer.spent().dollars, 2)
        12.88
    """

    def __init__(
        self,
        max_cost_per_hour: float = 100.0,
        cost_model: str | CostModel = "tpu_v4_pricing",
        optimization_target: str = "cost_efficiency",
        *,
        budget: float | None = None,
        pricing: PriceTable | str | Path | None = None,
        region: str | None = None,
        spot: SpotAssumptions | None = None,
        flex_start: FlexStart | None = None,
        alert_at: Sequence[float] = (0.5, 0.8, 1.0),
        on_alert: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, value in (("max_cost_per_hour", max_cost_per_hour), ("budget", budget)):
            if value is not None and not 0 < value < math.inf:
                raise rule_error(f"{name} is a number of dollars above 0", repr(value), "use 100.0")
        if optimization_target not in TARGETS:
            raise unknown_name("optimization_target of costs", optimization_target, TARGETS)
        if any(not share > 0 for share in alert_at):
            raise rule_error("alert_at are shares of the budget above 0", tuple(alert_at), "use (0.5, 0.8, 1.0)")
        self.max_cost_per_hour = max_cost_per_hour
        self.model = cost_models.cost_model(cost_model, pricing=pricing, region=region)
        self.optimization_target = optimization_target
        self.budget = budget
        self.spot = spot or SpotAssumptions()
        self.flex_start = flex_start or FlexStart()
        self.alert_at = tuple(sorted(alert_at))
        self.on_alert = on_alert
        self._clock = clock
        self._pricing, self._region = pricing, region
        self._rentals: list[_Rental] = []
        self._settled = 0.0
        self._alerts: dict[str, str] = {}

    # What to rent.

    def choose(
        self,
        job: PlannedJob | Plan | Iterable[Plan] | Any,
        deadline: float | datetime.timedelta | None = None,
        *,
        steps: int | None = None,
        tokens: float | None = None,
        on: Sequence[str | Slice] | None = None,
        time_limit: float | None = 20.0,
    ) -> Choice:
        """Every way to run a job that keeps to the hourly limit and the deadline, the best first.

        Args:
          job: a `PlannedJob`; a plan of `capibara.plan.plan`, or several on different slices; or what that takes, which
            is then planned on each slice of `on`.
          deadline: hours from now, or a timedelta, in which it is to be done: by the predicted time of a step, and on
            spot with the expected interruptions.
          steps: how many, of a job that is not a `PlannedJob`.
          tokens: the same, counted in tokens.
          on: slices to plan for; by default the smallest of the chip that the hourly limit allows.
          time_limit: seconds that the search for layouts has on each of them.
        """
        hours = _hours(deadline)
        if isinstance(job, PlannedJob):
            for name, value in (("steps", steps), ("tokens", tokens), ("on", on)):
                if value is not None:
                    raise rule_error("A PlannedJob has its length and its slices", f"{name}={value!r}", "leave it out")
        made = job if isinstance(job, PlannedJob) else self._planned(job, steps, tokens, on, time_limit)
        offers, refused = [], []
        for placement in made.placements:
            what = f"{placement.where.name} by {placement.layout}"
            if not placement.fits:
                refused.append((what, "does not fit the chips' memory"))
                continue
            if placement.where.chip.name != self.model.chip.name:
                refused.append((what, f"{self.model.name} has no price for {placement.where.chip.name}"))
                continue
            for price in self.model.prices:
                offer, why = self._offer(made, placement, price, hours)
                if why or offer is None:
                    refused.append((f"{what}, {price.kind}", why))
                else:
                    offers.append(offer)
        offers.sort(key=self._rank)
        return Choice(made, tuple(offers), tuple(refused), hours)

    def _offer(
        self, job: PlannedJob, placement: Placement, price: Price, deadline: float | None
    ) -> tuple[Offer | None, str]:
        """The offer, or why there is none."""
        where = placement.where
        hourly = price.usd * where.chips
        if hourly > self.max_cost_per_hour:
            return None, f"costs {hourly:.2f} USD an hour, over {self.max_cost_per_hour:g}"
        work = job.steps * placement.step_seconds / HOUR
        run, paid, waiting = None, work, 0.0
        if price.kind == "spot":
            run = spot_run(job.state_bytes, hosts_of(where), self.spot)
            if run.efficiency <= 0:
                return None, "is interrupted before it can save"
            paid = work / run.efficiency
        elif price.kind == "flex_start":
            waiting = self.flex_start.wait_hours
            if paid > self.flex_start.most_hours:
                return None, f"takes {paid:.3g} h, and flex-start lasts {self.flex_start.most_hours:g}"
        hours = waiting + paid
        if deadline is not None and hours > deadline:
            return None, f"takes {hours:.3g} h, over the deadline of {deadline:g}"
        return Offer(placement, price, work, paid, hours, hourly, hourly * paid, run), ""

    def _rank(self, offer: Offer) -> tuple[float, ...]:
        first = (
            (offer.dollars, offer.hours)
            if self.optimization_target == "cost_efficiency"
            else (
                offer.hours,
                offer.dollars,
            )
        )
        return (*first, offer.placement.where.chips)

    def _planned(
        self, job: Any, steps: int | None, tokens: float | None, on: Sequence[str | Slice] | None, limit: float | None
    ) -> PlannedJob:
        from capibara.plan.api import plan
        from capibara.plan.result import Plan

        if isinstance(job, Plan) or (isinstance(job, (list, tuple)) and all(isinstance(one, Plan) for one in job)):
            if on is not None:
                raise rule_error("Plans say which slices they are for", f"on={on!r}", "leave it out")
            return planned_job(job, steps=steps, tokens=tokens)
        _check_length(steps, tokens)  # said before seconds are spent on planning
        slices = [place(one) for one in on] if on is not None else self._slices()
        pricing, region = self._pricing, self._region
        plans = [plan(job, on=one, pricing=pricing, region=region, time_limit=limit) for one in slices]
        return planned_job(plans, steps=steps, tokens=tokens)

    def _slices(self) -> list[Slice]:
        """The smallest slices of the chip that the limit allows at its lowest price, each twice the one before."""
        if self.model.chip.slices is None:
            sizes = [place(f"{self.model.chip.name}x{count}") for count in (1, 2, 4, 8)]
        else:
            sizes = [slice_by_name(name) for name in slice_names(self.model.chip)]
        lowest = min(one.usd for one in self.model.prices)
        allowed = [one for one in sizes if one.chips.bit_count() == 1 and one.chips * lowest <= self.max_cost_per_hour]
        if not allowed:
            raise rule_error(
                "The hourly limit pays for the smallest slice",
                f"{self.max_cost_per_hour:g} USD, and {sizes[0]} is {sizes[0].chips * lowest:.2f}",
                "raise max_cost_per_hour",
            )
        return allowed[:_MOST_SLICES]

    # What was spent.

    @contextmanager
    def rented(self, what: Offer | Slice | str | int, kind: str | None = None) -> Iterator[TpuCostOptimizer]:
        """Inside, so many chips are paid for."""
        rental = self.rent(what, kind)
        try:
            yield self
        finally:
            self.give_back(rental)

    def rent(self, what: Offer | Slice | str | int, kind: str | None = None) -> _Rental:
        """From now on, chips are paid for: of an offer, of a slice by name, or so many of the cost model's."""
        if isinstance(what, Offer):
            if kind is not None:
                raise rule_error("An offer says how it is paid", f"kind={kind!r}", "leave it out")
            chips, usd = what.placement.where.chips, what.price.usd
        else:
            chips = what if isinstance(what, int) else self._of_model(place(what)).chips
            usd = self.model.price(kind).usd
        if isinstance(chips, bool) or chips < 1:
            raise rule_error("Chips are rented one or more at a time", repr(chips), "use 4")
        now = self._clock()
        rental = _Rental(chips, usd, now)
        self._rentals.append(rental)
        self._look(now)
        return rental

    def _of_model(self, where: Slice) -> Slice:
        if where.chip.name != self.model.chip.name:
            raise rule_error(
                f"What is rented has a price in {self.model.name}",
                f"{where.name}, of {where.chip.name}",
                f'use TpuCostOptimizer(cost_model="{where.chip.name}_pricing")',
            )
        return where

    def give_back(self, rental: _Rental) -> None:
        """From now on, these chips are not paid for."""
        if rental in self._rentals:
            rental.ended = self._clock()
            self._settled += rental.dollars(rental.ended)
            self._rentals.remove(rental)
            self._look(rental.ended)

    def spent(self) -> Spending:
        """What was spent so far, against the budget; alerts that are due are given."""
        now = self._clock()
        self._look(now)
        dollars, hourly = self._total(now), self._hourly()
        left = None if self.budget is None or not hourly else max(0.0, self.budget - dollars) / hourly
        return Spending(dollars, hourly, self.budget, left, tuple(self._alerts.values()))

    def _total(self, now: float) -> float:
        return self._settled + sum(one.dollars(now) for one in self._rentals)

    def _hourly(self) -> float:
        return sum(one.chips * one.usd for one in self._rentals)

    def _look(self, now: float) -> None:
        hourly, dollars = self._hourly(), self._total(now)
        if hourly > self.max_cost_per_hour:
            text = f"{hourly:.2f} USD an hour are being paid, over the limit of {self.max_cost_per_hour:g}"
            self._alert("hourly limit", text)
        for share in self.alert_at if self.budget is not None else ():
            if self.budget is not None and dollars >= share * self.budget:
                self._alert(
                    f"budget {share}", f"{dollars:.2f} USD are spent, {share:.0%} of the {self.budget:g} or more"
                )

    def _alert(self, key: str, text: str) -> None:
        if key in self._alerts:
            return
        self._alerts[key] = text
        logger.warning("%s", text)
        if self.on_alert is not None:
            try:
                self.on_alert(text)
            except Exception:
                logger.exception("on_alert failed")


def _hours(deadline: float | datetime.timedelta | None) -> float | None:
    if deadline is None:
        return None
    hours = deadline.total_seconds() / HOUR if isinstance(deadline, datetime.timedelta) else deadline
    if isinstance(hours, bool) or not isinstance(hours, (int, float)) or not 0 < hours < math.inf:
        raise rule_error("A deadline is hours from now above 0, or a timedelta", repr(deadline), "use deadline=24")
    return float(hours)
