"""How many chips there should be next: the policies of the autoscaler, each a function of what was seen so far.

None knows the future. `cost_aware` asks what would be cheapest if the near future were as forecast; `utilization` keeps
the share of the chips that is used near its target; `fixed` stays.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from capibara.fleet.scaling.account import Seen
from capibara.fleet.scaling.oracle import forecast_choices
from capibara.fleet.scaling.trace import Trace

__all__ = ["POLICIES", "Bounds", "Policy"]


@dataclass(frozen=True)
class Bounds:
    """What a policy keeps to."""

    sizes: tuple[int, ...]
    """Numbers of chips that it may choose, in rising order: those whose price cannot pass the cost limit."""
    target_utilization: float
    hysteresis: float
    """A change must be worth so much: see each policy."""
    horizon_minutes: int = 240
    """How far `cost_aware` looks."""
    cooldown_minutes: float = 0.0
    """From a change to the next: who holds the policy to it tells it, or it would plan what it may not do."""


Policy = Callable[[Seen, Trace, Bounds], int]
"""From what is seen now, the minutes that things take (a trace's, without what happens in it) and the bounds: chips."""


def fixed(seen: Seen, facts: Trace, bounds: Bounds) -> int:
    """As many as there are."""
    return seen.chips


def utilization(seen: Seen, facts: Trace, bounds: Bounds) -> int:
    """The least chips that are used no more than the target, by the work of the last interval and what waits.

    It stays while the use is within `hysteresis` of the target. Prices do not move it.
    """
    if not seen.arrivals:
        return seen.chips
    # What waits is to be done within patience, beside what arrives.
    waiting = seen.backlog / max(facts.patience_minutes, facts.interval_minutes)
    needed = seen.arrivals[-1] / facts.interval_minutes + waiting
    used = needed / seen.chips
    wanted = next((size for size in bounds.sizes if needed <= size * bounds.target_utilization), bounds.sizes[-1])
    if wanted > seen.chips and used <= bounds.target_utilization * (1 + bounds.hysteresis):
        return seen.chips
    if wanted < seen.chips and needed > wanted * bounds.target_utilization * (1 - bounds.hysteresis):
        return seen.chips
    return wanted


def cost_aware(seen: Seen, facts: Trace, bounds: Bounds) -> int:
    """The first step of the cheapest way through a forecast.

    The forecast: work keeps arriving as it did of late, and leaves 1 - target_utilization of the chips in reserve; a
    price that is unusual comes back to the usual one; a preemption is as likely in each interval as it was so far.
    Nothing is changed within the cool-down. A change must save `hysteresis` times what it costs itself.

    How much may wait is no forecast: what waits arrived already, and when is known. Of the patience nothing is kept for
    bad luck, which the chance of a preemption stands for, until a slice was taken away: from then on as much as one
    preemption takes, since they have come two at a time.
    """
    if not seen.arrivals:
        return seen.chips
    interval = facts.interval_minutes
    count = max(facts.patience + 1, bounds.horizon_minutes // interval)
    # Beyond what the most chips do, more work changes nothing but the size of the forecast.
    most = bounds.sizes[-1] * interval
    load = min(_recent_load(seen.arrivals, interval) / bounds.target_utilization, _BEYOND * most)
    usual = _usual_price(seen)
    sizes = _weighed(bounds.sizes, seen.chips, load / interval)
    backlog = min(seen.backlog, _BEYOND * most * count)
    exact = max(1, math.gcd(*sizes) * math.gcd(interval, facts.startup_minutes, facts.checkpoint_minutes))
    unit = max(exact, math.ceil((load * count + backlog) / _CELLS))
    # In whole units, none of which is made or lost over several intervals: each rounded up would be up to a unit more.
    units = [round(load * step / unit) for step in range(count + 1)]
    forecast = Trace(
        "forecast",
        arrivals=tuple(unit * (after - before) for before, after in itertools.pairwise(units)),
        prices=tuple(usual + (seen.price - usual) * _stays(interval) ** step for step in range(count)),
        preemptions=(0,) if seen.preempted else (),
        interval_minutes=interval,
        startup_minutes=facts.startup_minutes,
        checkpoint_minutes=facts.checkpoint_minutes,
        redo_minutes=facts.redo_minutes,
        patience_minutes=facts.patience_minutes,
    )
    kept = math.ceil((facts.startup_minutes + facts.redo_minutes) / interval) if seen.preemptions else 0
    patience = max(0, facts.patience - kept)
    arrived = (*seen.arrivals[max(0, len(seen.arrivals) - patience) :], *forecast.arrivals)
    first = len(arrived) - count + 1
    dollars = forecast_choices(
        forecast,
        sizes,
        unit,
        seen.chips,
        seen.starting_minutes,
        backlog,
        [sum(arrived[max(0, end - patience) : end]) for end in range(first, first + count)],
        cooldown=min(count, math.ceil(bounds.cooldown_minutes / interval)),
        preemption_chance=_preemption_chance(seen, interval),
        late_dollars=_LATE * usual / 60,
        waiting_dollars=_WAITING * usual / 60,
        left_dollars=usual / 60,
    )
    best = min(dollars, key=dollars.__getitem__)
    own = seen.price / 60 * (facts.checkpoint_minutes * seen.chips + facts.startup_minutes * best)
    if seen.chips in dollars and dollars[seen.chips] - dollars[best] <= bounds.hysteresis * own:
        return seen.chips
    return best


_SIZES = 64
"""Numbers of chips that a decision weighs at the most."""
_CELLS = 4096
"""In so many parts is what waits divided; where it is more, the parts are coarser."""
_BEYOND = 2
"""A forecast's load is at most so many times what the most chips do."""
_LATE = 30.0
"""A chip-minute that waits too long costs so many chip-minutes in each interval."""
_WAITING = 0.01
"""The same for one that waits and is not late: a spike or a preemption may come before it is done."""
_FORGET_MINUTES = 25.0
"""Loads of so long ago weigh 1/e."""
_SPIKE_MINUTES = 60.0
"""Unusual prices last about as long."""
_PREEMPTIONS, _PREEMPTION_MINUTES = 0.5, 720.0
"""What is taken to have been seen of preemptions before anything was: so many, in so long."""


def _weighed(sizes: tuple[int, ...], chips: int, needed: float) -> tuple[int, ...]:
    """Of many sizes, those that a forecast tells apart: the one there is, those beside the load, and steps of the same
    ratio over the rest."""
    if len(sizes) <= _SIZES:
        return sizes
    places = len(sizes) - 1
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    steps = (math.exp(low + (high - low) * step / (_SIZES - 8)) for step in range(_SIZES - 7))
    beside = bisect.bisect_left(sizes, needed)
    near = (min(max(0, beside + offset), places) for offset in range(-2, 4))
    at = {min(bisect.bisect_left(sizes, step), places) for step in steps} | set(near)
    return tuple(sorted({sizes[place] for place in at} | {chips}))


def _stays(interval: int) -> float:
    return math.exp(-interval / _SPIKE_MINUTES)


def _preemption_chance(seen: Seen, interval: int) -> float:
    """In an interval, by how often it happened."""
    return min(1.0, (_PREEMPTIONS + seen.preemptions) / (_PREEMPTION_MINUTES / interval + seen.interval + 1))


def _recent_load(arrivals: Sequence[int], interval: int) -> float:
    """Of one interval, by weights that fade."""
    keep = math.exp(-interval / _FORGET_MINUTES)
    total = weight = 0.0
    factor = 1.0
    for load in reversed(arrivals[-64:]):
        total, weight, factor = total + factor * load, weight + factor, factor * keep
    return total / weight


def _usual_price(seen: Seen) -> float:
    """The median of what was paid so far: spikes do not move it."""
    paid = sorted((*seen.prices[-1023:], seen.price))
    return paid[len(paid) // 2]


POLICIES: dict[str, Policy] = {"cost_aware": cost_aware, "utilization": utilization, "fixed": fixed}
