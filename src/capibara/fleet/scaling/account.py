"""What a trace costs with a given number of chips in each interval: the one account that every policy is held to.

In an interval, in this order: a slice may be taken away; the number of chips may change; chips that are not saving or
starting work on what has arrived, the oldest first; what has waited longer than the trace's patience is late. After
the trace's end the rest is worked off, and paid for, until nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from capibara.fleet.scaling.trace import Trace

__all__ = ["Outcome", "Seen", "Slot", "dead_minutes", "replay"]

_LONGEST_REST = 100
"""So many times its patience may a trace's rest take: chips that never catch up are told so, and no more."""


class Seen(NamedTuple):
    """What a policy knows when an interval begins: everything of before, and the price of now."""

    interval: int
    chips: int
    starting_minutes: int
    """How long the chips will not work yet."""
    backlog: int
    """Chip-minutes that wait."""
    arrivals: tuple[int, ...]
    """Of the intervals before, the last of them last."""
    prices: tuple[float, ...]
    """The same."""
    price: float
    """Of now."""
    preempted: bool
    """Whether the slice was taken away just now."""
    preemptions: int = 0
    """How often it was so far, now too."""


class Slot(NamedTuple):
    """One interval, as it went."""

    chips: int
    dollars: float
    served: int
    backlog: int
    late: int
    changed: bool
    hourly: float
    """The most that was paid at once, in dollars an hour."""


@dataclass
class Outcome:
    """What came of a trace."""

    trace: str
    dollars: float = 0.0
    work: int = 0
    """Done, in chip-minutes."""
    late: int = 0
    """Chip-minutes that were not done within patience."""
    redone: int = 0
    """Chip-minutes that preemptions lost, and that were done again."""
    dead: int = 0
    """Chip-minutes that were paid for while saving, starting or doing work again."""
    changes: list[int] = field(default_factory=list)
    """Intervals in which the number of chips changed."""
    slots: list[Slot] = field(default_factory=list)

    @property
    def highest_hourly(self) -> float:
        """Dollars an hour."""
        return max((slot.hourly for slot in self.slots), default=0.0)

    @property
    def chips(self) -> list[int]:
        return [slot.chips for slot in self.slots]


def dead_minutes(trace: Trace, *, starting: int, changed: bool, preempted: bool) -> tuple[int, int]:
    """(saving, in all): minutes of an interval's chips that go by before they work, at its beginning."""
    if preempted:
        return 0, trace.startup_minutes + (0 if starting else trace.redo_minutes)
    if changed:
        saving = 0 if starting else trace.checkpoint_minutes  # what has not started has nothing to save
        return saving, max(starting, saving + trace.startup_minutes)
    return 0, starting


def replay(trace: Trace, choose: Callable[[Seen], int], chips: int) -> Outcome:
    """Go through a trace, asking `choose` for the number of chips of each interval; `chips` are there at first."""
    outcome = Outcome(trace.name)
    starting = backlog = 0
    taken = frozenset(trace.preemptions)
    recent = 0  # what arrived within patience
    preemptions = 0
    interval = 0
    end = len(trace) + _LONGEST_REST * max(1, trace.patience)
    while interval < len(trace) or (backlog and interval < end):
        price, preempted = trace.price(interval), interval in taken
        preemptions += preempted
        after_end = max(0, interval - len(trace))
        arrivals = trace.arrivals[:interval] + (0,) * after_end
        prices = trace.prices[:interval] + trace.prices[-1:] * after_end
        seen = Seen(interval, chips, starting, backlog, arrivals, prices, price, preempted, preemptions)
        wanted = choose(seen)
        saving, dead = dead_minutes(trace, starting=starting, changed=wanted != chips, preempted=preempted)
        paid = chips * saving + wanted * (trace.interval_minutes - saving)
        served = min(backlog + trace.arrived(interval), wanted * max(0, trace.interval_minutes - dead))
        backlog += trace.arrived(interval) - served
        recent += trace.arrived(interval) - trace.arrived(interval - trace.patience)
        # Of what waits too long, what came to its time just now is counted; the rest was, in the intervals before.
        late = min(max(0, backlog - recent), trace.arrived(interval - trace.patience))
        outcome.dollars += price * paid / 60
        outcome.work += served
        outcome.late += late
        outcome.redone += trace.redo_minutes * chips if preempted and not starting else 0
        outcome.dead += chips * saving + wanted * min(dead - saving, trace.interval_minutes - saving)
        if wanted != chips:
            outcome.changes.append(interval)
        hourly = price * max(wanted, chips if saving else 0)
        outcome.slots.append(Slot(wanted, price * paid / 60, served, backlog, late, wanted != chips, hourly))
        chips, starting = wanted, max(0, dead - trace.interval_minutes)
        interval += 1
    return outcome
