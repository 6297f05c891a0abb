"""The oracle is the cheapest there is: every sequence of chips is tried, on traces that are short enough."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from capibara.fleet.scaling.account import Outcome, Seen, dead_minutes, replay
from capibara.fleet.scaling.drawn import TraceKind, draw_trace
from capibara.fleet.scaling.oracle import Problem, _Values, cheapest
from capibara.fleet.scaling.trace import Trace


def every_outcome(trace: Trace, sizes: tuple[int, ...], limit: float) -> Any:
    """All of them that finish in time and keep to the limit, by the account of `replay`."""
    longest = len(trace) + trace.patience
    for begin in sizes:
        for chips in itertools.product(sizes, repeat=longest):
            outcome = replay(trace, lambda seen, chips=chips: chips[min(seen.interval, longest - 1)], begin)
            if not outcome.late and all(slot.chips * trace.price(n) <= limit for n, slot in enumerate(outcome.slots)):
                yield outcome


def short_trace(seed: int) -> Trace:
    draw = random.Random(seed)
    count = 4
    return Trace(
        f"short {seed}",
        arrivals=tuple(draw.choice((0, 4, 10, 16, 28)) for _ in range(count)),
        prices=tuple(draw.choice((1.0, 1.0, 3.0)) for _ in range(count)),
        preemptions=tuple(sorted(draw.sample(range(count), draw.choice((0, 1, 2))))),
        startup_minutes=draw.choice((3, 10, 14)),
        checkpoint_minutes=draw.choice((0, 2)),
        redo_minutes=draw.choice((0, 5)),
        patience_minutes=draw.choice((10, 20)),
    )


@pytest.mark.parametrize("seed", [*range(10), pytest.param(10, marks=pytest.mark.quick)])
def test_nothing_is_cheaper(seed: int) -> None:
    trace, sizes = short_trace(seed), (1, 2, 4)
    limit = 8.0 if seed % 3 == 0 else 100.0
    possible = [outcome.dollars for outcome in every_outcome(trace, sizes, limit)]
    if not possible:
        with pytest.raises(ValueError, match="gone through in time"):
            cheapest(trace, sizes, limit)
        return
    found = cheapest(trace, sizes, limit)
    assert found.dollars == pytest.approx(min(possible), abs=1e-9)
    assert found.work == trace.work
    assert found.late == 0


def least_with_cooldown(trace: Trace, sizes: tuple[int, ...], cooldown: int | None) -> float:
    """By the program that a forecast is gone through with, from the smallest size on."""
    end = len(trace) + trace.patience
    room = tuple(trace.may_wait(interval) for interval in range(end))
    problem = Problem(trace, sizes, math.inf, 1, max(room) + 2, room, cooldown=cooldown)
    last = np.full((len(problem.states), len(sizes), problem.cells), np.inf)
    last[:, :, 0] = 0.0
    return float([*problem.backward(last, range(end))][-1][0, 0, 0])


# Of most traces the cheapest way keeps a cool-down anyway; of the second row's it costs more.
@pytest.mark.parametrize(
    ("seed", "binds"),
    [*((seed, False) for seed in range(3)), *((seed, True) for seed in (6, 18, 43, 90, 133)),
     pytest.param(98, True, marks=pytest.mark.quick)],
)  # fmt: skip
def test_nothing_is_cheaper_within_a_cooldown(seed: int, binds: bool) -> None:
    """Changes are two intervals apart, and chips that start are left alone unless they are taken away."""
    trace, sizes, cooldown = short_trace(seed), (1, 4), 2

    def keeps(outcome: Outcome) -> bool:
        chips, starting, changed = sizes[0], 0, -cooldown
        for interval, slot in enumerate(outcome.slots):
            preempted = interval in trace.preemptions
            if slot.changed and (interval - changed < cooldown or (starting and not preempted)):
                return False
            changed = interval if slot.changed else changed
            _, dead = dead_minutes(trace, starting=starting, changed=slot.chips != chips, preempted=preempted)
            chips, starting = slot.chips, max(0, dead - trace.interval_minutes)
        return True

    def begins(outcome: Outcome) -> bool:
        return outcome.slots[0].changed == (outcome.slots[0].chips != sizes[0])

    outcomes = [outcome for outcome in every_outcome(trace, sizes, math.inf) if begins(outcome)]
    kept = [outcome.dollars for outcome in outcomes if keeps(outcome)]
    least, free = (min(dollars, default=math.inf) for dollars in (kept, [outcome.dollars for outcome in outcomes]))
    assert least_with_cooldown(trace, sizes, cooldown) == pytest.approx(least)
    assert least_with_cooldown(trace, sizes, None) == pytest.approx(free)
    assert (least > free + 1e-9) == binds


@pytest.mark.quick
def test_a_chance_of_preemptions_is_the_mean_over_all_that_may_come() -> None:
    """Of what waits, with chips that do not change: no preemption, one, and all that follow one another."""
    chance, count = 0.3, 4
    calm = Trace("calm", (40,) * count, (0.0,) * count, startup_minutes=10, redo_minutes=10, patience_minutes=10)
    cells = 40 * count + 2
    problem = Problem(calm, (4,), math.inf, 1, cells, (cells,) * count, 0.0, 1.0, cooldown=3, preemption_chance=chance)
    last = np.zeros((len(problem.states), 1, cells))
    value = [*problem.backward(last, range(count))][-1][0, 0, 0]
    mean = 0.0
    for taken in itertools.product((False, True), repeat=count):
        trace = dataclasses.replace(calm, preemptions=tuple(itertools.compress(range(count), taken)))
        waited = sum(slot.backlog for slot in by_hand(trace, [4]).slots[:count])
        mean += waited * chance ** sum(taken) * (1 - chance) ** (count - sum(taken))
    assert value == pytest.approx(mean)


def by_hand(trace: Trace, chips: list[int]) -> Outcome:
    return replay(trace, lambda seen: chips[min(seen.interval, len(chips) - 1)], chips[0])


@pytest.mark.quick
def test_the_account_of_a_trace() -> None:
    """Figures worked out by hand: a change in interval 1, a preemption in interval 3."""
    trace = Trace(
        "by hand", arrivals=(20, 40, 40, 0, 0, 0), prices=(6.0, 6.0, 6.0, 12.0, 6.0, 6.0), preemptions=(3,),
        startup_minutes=3, checkpoint_minutes=2, redo_minutes=4, patience_minutes=20,
    )  # fmt: skip
    outcome = by_hand(trace, [2, 4])
    served = [slot.served for slot in outcome.slots]
    # 2 chips for 10 minutes; 4 for the 5 that saving and starting leave; 4 for 10; for 3; and what is left.
    assert served == [20, 20, 40, 12, 8, 0]
    paid = [2 * 10, 2 * 2 + 4 * 8, 40, 40, 40, 40]
    assert [slot.dollars for slot in outcome.slots] == pytest.approx(
        [price * minutes / 60 for price, minutes in zip(trace.prices, paid, strict=True)]
    )
    assert outcome.redone == 4 * 4
    assert outcome.dead == 2 * 2 + 4 * 3 + 4 * 7
    assert outcome.changes == [1]
    assert outcome.highest_hourly == 48
    assert outcome.late == 0
    # With two chips, 86 of the 100 are done two intervals after the last of them came.
    slow = by_hand(trace, [2])
    assert (slow.work, slow.late) == (trace.work, 100 - (20 + 20 + 20 + 6 + 20))
    # With one, the rest is worked off after the trace's end, and paid for.
    slower = by_hand(trace, [1])
    assert slower.work == trace.work
    assert len(slower.slots) == 11
    assert slower.dollars == pytest.approx((6 * 10 * 10 + 12 * 10) / 60)


@pytest.mark.quick
def test_a_policy_sees_nothing_of_the_future() -> None:
    trace = short_trace(1)
    seen: list[Seen] = []
    replay(trace, lambda one: seen.append(one) or one.chips, 4)  # type: ignore[func-returns-value]
    for interval, one in enumerate(seen[: len(trace)]):
        assert one.arrivals == trace.arrivals[:interval]
        assert one.prices == trace.prices[:interval]
        assert one.price == trace.prices[interval]
        assert one.preemptions == sum(taken <= interval for taken in trace.preemptions)
    # And after its end, while the rest is worked off, that nothing arrives any more.
    seen.clear()
    replay(trace, lambda one: seen.append(one) or 1, 1)  # type: ignore[func-returns-value]
    assert len(seen) > len(trace) + 1
    assert seen[-1].arrivals == trace.arrivals + (0,) * (len(seen) - 1 - len(trace))
    assert len(seen[-1].prices) == len(seen) - 1


@pytest.mark.quick
def test_what_cannot_be_done_in_time_is_said() -> None:
    with pytest.raises(ValueError, match="1, 2 chips under 5 dollars an hour"):
        cheapest(Trace("much", (100, 0), (1.0, 1.0), patience_minutes=10), (1, 2), 5.0)


@pytest.mark.quick
def test_values_that_are_reckoned_again_are_those_of_one_pass() -> None:
    trace = draw_trace(TraceKind(days=1, bursts_a_day=3, preemptions_a_day=4), seed=77)
    sizes, end = (4, 8, 16), len(trace) + trace.patience
    room = tuple(min(trace.may_wait(interval), 16 * trace.patience_minutes) // 8 for interval in range(end))
    problem = Problem(trace, sizes, math.inf, 8, max(room) + 2, room)
    last = np.full((len(problem.states), len(sizes), problem.cells), np.inf)
    last[:, :, 0] = 0.0
    whole = [last, *problem.backward(last, range(end))][::-1]
    kept = _Values(problem, last, end)
    for interval in (0, 1, 2, 50, 51, 99, end - 1, end):
        np.testing.assert_array_equal(kept[interval], whole[interval])
    held = len(kept._kept) + len(kept._block)
    assert held <= 2 * math.isqrt(end) + 4, "of so many intervals"
