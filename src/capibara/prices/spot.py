"""Runs on chips that can be taken away: how often to save, and what the interruptions cost.

Interruptions are taken as a Poisson process. A slice stops when any of its hosts is taken, so its mean time between
interruptions is that of a host divided by the hosts. The interval between checkpoints is Daly's (Future Generation
Computer Systems 22, 2006), which is Young's square root with its next terms; the share of time that is kept is the
exact expectation for that interval under the same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from capibara.errors import rule_error

__all__ = ["SpotAssumptions", "SpotRun", "checkpoint_interval", "spot_run"]

HOUR = 3600.0


@dataclass(frozen=True)
class SpotAssumptions:
    """What is assumed of a spot slice. No provider publishes these figures: put in what you see."""

    preemptions_per_host_hour: float = 0.005
    """Assumed: a host is taken about once in eight days."""
    storage_bytes_per_second: float = 500e6
    """Assumed: what one host writes to a bucket; hosts write side by side."""
    restart_seconds: float = 600.0
    """Assumed: waiting for chips, starting, compiling and reading the checkpoint."""

    def __post_init__(self) -> None:
        for name, least in (("preemptions_per_host_hour", 0.0), ("restart_seconds", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                raise rule_error(f"{name} is a number from 0 up", repr(getattr(self, name)), f"use {least}")
        if not 0 < self.storage_bytes_per_second < math.inf:
            raise rule_error(
                "storage_bytes_per_second is above 0", repr(self.storage_bytes_per_second), "use 500e6 for 500 MB/s"
            )


@dataclass(frozen=True)
class SpotRun:
    """What to expect of a run on a spot slice. Predicted from assumptions, not observed."""

    mean_seconds_between: float
    """Between interruptions of the slice; infinite when there are none."""
    checkpoint_seconds: float
    interval_seconds: float
    """Work between two checkpoints that loses the least."""
    saving: float
    """Share of the time spent on writing checkpoints."""
    lost: float
    """Share of the time spent on work that is done again, and on starting again."""
    efficiency: float
    """Share of the time whose work is kept; with the two above it makes one."""
    assumptions: SpotAssumptions


def checkpoint_interval(checkpoint_seconds: float, mean_seconds_between: float) -> float:
    """Seconds of work between checkpoints that lose the least time, by Daly's formula.

    Examples:
        >>> round(checkpoint_interval(60.0, 36000.0))
        2039
    """
    if checkpoint_seconds < 0 or mean_seconds_between <= 0:
        raise rule_error(
            "A checkpoint takes 0 s or more and interruptions are more than 0 s apart",
            f"{checkpoint_seconds} and {mean_seconds_between}",
            "give both in seconds",
        )
    if math.isinf(mean_seconds_between):
        return math.inf
    if checkpoint_seconds >= 2 * mean_seconds_between:
        # Saving takes longer than a slice lasts: the formula's expansion ends, and one mean time is as good as any.
        return mean_seconds_between
    ratio = checkpoint_seconds / (2 * mean_seconds_between)
    first = math.sqrt(2 * checkpoint_seconds * mean_seconds_between)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds


def spot_run(state_bytes: float, hosts: int, assumptions: SpotAssumptions | None = None) -> SpotRun:
    """What saving `state_bytes` (of the whole job) and losing the slice now and then leaves of the time.

    Args:
      state_bytes: what a checkpoint holds: parameters and the optimizer's state, once.
      hosts: machines of the slice.
      assumptions: the rate of preemptions, the speed of storage and the time to start again.
    """
    assumed = assumptions or SpotAssumptions()
    if hosts < 1 or state_bytes < 0:
        raise rule_error(
            "A run has one host or more and saves 0 bytes or more", f"{hosts} and {state_bytes}", "give both"
        )
    saving_seconds = state_bytes / (assumed.storage_bytes_per_second * hosts)
    rate = assumed.preemptions_per_host_hour * hosts / HOUR
    if rate == 0:
        return SpotRun(math.inf, saving_seconds, math.inf, 0.0, 0.0, 1.0, assumed)
    mean = 1 / rate
    # Without anything to save a checkpoint is free and Daly's interval is 0; a second is as short as matters.
    interval = max(1.0, checkpoint_interval(saving_seconds, mean))
    segment = (interval + saving_seconds) / mean
    # Beyond this the exponential overflows: such a run never gets from one checkpoint to the next.
    if segment + assumed.restart_seconds / mean > 600:
        return SpotRun(mean, saving_seconds, interval, 0.0, 1.0, 0.0, assumed)
    expected = mean * math.exp(assumed.restart_seconds / mean) * math.expm1(segment)
    efficiency, saving = interval / expected, saving_seconds / expected
    return SpotRun(mean, saving_seconds, interval, saving, 1.0 - efficiency - saving, efficiency, assumed)
