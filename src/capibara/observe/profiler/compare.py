"""Two profiles of one program: which operation became slower, and by how much.

Both are taken alike: the program runs once to warm the process, then a number of times that count, and the base's number
is the comparison's too. A first run in a process is slower than those after it, so that a base of one first run would
hide what became slower since.
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

__all__ = ["FEWEST_REPEATS", "TOLERANCE", "Change", "Comparison", "compare", "repeated"]

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
