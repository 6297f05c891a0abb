"""Two profiles of one program: which operation became slower, and by how much.

Both are taken alike: the program runs once to warm the process, then a number of times that count, as many for the
comparison as for the base. A first run in a process is slower than those after it: against one of those, what became
slower since would not show.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from capibara.errors import rule_error
from capibara.observe.profiler.result import OpRow, OpTimes, Profile

__all__ = ["FEWEST_REPEATS", "TOLERANCE", "Change", "Comparison", "check_base", "compare", "repeated"]

TOLERANCE = {"cpu": 0.25, "gpu": 0.05, "tpu": 0.05}
"""By how much an operation may be slower before it counts, by platform. A CPU's cores are shared with others."""
FEWEST_REPEATS = 3
"""Of fewer nobody knows how far the repeats are apart."""
# An operation that takes less of the profile than this is not looked at, nor one whose run is shorter than a clock and
# a scheduler can tell apart.
_SHARE = 0.01
# Of fewer runs of its program nobody knows how long an operation takes.
_RUNS = 5
_SHORTEST = {"cpu": 20e-6, "gpu": 2e-6, "tpu": 1e-6}
# The part of the tolerance that is asked of the lower end of the interval: with none of it, on two cores with a load of
# 7 to 13, one comparison in thirty named an operation that was as before.
_CERTAIN = 1 / 3
# Of two operations nobody can tell whether one became slower or the machine did and the other faster.
_FEWEST_OPS = 3


@dataclass(frozen=True)
class Change:
    """One operation of both profiles. Seconds are those of one run of its program."""

    program: str
    op: str
    """jax's name stack, or the instruction where it has none."""
    before: float
    after: float
    """Where the device is shared with others: at the speed that it had when the base was taken."""

    @property
    def slower_by(self) -> float:
        """As a fraction: 0.5 is half as long again."""
        return self.after / self.before - 1 if self.before else float("inf")


@dataclass(frozen=True)
class Comparison:
    """What two profiles say of each other."""

    slower: tuple[Change, ...]
    """The operations that take longer than they may, the one that costs most first."""
    judged: int
    """How many operations of both were long enough to be looked at."""
    pace: float
    """How many times as long as in the base the operations took as a whole; on a CPU that is put down to the machine,
    elsewhere it is 1."""
    new: tuple[str, ...]
    """Operations that the base has not, and that take more than a hundredth of the time."""


def repeated(profiles: Sequence[Profile]) -> Profile:
    """The last of several profiles of one program, with the times that its operations had in each."""
    found = [_by_source(one) for one in profiles]
    everywhere = [key for key in found[-1] if all(key in one for one in found)]
    times = tuple(OpTimes(*key, tuple(one[key] for one in found)) for key in everywhere)
    return dataclasses.replace(profiles[-1], repeats=len(profiles), op_times=times)


def _by_source(found: Profile) -> dict[tuple[str, str], float]:
    """Seconds of a run of a program in each operation, by where it comes from.

    Instructions are renamed when anything around them changes; the place in the user's program is not. A run counts at
    its tenth percentile: what others take of the machine makes it longer, never shorter. What ran only a few times is
    left out.
    """
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for op in found.ops:
        if op.best_seconds is not None and op.runs >= _RUNS:
            seconds[op.program, op.source or _stem(op)] += op.best_seconds * op.count / max(op.runs, 1)
    return dict(seconds)


def _stem(op: OpRow) -> str:
    """The instruction without its number."""
    head, _, tail = op.op.rpartition(".")
    return head if head and tail.isdigit() else op.op


