"""Two profiles of one program: which operation became slower, and by how much."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from capibara.errors import rule_error
from capibara.observe.profiler.result import OpRow, Profile

__all__ = ["TOLERANCE", "Change", "slower", "steadier"]

TOLERANCE = {"cpu": 0.35, "gpu": 0.05, "tpu": 0.05}
"""By how much an operation may be slower before it counts, by platform. A CPU's cores are shared with others."""
# An operation that takes less of the profile than this is not looked at, nor one whose run is shorter than a clock and
# a scheduler can tell apart.
_SHARE = 0.01
# Of fewer runs of its program nobody knows how long an operation takes.
_RUNS = 5
_SHORTEST = {"cpu": 20e-6, "gpu": 2e-6, "tpu": 1e-6}


@dataclass(frozen=True)
class Change:
    """One operation of both profiles. Seconds are those of one run of its program."""

    program: str
    op: str
    """jax's name stack, or the instruction where it has none."""
    before: float
    after: float

    @property
    def slower_by(self) -> float:
        """As a fraction: 0.5 is half as long again."""
        return self.after / self.before - 1 if self.before else float("inf")


def _by_source(found: Profile) -> dict[tuple[str, str], float]:
    """Seconds of a run of a program in each operation, by where it comes from.

    Instructions are renamed when anything around them changes; the place in the user's program is not. A run counts at
    its best: what others take of the machine makes it longer, never shorter. What ran only a few times is left out.
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


def slower(before: Profile, after: Profile, tolerance: float | None = None) -> list[Change]:
    """The operations that take longer than before by more than the tolerance, the worst first.

    Args:
        before: What it is held against.
        after: The same program, profiled again.
        tolerance: As a fraction; by default the platform's, `TOLERANCE`.
    """
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
    allowed = TOLERANCE.get(after.platform, 0.05) if tolerance is None else tolerance
    if allowed < 0:
        raise rule_error("A tolerance is a fraction of 0 or more", repr(tolerance), "write 0.1 for 10 %")
    old, new = _by_source(before), _by_source(after)
    whole = sum(new.values())
    shortest = _SHORTEST.get(after.platform, 1e-6)
    changes = [
        Change(program, op, old[program, op], seconds)
        for (program, op), seconds in new.items()
        if (program, op) in old and seconds >= max(_SHARE * whole, shortest)
    ]
    return sorted((one for one in changes if one.slower_by > allowed), key=lambda one: one.before - one.after)


def steadier(first: list[Change], again: list[Change]) -> list[Change]:
    """Of two comparisons with the same base, what both found, each at its better time."""
    found = {(one.program, one.op): one for one in again}
    return [
        Change(one.program, one.op, one.before, min(one.after, found[one.program, one.op].after))
        for one in first
        if (one.program, one.op) in found
    ]
