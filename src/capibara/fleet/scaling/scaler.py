"""`TpuAutoScaler`: how many chips a load should have, tried on traces and done to a trainer that runs."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capibara.errors import rule_error, say_once, unknown_name
from capibara.fleet import cost_models
from capibara.fleet.cost_models import CostModel
from capibara.fleet.scaling.account import Outcome, Seen, replay
from capibara.fleet.scaling.oracle import cheapest
from capibara.fleet.scaling.policies import POLICIES, Bounds
from capibara.fleet.scaling.trace import Trace, read_trace
from capibara.observe.sensors.reading import ACCELERATORS
from capibara.prices.table import PriceTable

if TYPE_CHECKING:
    from capibara.observe.monitor import TpuRealTimeMonitor

__all__ = ["Scaled", "Simulation", "TpuAutoScaler"]

logger = logging.getLogger(__name__)

_REMEMBERED = 1024


class Scaled(NamedTuple):
    """One change of a live run."""

    step: int
    """The last step before it."""
    before: int
    after: int
    usd_per_hour: float


@dataclass(frozen=True)
class Simulation:
    """A trace gone through by the scaler, beside the best fixed slice and somebody who knows the future."""

    outcome: Outcome
    fixed: Outcome
    """The smallest slice that does all of the work in time and never changes; the largest, where none does."""
    fixed_chips: int
    oracle: Outcome

    @property
    def of_oracle(self) -> float:
        """The scaler's dollars in parts of the least that the same work can cost."""
        return self.outcome.dollars / self.oracle.dollars

    @property
    def fixed_of_oracle(self) -> float:
        return self.fixed.dollars / self.oracle.dollars

    def as_dict(self) -> dict[str, Any]:
        return {
            "trace": self.outcome.trace,
            "dollars": self.outcome.dollars,
            "fixed_dollars": self.fixed.dollars,
            "fixed_chips": self.fixed_chips,
            "oracle_dollars": self.oracle.dollars,
            "of_oracle": self.of_oracle,
            "fixed_of_oracle": self.fixed_of_oracle,
            "work": self.outcome.work,
            "oracle_work": self.oracle.work,
            "late": self.outcome.late,
            "redone": self.outcome.redone,
            "dead": self.outcome.dead,
            "changes": len(self.outcome.changes),
            "highest_hourly": self.outcome.highest_hourly,
        }

    def __str__(self) -> str:
        return (
            f"{self.outcome.trace}: {self.outcome.dollars:.2f} USD, {self.of_oracle:.3f} of the least possible; a "
            f"fixed slice of {self.fixed_chips} chips is {self.fixed_of_oracle:.2f} of it; {len(self.outcome.changes)} "
            f"changes, {self.outcome.late} chip-minutes late, {self.outcome.redone} done again"
        )


class _Control:
    """A policy that keeps to its cool-down and leaves chips alone that are starting."""

    def __init__(self, policy: str, bounds: Bounds) -> None:
        self.policy, self.bounds = POLICIES[policy], bounds
        self.changed = -math.inf

    def __call__(self, seen: Seen, facts: Trace, now: float) -> int:
        sizes = self.bounds.sizes
        if seen.chips not in sizes:  # what somebody else began with: the nearest below, at once
            wanted = max((size for size in sizes if size <= seen.chips), default=sizes[0])
        elif now - self.changed < self.bounds.cooldown_minutes or (seen.starting_minutes and not seen.preempted):
            return seen.chips
        else:
            wanted = self.policy(seen, facts, self.bounds)
        if wanted != seen.chips:
            self.changed = now
        return wanted


