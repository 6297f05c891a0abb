"""The cheapest way through a trace, by somebody who knows all of it: an exact dynamic program.

A state is the number of chips, the minutes that they are not working yet, and the work that waits. Since everything is
in whole chip-minutes there is no rounding, and since work may as well be done as soon as chips are there for it, the
policies that are compared are all there are: no policy does all of the work in time for less. Cool-downs do not
bind it, and it begins with as many chips as it likes.

The same program over a forecast instead of the trace is what the `cost_aware` policy does at each interval: there
nobody changes within a cool-down, and any interval may bring a preemption.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from capibara.errors import rule_error
from capibara.fleet.scaling.account import Outcome, Seen, dead_minutes, replay
from capibara.fleet.scaling.trace import Trace

__all__ = ["Problem", "cheapest", "forecast_choices"]


class State(NamedTuple):
    """What holds back chips when an interval begins."""

    starting: int
    """Minutes until they work."""
    resting: int
    """Intervals in which nothing may be changed yet."""


@dataclass(frozen=True)
class Problem:
    """A trace, or a forecast in its form, as the program sees it.

    Values, the least dollars from the beginning of an interval on, are arrays of [state, size, cell]: what holds the
    chips back, by `states`; how many they are, by `sizes`; and the work that waits.
    """

    trace: Trace
    sizes: tuple[int, ...]
    limit: float
    """Dollars an hour."""
    unit: int
    """Chip-minutes of one cell of the backlog."""
    cells: int
    may_wait: tuple[int, ...]
    """Of each interval, the cells that may be left undone after it."""
    late_dollars: float = math.inf
    """What a late cell costs in each interval; infinite: nothing may be late."""
    waiting_dollars: float = 0.0
    """What any cell that waits costs in each interval."""
    cooldown: int | None = None
    """Intervals from a change to the next, and chips that start are left alone; None: any interval may change them."""
    preemption_chance: float = 0.0
    """Of a preemption in an interval that has none in the trace."""

    @functools.cached_property
    def states(self) -> list[State]:
        """Those that may be come to, free chips first."""
        found = [State(0, 0)]
        for state in found:
            for changed, preempted in ((False, False), (True, False), (False, True), (True, True)):
                if not changed or self._may_change(state, preempted):
                    after = self._following(state, changed, preempted)[2]
                    if after not in found:
                        found.append(after)
        return found

    def _may_change(self, state: State, preempted: bool) -> bool:
        return self.cooldown is None or (not state.resting and (preempted or not state.starting))

    def _following(self, state: State, changed: bool, preempted: bool) -> tuple[int, int, State]:
        """Of an interval: the minutes of saving, those that chips do not work, and the state after it."""
        saving, dead = dead_minutes(self.trace, starting=state.starting, changed=changed, preempted=preempted)
        rest = self.cooldown or 0 if changed else state.resting
        return saving, dead, State(max(0, dead - self.trace.interval_minutes), max(0, rest - 1))

    def backward(self, last: Any, intervals: Sequence[int]) -> Iterator[Any]:
        """Interval after interval from the last, the values at its beginning; `last` are those after the last."""
        values = last
        for interval in reversed(intervals):
            following = self._with_late(values, interval)
            rows: dict[tuple[int, State], Any] = {}
            values = np.stack([self._expected(following, interval, state, rows) for state in self.states])
            if interval >= len(self.trace):
                values[:, :, 0] = 0.0  # nothing waits and nothing more comes: the chips are given back
            yield values

    def choices(self, after: Any, interval: int, chips: int, starting: int, backlog: int) -> dict[int, float]:
        """By number of chips, where they may be changed: the least dollars from an interval on; `after` are the values
        after it."""
        state = min(self.states, key=lambda one: (one.resting, abs(one.starting - starting)))
        preempted = interval in self.trace.preemptions
        new, stayed, saving = self._ways(self._with_late(after, interval), interval, state, preempted, {})
        which = self.sizes.index(chips)
        dollars = np.full(len(self.sizes), np.inf)
        if new is not None:
            dollars = new[:, backlog] + self.trace.price(interval) / 60 * saving * chips
        dollars[which] = stayed[which, backlog]
        return {size: float(value) for size, value in zip(self.sizes, dollars, strict=True) if value < math.inf}

    def _ways(
        self, following: Any, interval: int, state: State, preempted: bool, rows: dict[tuple[int, State], Any]
    ) -> tuple[Any, Any, int]:
        """Dollars from an interval on by [chips in it, cell], for chips that are new in it, without what those before
        them cost while they save (None where nothing may change), and for chips that were there; and the minutes of
        saving.

        What other chips cost does not hang on those before but for that: the program is of one term a number of chips,
        not one a pair of them. `rows` has what was reckoned of this interval so far.
        """
        price, minutes = self.trace.price(interval) / 60, self.trace.interval_minutes
        sizes = np.array(self.sizes)[:, None]
        too_dear = sizes * price * 60 > self.limit
        found = []
        saving = 0
        for changed in (False, True)[: 1 + self._may_change(state, preempted)]:
            saving, dead, after = self._following(state, changed, preempted)
            if (dead, after) not in rows:
                rows[dead, after] = self._after(following[self.states.index(after)], interval, dead)
            found.append(np.where(too_dear, np.inf, rows[dead, after] + price * sizes * (minutes - saving)))
        stayed, new = (*found, None)[:2]
        return new, stayed, saving

    def _expected(self, following: Any, interval: int, state: State, rows: dict[tuple[int, State], Any]) -> Any:
        """The least dollars from an interval on by [chips before it, cell], before it is known whether it brings a
        preemption; `choices` knows."""
        if interval in self.trace.preemptions:
            return self._least(following, interval, state, True, rows)
        calm = self._least(following, interval, state, False, rows)
        chance = self.preemption_chance
        if not chance:
            return calm
        return (1 - chance) * calm + chance * self._least(following, interval, state, True, rows)

    def _least(
        self, following: Any, interval: int, state: State, preempted: bool, rows: dict[tuple[int, State], Any]
    ) -> Any:
        """The least dollars from an interval on by [chips before it, cell]."""
        new, stayed, saving = self._ways(following, interval, state, preempted, rows)
        if new is None or len(self.sizes) == 1:
            return stayed
        # Of other chips than before: the best, and for whoever is the best the second. As many again are not new: to
        # start them would spare the work that a preemption loses.
        best = new.argmin(axis=0)
        least, second = np.partition(new, 1, axis=0)[:2]
        others = np.where(np.arange(len(self.sizes))[:, None] == best, second, least)
        return np.minimum(stayed, others + self.trace.price(interval) / 60 * saving * np.array(self.sizes)[:, None])

    def _after(self, left: Any, interval: int, dead: int) -> Any:
        """What is still to pay after an interval by [chips in it, cell that it begins with]; `left` by the cell that it
        ends with."""
        minutes = self.trace.interval_minutes
        arrived = -(-self.trace.arrived(interval) // self.unit)
        found = np.empty_like(left)
        for which, size in enumerate(self.sizes):
            # A forecast's chips may do a part of a cell less than they would, never more.
            grows = arrived - size * max(0, minutes - dead) // self.unit
            if grows >= 0:
                kept = max(0, self.cells - grows)
                found[which, :kept] = left[which, grows:]
                found[which, kept:] = left[which, -1]
            else:
                done = min(self.cells, -grows)
                found[which, :done] = left[which, 0]
                found[which, done:] = left[which, : self.cells - done]
        return found

    def _with_late(self, values: Any, interval: int) -> Any:
        """Values after an interval, with what late work costs then."""
        room = self.may_wait[interval]
        over = self.waiting_dollars * np.arange(self.cells)
        beyond = np.arange(1, self.cells - room)
        over[room + 1 :] += np.inf if math.isinf(self.late_dollars) else self.late_dollars * beyond
        return values + over


class _Values:
    """The values at the beginning of each interval, in little memory: some are kept, the rest are reckoned again.

    A long trace has thousands of intervals of megabytes each. Kept are those of every `stride`-th, and a block of them
    at a time: twice the work, for twice the root of the memory.
    """

    def __init__(self, problem: Problem, last: Any, end: int) -> None:
        self.problem, self.end = problem, end
        self.stride = max(1, math.isqrt(end))
        self._kept = {end: last}
        for interval, values in zip(reversed(range(end)), problem.backward(last, range(end)), strict=True):
            if interval % self.stride == 0:
                self._kept[interval] = values
        self._block: dict[int, Any] = {}

    def __getitem__(self, interval: int) -> Any:
        if interval in self._kept:
            return self._kept[interval]
        if interval not in self._block:
            begin = interval - interval % self.stride
            end = min(begin + self.stride, self.end)
            inside = range(begin, end)
            found = self.problem.backward(self._kept[end], inside)
            self._block = dict(zip(reversed(inside), found, strict=True))
        return self._block[interval]


def cheapest(trace: Trace, sizes: Sequence[int], limit: float = math.inf) -> Outcome:
    """The outcome of the cheapest sequence of chips that does all of a trace's work in time.

    Args:
      trace: what is to be gone through.
      sizes: numbers of chips that there may be.
      limit: dollars an hour that are never passed.

    Examples:
        >>> from capibara.fleet.scaling.trace import Trace
        >>> day = Trace("day", arrivals=(40, 40, 0, 0), prices=(1.0, 1.0, 1.0, 1.0), patience_minutes=20)
        >>> cheapest(day, (1, 4)).chips
        [4, 4, 1, 1]
    """
    trace_end = len(trace) + trace.patience  # all is done by then, or something is late
    minutes = (trace.interval_minutes, trace.startup_minutes, trace.checkpoint_minutes, trace.redo_minutes)
    unit = math.gcd(math.gcd(*trace.arrivals), math.gcd(*sizes) * math.gcd(*minutes))
    # What waits is in time only where the most chips do it within patience: more is not looked at, whatever arrives.
    doable = sizes[-1] * trace.patience_minutes
    room = tuple(min(trace.may_wait(interval), doable) // unit for interval in range(trace_end))
    problem = Problem(trace, tuple(sizes), limit, unit, max(room) + 2, room)
    last = np.full((len(problem.states), len(sizes), problem.cells), np.inf)
    last[:, :, 0] = 0.0
    values = _Values(problem, last, trace_end)
    least = values[0][0, :, 0]
    if math.isinf(least.min()):
        raise rule_error(
            "A trace can be gone through in time",
            f"{trace.name!r} with {', '.join(map(str, sizes))} chips under {limit:g} dollars an hour",
            "allow more chips, more dollars or more patience",
        )

    def choose(seen: Seen) -> int:
        after = values[seen.interval + 1]
        dollars = problem.choices(after, seen.interval, seen.chips, seen.starting_minutes, seen.backlog // unit)
        return min(dollars, key=dollars.__getitem__)

    outcome = replay(trace, choose, sizes[int(least.argmin())])
    assert outcome.late == 0
    assert math.isclose(outcome.dollars, least.min(), rel_tol=1e-9, abs_tol=1e-9)
    return outcome


def forecast_choices(
    trace: Trace,
    sizes: Sequence[int],
    unit: int,
    chips: int,
    starting: int,
    backlog: int,
    may_wait: Sequence[int],
    cooldown: int,
    preemption_chance: float,
    late_dollars: float,
    waiting_dollars: float,
    left_dollars: float,
) -> dict[int, float]:
    """Dollars of going on with so many chips and then as cheaply as a forecast allows, by the number of chips.

    Args:
      trace: the forecast, from now on.
      may_wait: of each interval, the chip-minutes that may be left after it.
      cooldown: intervals from a change to the next.
      preemption_chance: in each interval after the first.
      late_dollars: a chip-minute beyond that, in an interval.
      waiting_dollars: a chip-minute that waits, in an interval.
      left_dollars: for a chip-minute that waits at the end of the forecast.
    """
    start = -(-backlog // unit)
    cells = start + sum(-(-load // unit) for load in trace.arrivals) + 2
    problem = Problem(
        trace,
        tuple(sizes),
        math.inf,
        unit,
        cells,
        tuple(min(cells - 1, room // unit) for room in may_wait),
        late_dollars * unit,
        waiting_dollars * unit,
        cooldown,
        preemption_chance,
    )
    shape = (len(problem.states), len(sizes), cells)
    last = np.broadcast_to(left_dollars * unit * np.arange(cells), shape)
    *_, values = last, *problem.backward(last, range(1, len(trace)))
    return problem.choices(values, 0, chips, starting, start)
