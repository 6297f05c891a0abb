"""The cheapest way through a trace, by somebody who knows all of it: an exact dynamic program.

A state is the number of chips, the minutes that they are not working yet, and the work that waits. Since everything is
in whole chip-minutes there is no rounding, and since work may as well be done as soon as chips are there for it, the
policies that are compared are all there are: no policy does all of the work in time for less. Cool-downs do not
bind it, and it begins with as many chips as it likes.

The same program over a forecast instead of the trace is what the `cost_aware` policy does at each interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.errors import rule_error
from capibara.fleet.scaling.account import Outcome, Seen, dead_minutes, replay
from capibara.fleet.scaling.trace import Trace

__all__ = ["Problem", "cheapest", "forecast_choices"]


@dataclass(frozen=True)
class Problem:
    """A trace, or a forecast in its form, as the program sees it.

    Values, the least dollars from the beginning of an interval on, are arrays of [starting, size, cell]: the minutes
    until chips work, by `starting`; how many chips, by `sizes`; and the work that waits.
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

    @functools.cached_property
    def starting(self) -> list[int]:
        """Minutes that chips may still be starting when an interval begins."""
        found: list[int] = [0]
        for starting in found:
            for changed, preempted in ((False, False), (True, False), (False, True)):
                _, dead = dead_minutes(self.trace, starting=starting, changed=changed, preempted=preempted)
                left = max(0, dead - self.trace.interval_minutes)
                if left not in found:
                    found.append(left)
        return found

    def backward(self, last: Any, intervals: Sequence[int]) -> Iterator[Any]:
        """Interval after interval from the last, the values at its beginning; `last` are those after the last."""
        values = last
        for interval in reversed(intervals):
            following = self._with_late(values, interval)
            rows: dict[int, Any] = {}
            values = np.stack([self._least(following, interval, one, rows) for one in self.starting])
            if interval >= len(self.trace):
                values[:, :, 0] = 0.0  # nothing waits and nothing more comes: the chips are given back
            yield values

    def choices(self, after: Any, interval: int, chips: int, starting: int, backlog: int) -> dict[int, float]:
        """By number of chips: the least dollars from an interval on; `after` are the values after it."""
        changed, stayed, saving = self._ways(self._with_late(after, interval), interval, starting, {})
        which = self.sizes.index(chips)
        dollars = changed[:, backlog] + self.trace.price(interval) / 60 * saving * chips
        dollars[which] = stayed[which, backlog]
        return {size: float(value) for size, value in zip(self.sizes, dollars, strict=True) if value < math.inf}

    def _ways(self, following: Any, interval: int, starting: int, rows: dict[int, Any]) -> tuple[Any, Any, int]:
        """Dollars from an interval on by [chips in it, cell], for chips that are new in it, without what those before
        them cost while they save, and for chips that were there; and the minutes of saving.

        What other chips cost does not hang on those before but for that: the program is of one term a number of chips,
        not one a pair of them. `rows` has what was reckoned of this interval so far.
        """
        price, minutes = self.trace.price(interval) / 60, self.trace.interval_minutes
        preempted = interval in self.trace.preemptions
        sizes = np.array(self.sizes)[:, None]
        too_dear = sizes * price * 60 > self.limit
        found = []
        saving = 0
        for changed in (False, True):
            saving, dead = dead_minutes(self.trace, starting=starting, changed=changed, preempted=preempted)
            if dead not in rows:
                rows[dead] = self._after(following, interval, dead)
            found.append(np.where(too_dear, np.inf, rows[dead] + price * sizes * (minutes - saving)))
        stayed, new = found
        return new, stayed, saving

    def _least(self, following: Any, interval: int, starting: int, rows: dict[int, Any]) -> Any:
        """The least dollars from an interval on by [chips before it, cell]."""
        new, stayed, saving = self._ways(following, interval, starting, rows)
        if len(self.sizes) == 1:
            return stayed
        # Of other chips than before: the best, and for whoever is the best the second.
        best = new.argmin(axis=0)
        least, second = np.partition(new, 1, axis=0)[:2]
        others = np.where(np.arange(len(self.sizes))[:, None] == best, second, least)
        return np.minimum(stayed, others + self.trace.price(interval) / 60 * saving * np.array(self.sizes)[:, None])

    def _after(self, following: Any, interval: int, dead: int) -> Any:
        """What is still to pay after an interval by [chips in it, cell that it begins with]."""
        minutes = self.trace.interval_minutes
        arrived = -(-self.trace.arrived(interval) // self.unit)
        left = following[self.starting.index(max(0, dead - minutes))]
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
    last = np.full((len(problem.starting), len(sizes), problem.cells), np.inf)
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
    waiting_room: Callable[[int], int],
    late_dollars: float,
    waiting_dollars: float,
    left_dollars: float,
) -> dict[int, float]:
    """Dollars of going on with so many chips and then as cheaply as a forecast allows, by the number of chips.

    Args:
      trace: the forecast, from now on.
      waiting_room: of an interval, the chip-minutes that may be left after it.
      late_dollars: a chip-minute beyond that, in an interval.
      waiting_dollars: a chip-minute that waits, in an interval.
      left_dollars: for a chip-minute that waits at the end of the forecast.
    """
    start = -(-backlog // unit)
    cells = start + sum(-(-load // unit) for load in trace.arrivals) + 2
    room = tuple(min(cells - 1, waiting_room(interval) // unit) for interval in range(len(trace)))
    problem = Problem(trace, tuple(sizes), math.inf, unit, cells, room, late_dollars * unit, waiting_dollars * unit)
    if starting not in problem.starting:
        starting = min(problem.starting, key=lambda one: abs(one - starting))
    shape = (len(problem.starting), len(sizes), cells)
    last = np.broadcast_to(left_dollars * unit * np.arange(cells), shape)
    *_, values = last, *problem.backward(last, range(1, len(trace)))
    return problem.choices(values, 0, chips, starting, start)