def compare(before: Profile, after: Profile, tolerance: float | None = None) -> Comparison:
    """Which operations take longer than before by more than the tolerance, as far as the repeats of both tell.

    How many times as long an operation takes is the median over all pairs of a repeat of the one and a repeat of the
    other. It is slower where that is beyond the tolerance, and the lower end of the median's confidence interval beyond
    a third of it. A machine that is busy spreads the repeats, and so asks for more.

    Args:
        before: What it is held against, `repeated`.
        after: The same program, `repeated` as often.
        tolerance: As a fraction; by default the platform's, `TOLERANCE`.
    """
    _check(before, after)
    allowed = TOLERANCE.get(after.platform, 0.05) if tolerance is None else tolerance
    if allowed < 0:
        raise rule_error("A tolerance is a fraction of 0 or more", repr(tolerance), "write 0.1 for 10 %")
    old = {(one.program, one.op): one.seconds for one in before.op_times}
    new = {(one.program, one.op): one.seconds for one in after.op_times}
    typical = {key: statistics.median(seconds) for key, seconds in new.items()}
    least = max(_SHARE * sum(typical.values()), _SHORTEST.get(after.platform, 1e-6))
    large = [key for key, seconds in typical.items() if seconds >= least]
    judged = [key for key in large if key in old and min(old[key]) > 0]
    if not judged:
        raise rule_error(
            f"Operations are compared that both profiles have, of programs that ran {_RUNS} times or more",
            f"{len(old)} operations in the base, {len(large)} here, and none that is in both",
            "profile the base anew, or let the program take more steps",
        )
    ratios = {key: sorted(x / y for x in new[key] for y in old[key]) for key in judged}
    # On a shared machine all operations are slow when others are at work: then one is slower that stands out.
    shared = after.platform == "cpu" and len(judged) >= _FEWEST_OPS
    pace = statistics.median_low(statistics.median(one) for one in ratios.values()) if shared else 1.0
    slower = []
    for key in judged:
        measured = statistics.median(ratios[key])
        times_as_long = measured / pace
        for_certain = _lower_end(ratios[key], len(old[key]), len(new[key])) / pace
        # Where others leave, an operation on one core stays as it was while those on all cores become faster.
        if measured > 1 and times_as_long > 1 + allowed and for_certain > 1 + _CERTAIN * allowed:
            usual = statistics.median(old[key])
            slower.append(Change(*key, usual, usual * times_as_long))
    return Comparison(
        slower=tuple(sorted(slower, key=lambda one: one.before - one.after)),
        judged=len(judged),
        pace=pace,
        new=tuple(op for program, op in large if (program, op) not in old),
    )


def _lower_end(ratios: list[float], of_old: int, of_new: int) -> float:
    """Of the median ratio's confidence interval, one-sided, 97.7 %: two deviations of Wilcoxon's rank sum below."""
    deviation = math.sqrt(of_old * of_new * (of_old + of_new + 1) / 12)
    return ratios[max(int(of_old * of_new / 2 - 2 * deviation), 0)]


def _check(before: Profile, after: Profile) -> None:
    for one, which in ((before, "the first"), (after, "the second")):
        if one.mode != "tracing":
            raise rule_error(
                "Times of operations are compared, which a trace has",
                f"{which} profile by {one.mode}",
                "profile with mode='tracing', as `capibara profile` does",
            )
    if before.device_kind != after.device_kind:
        raise rule_error(
            "Profiles are compared on one kind of device",
            f"{before.device_kind!r} and {after.device_kind!r}",
            "profile both on the same",
        )
    check_base(before)
    if before.repeats != after.repeats:
        raise rule_error(
            "Profiles are compared that were taken alike",
            f"{before.repeats} repeats and {after.repeats}",
            "repeat both as often",
        )


def check_base(base: Profile) -> None:
    """Refuse a base that nothing can be held against, before the program is run."""
    if base.mode != "tracing" or base.repeats < FEWEST_REPEATS:
        raise rule_error(
            f"A base was traced over {FEWEST_REPEATS} repeats or more: one alone does not tell how far two are apart",
            f"one by {base.mode}, with {base.repeats} repeats",
            "make it by `capibara profile SCRIPT.py --repeats 8 --json > base.json`",
        )