class TpuAutoScaler:
    """Scales the number of chips with the load, within limits.

    A size is only taken where the highest price of its chips keeps to the cost limit: a price may rise inside of a
    cool-down, when nothing is changed.

    Args:
      min_chips: never fewer, where there are so many.
      max_chips: never more.
      target_utilization: share of the chips that is to be used; the rest is reserve.
      cost_limit_per_hour: dollars, never passed.
      scaling_policy: "cost_aware" looks for the fewest dollars within the forecast of load and price, "utilization"
        keeps the use near the target, "fixed" stays with the chips it has.
      sizes: numbers of chips to choose from; by default min_chips doubled as often as fits, and max_chips.
      cooldown_minutes: at most one change in that time.
      hysteresis: how much a change must be worth: for "cost_aware" it saves this many times what it costs itself, for
        "utilization" the use is this share off its target.
      cost_model: whose prices; "tpu_v4_pricing" is v4 on demand.
      pricing: a table, or a TOML file laid over the shipped one.
      region: the chip's first in the table by default.
      metrics: live: gives a mapping with "utilization" (a share), and "backlog" (chip-minutes that wait) where
        something waits; by default what this machine's monitor saw of its TPUs or GPUs since the last decision.
      interval_minutes: live: from one decision to the next.
      startup_minutes: live: what planning and compiling for other chips is assumed to take.
      checkpoint_minutes: live: the same of saving.
      patience_minutes: live: how long work may wait.
      on_change: live: called with the number of chips before a change is made: to rent them, or give them back after.
        Where it raises, that is logged and the work goes on: with fewer chips where fewer were wanted; with as many
        as before where more were, until the next decision.
      clock: live: seconds.

    Examples:
        >>> scaler = TpuAutoScaler(min_chips=4, max_chips=16, target_utilization=0.9, cost_limit_per_hour=60.0)
        >>> from capibara.fleet.scaling.trace import Trace
        >>> night = Trace("night", arrivals=(20,) * 6, prices=(0.92,) * 6, patience_minutes=30)
        >>> round(scaler.simulate(night).of_oracle, 3)
        1.0
    """

    def __init__(
        self,
        min_chips: int = 8,
        max_chips: int = 32,
        target_utilization: float = 0.8,
        cost_limit_per_hour: float = 200.0,
        scaling_policy: str = "cost_aware",
        *,
        sizes: Sequence[int] | None = None,
        cooldown_minutes: float = 30.0,
        hysteresis: float = 0.1,
        cost_model: str | CostModel = "tpu_v4_pricing",
        pricing: PriceTable | str | Path | None = None,
        region: str | None = None,
        metrics: Callable[[], Mapping[str, Any]] | None = None,
        interval_minutes: int = 5,
        startup_minutes: int = 5,
        checkpoint_minutes: int = 1,
        patience_minutes: int = 0,
        on_change: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("min_chips", min_chips), ("max_chips", max_chips)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise rule_error(f"{name} is a whole number from 1 up", repr(value), "use 8")
        if min_chips > max_chips:
            raise rule_error("min_chips is at most max_chips", f"{min_chips} and {max_chips}", "exchange them")
        if not 0 < target_utilization <= 1:
            raise rule_error("target_utilization is a share above 0 and up to 1", repr(target_utilization), "use 0.8")
        if not 0 < cost_limit_per_hour < math.inf:
            raise rule_error(
                "cost_limit_per_hour is a number of dollars above 0", repr(cost_limit_per_hour), "use 200.0"
            )
        if scaling_policy not in POLICIES:
            raise unknown_name("scaling_policy", scaling_policy, POLICIES)
        for name, number in (("cooldown_minutes", cooldown_minutes), ("hysteresis", hysteresis)):
            if not 0 <= number < math.inf:
                raise rule_error(f"{name} is a number from 0 up", repr(number), "leave it out")
        self.min_chips, self.max_chips = min_chips, max_chips
        self.target_utilization = target_utilization
        self.cost_limit_per_hour = cost_limit_per_hour
        self.scaling_policy = scaling_policy
        self.sizes = self._sizes(sizes)
        self.cooldown_minutes = cooldown_minutes
        self.hysteresis = hysteresis
        self.model = cost_models.cost_model(cost_model, pricing=pricing, region=region)
        self.metrics = metrics
        self.on_change = on_change
        self._clock = clock
        self._facts = Trace(
            "live",
            arrivals=(0,),
            prices=(self._price(),),
            interval_minutes=interval_minutes,
            startup_minutes=startup_minutes,
            checkpoint_minutes=checkpoint_minutes,
            redo_minutes=0,
            patience_minutes=patience_minutes,
        )
        self.affordable(self.sizes, self.model.highest)
        self.changes: deque[Scaled] = deque(maxlen=_REMEMBERED)
        """What was changed while `managed_scaling` was on; the last of them."""
        self.steps = 0
        """Reported inside of it."""

    def _sizes(self, sizes: Sequence[int] | None) -> tuple[int, ...]:
        if sizes is None:
            doubled = [self.min_chips << power for power in range(self.max_chips.bit_length())]
            sizes = [*(size for size in doubled if size < self.max_chips), self.max_chips]
        wrong = [size for size in sizes if not isinstance(size, int) or not self.min_chips <= size <= self.max_chips]
        if wrong or not sizes:
            raise rule_error(
                f"sizes are numbers of chips from min_chips = {self.min_chips} to max_chips = {self.max_chips}",
                repr(list(sizes)),
                "leave them out",
            )
        return tuple(sorted(set(sizes)))

    def affordable(self, sizes: Sequence[int], highest_price: float) -> tuple[int, ...]:
        """Those whose chips cannot pass the cost limit at the highest price that they may come to have."""
        found = tuple(size for size in sizes if size * highest_price <= self.cost_limit_per_hour)
        if not found:
            raise rule_error(
                "cost_limit_per_hour pays for the fewest chips at their highest price",
                f"{self.cost_limit_per_hour:g} USD, and {sizes[0]} chips at {highest_price:g} are "
                f"{sizes[0] * highest_price:.2f}",
                "raise the limit, or lower min_chips",
            )
        return found

    def _control(self, sizes: tuple[int, ...]) -> _Control:
        bounds = Bounds(sizes, self.target_utilization, self.hysteresis, cooldown_minutes=self.cooldown_minutes)
        return _Control(self.scaling_policy, bounds)

    # On traces.

    def simulate(self, trace: Trace | str | Path | Mapping[str, Any]) -> Simulation:
        """What this scaler makes of a trace, in dollars and lost work, against a fixed slice and a perfect oracle.

        Args:
          trace: a `Trace`, or what `read_trace` takes. It has its own prices, and minutes for starting and saving.
        """
        told = trace if isinstance(trace, Trace) else read_trace(trace)
        sizes = self.affordable(self.sizes, told.ceiling)
        control = self._control(sizes)
        begin = sizes[-1] if self.scaling_policy == "fixed" else sizes[0]
        # What a policy gets of the trace is its minutes: nothing of what is to come.
        facts = dataclasses.replace(told, arrivals=(0,), prices=(told.ceiling,), preemptions=())
        outcome = replay(told, lambda seen: control(seen, facts, seen.interval * told.interval_minutes), begin)
        chips, fixed = sizes[-1], None
        for size in sizes:
            chips, fixed = size, replay(told, lambda seen: seen.chips, size)
            if not fixed.late:
                break
        assert fixed is not None
        return Simulation(outcome, fixed, chips, cheapest(told, self.sizes, self.cost_limit_per_hour))

    # On a trainer.

    @contextmanager
    def managed_scaling(self) -> Iterator[TpuAutoScaler]:
        """Inside, training and serving go over to more or fewer of the attached devices, as the policy says.

        The trainer's loop asks between two steps. Before it changes it saves, where checkpoints are kept; then it plans
        and compiles for the other devices, and goes on with the next batch. Chips that are let go are idle: whoever
        rents them (`on_change`) gives them back. A model's own `train_step` is counted and stays where it is.

        A `capibara.serve.server.Server` that runs inside finishes what has begun, hands on what waits, and goes on with
        an engine on the other devices; its load is the share of its places that requests hold, and what waits.
        """
        from capibara.models import step_hooks
        from capibara.observe.monitor import TpuRealTimeMonitor

        with ExitStack() as stack:
            live = _Live(self, self.metrics)
            if live.metrics is None and self.scaling_policy != "fixed":
                live.metrics = _MonitorMetrics(stack.enter_context(TpuRealTimeMonitor()), lambda: len(live.placed))
            stack.enter_context(step_hooks.listening(live.listen))
            stack.enter_context(step_hooks.placing(live))
            yield self

    def _price(self) -> float:
        return self.model.price().usd


class _Live:
    """One `managed_scaling` context: what was seen since it began."""

    def __init__(self, scaler: TpuAutoScaler, metrics: Callable[[], Mapping[str, Any]] | None) -> None:
        self.scaler, self.metrics = scaler, metrics
        self.began = scaler._clock()
        self.next = self.began
        self.arrivals: deque[int] = deque(maxlen=_REMEMBERED)
        self.pool: list[Any] = []
        """Devices that steps may run on, those first that they began on."""
        self.placed: list[Any] = []
        self.per_chip = 1
        self.control: _Control | None = None

    def listen(self, step: int, state: Any) -> None:
        self.scaler.steps = step

    def place(self, devices: Sequence[Any], load: Callable[[], Mapping[str, Any]] | None = None) -> list[Any] | None:
        """The devices of the next step; None: these. `load` is a server's own word on what there is to do."""
        now = self.scaler._clock()
        control = self.control = self.control or self._first(devices)
        lost = set(self.placed) - set(devices)
        if lost and load is None:  # a recovery manager went on without them; a server was told to, and they are there
            self.pool = [device for device in self.pool if device not in lost]
        self.placed = list(devices)
        chips = len(devices) // self.per_chip
        if now < self.next and chips in control.bounds.sizes:
            return None
        self.next = now + 60 * self.scaler._facts.interval_minutes
        changed = control.changed
        seen = self._seen(chips, control, self.scaler.metrics or load or self.metrics)
        wanted = chips if seen is None else control(seen, self.scaler._facts, (now - self.began) / 60)
        others = [device for device in self.pool if device not in set(devices)]
        there = [*devices, *others]
        if wanted == chips or wanted * self.per_chip > len(there):
            return None
        hourly = wanted * self.scaler._price()
        logger.info("%d chips become %d, %.2f USD an hour", chips, wanted, hourly)
        if not self._tell(wanted) and wanted > chips:
            control.changed = changed  # nothing was, and the next decision may
            return None
        self.scaler.changes.append(Scaled(self.scaler.steps, chips, wanted, hourly))
        self.arrivals.clear()  # what a share of the old chips was says little of the new ones
        self.placed = there[: wanted * self.per_chip]
        return self.placed

    def called_off(self, devices: Sequence[Any]) -> None:
        """The last change was not made. It is tried again when its cool-down is over."""
        if self.scaler.changes:
            undone = self.scaler.changes.pop()
            logger.warning("%d chips did not become %d", undone.before, undone.after)
            self._tell(undone.before)
        self.placed = list(devices)

    def _tell(self, chips: int) -> bool:
        """Let whoever rents chips know; whether it went well. What fails there is theirs, and ends no work here."""
        if self.scaler.on_change is not None:
            try:
                self.scaler.on_change(chips)
            except Exception:
                logger.exception("on_change(%d) failed: chips are let go all the same, and none are added", chips)
                return False
        return True

    def _first(self, devices: Sequence[Any]) -> _Control:
        import jax

        from capibara.hardware.chips import chip_for

        self.pool = [*devices, *(one for one in jax.devices(devices[0].platform) if one not in set(devices))]
        self.placed = list(devices)
        chip = chip_for(devices[0].device_kind) if devices[0].platform == "tpu" else None
        self.per_chip = 1 if chip is None else chip.devices_per_chip
        there = len(self.pool) // self.per_chip
        scaler = self.scaler
        sizes = tuple(size for size in scaler.sizes if size <= there)
        if not sizes:
            say_once(
                logger,
                (there, scaler.min_chips),
                "min_chips is %d and %d chips are attached: scaling is over what is there",
                scaler.min_chips,
                there,
            )
            sizes = (there,)
        return scaler._control(scaler.affordable(sizes, scaler.model.highest))

    def _seen(self, chips: int, control: _Control, metrics: Callable[[], Mapping[str, Any]] | None) -> Seen | None:
        """What there is to decide by; None where nobody tells."""
        used: Any
        waiting: Any
        try:
            told = metrics() if metrics is not None else {}
            used, waiting = told.get("utilization"), told.get("backlog") or 0
            if "waiting_minutes" in told:
                waiting = told["waiting_minutes"] * chips
            self.scaler.steps = told.get("steps", self.scaler.steps)
        except Exception as error:  # a sensor that dies stops no training
            logger.info("metrics failed", exc_info=True)
            used, waiting = error, 0
        if not _is_number(used) or not used <= 1 or not _is_number(waiting):
            if self.scaler.scaling_policy != "fixed":
                text = "no chips are added or let go: nobody tells their utilization (%r, backlog %r); pass metrics="
                say_once(logger, (str(used), str(waiting)), text, used, waiting)
            # The limits hold without a sensor.
            return None if chips in control.bounds.sizes else self._with(chips, (), 0)
        self.arrivals.append(round(used * chips * self.scaler._facts.interval_minutes))
        return self._with(chips, tuple(self.arrivals), round(waiting))

    def _with(self, chips: int, arrivals: tuple[int, ...], waiting: int) -> Seen:
        price = self.scaler._price()
        return Seen(len(arrivals), chips, 0, waiting, arrivals, (price,) * len(arrivals), price, False)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


class _MonitorMetrics:
    """What this machine's monitor saw of its TPUs or GPUs since it was last asked; nothing where there are none.

    A host's own utilization is none of its chips', and is not taken for it.
    """

    def __init__(self, monitor: TpuRealTimeMonitor, in_use: Callable[[], int]) -> None:
        self.monitor, self.in_use = monitor, in_use
        self.samples = 0

    def __call__(self) -> Mapping[str, Any]:
        sources = self.monitor.get_current_metrics()["sources"]
        before, self.samples = self.samples, self.monitor.wait_for_sample()
        curves = self.monitor.curves(max(1, self.samples - before))
        chips = [source for source, told in sources.items() if told["kind"] in ACCELERATORS]
        told = [curve for source in chips if (curve := curves.get(source, {}).get("utilization"))]
        if not told:
            return {}
        mean = statistics.fmean(statistics.fmean(value for _, value in curve) for curve in told)
        # Of all chips of the machine; those that were let go are idle, and the work is that of the others.
        return {"utilization": min(1.0, mean * len(chips) / self.in_use())}
