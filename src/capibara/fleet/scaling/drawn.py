"""Traces that are drawn from a seed, and six that are fixed.

Nobody's fleet was recorded for them. A load is a daily swing with noise that fades slowly, and bursts that begin by
chance; a price rests at v4's spot price and has spikes; preemptions come by chance. Python's own generator draws them,
which gives the same numbers on every version and machine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from capibara.errors import unknown_name
from capibara.fleet.scaling.trace import Trace

__all__ = ["FIXED_TRACES", "TraceKind", "draw_kind", "draw_trace", "fixed_trace"]

_SPOT, _ON_DEMAND = 0.9215, 3.22  # v4 in us-central2, as the price table has them
_GRAIN = 4  # chip-minutes to which loads are rounded


@dataclass(frozen=True)
class TraceKind:
    """What a trace is drawn by. Loads are in chips that are fully used."""

    mean_chips: float = 12.0
    swing: float = 0.7
    """How far the day's peak is above the mean, as a share of it."""
    sharpness: float = 1.0
    """1 is a sine; above it days and nights are flat and the change between them steep."""
    noise: float = 0.08
    bursts_a_day: float = 0.0
    burst_chips: float = 12.0
    burst_minutes: int = 40
    spikes_a_day: float = 0.0
    spike_factor: float = 3.0
    spike_minutes: int = 60
    preemptions_a_day: float = 0.0
    days: int = 2


FIXED_TRACES: dict[str, tuple[TraceKind, int]] = {
    "diurnal": (TraceKind(), 1),
    "office hours": (TraceKind(mean_chips=11, swing=0.9, sharpness=3.0, noise=0.12), 2),
    "bursty": (TraceKind(mean_chips=6, swing=0.3, bursts_a_day=5, burst_chips=18), 3),
    "price spikes": (TraceKind(mean_chips=11, swing=0.6, spikes_a_day=4), 4),
    "preemptions": (TraceKind(mean_chips=12, swing=0.75, preemptions_a_day=5), 5),
    "all at once": (
        TraceKind(mean_chips=9, swing=0.6, bursts_a_day=3, burst_chips=10, spikes_a_day=3, preemptions_a_day=3),
        6,
    ),
}
"""Six traces that are the same everywhere: how each is drawn, and its seed."""


def fixed_trace(name: str) -> Trace:
    """One of `FIXED_TRACES`."""
    if name not in FIXED_TRACES:
        raise unknown_name("fixed trace", name, FIXED_TRACES)
    kind, seed = FIXED_TRACES[name]
    return draw_trace(kind, seed, name)


def draw_kind(seed: int) -> TraceKind:
    """A kind whose own figures are drawn: daily swing always, each of bursts, spikes and preemptions in half of all."""
    draw = random.Random(f"kind {seed}")
    return TraceKind(
        mean_chips=draw.uniform(7, 14),
        swing=draw.uniform(0.4, 0.9),
        sharpness=draw.uniform(1, 3),
        noise=draw.uniform(0.03, 0.15),
        bursts_a_day=draw.choice((0.0, draw.uniform(1, 5))),
        burst_chips=draw.uniform(6, 16),
        burst_minutes=draw.choice((20, 40, 60, 90)),
        spikes_a_day=draw.choice((0.0, draw.uniform(1, 5))),
        spike_factor=draw.uniform(1.5, 3.4),
        spike_minutes=draw.choice((30, 60, 120)),
        preemptions_a_day=draw.choice((0.0, draw.uniform(1, 6))),
    )


def draw_trace(kind: TraceKind, seed: int, name: str | None = None) -> Trace:
    """A trace of this kind.

    Examples:
        >>> trace = draw_trace(TraceKind(days=1), seed=1)
        >>> len(trace), trace.interval_minutes, trace == draw_trace(TraceKind(days=1), seed=1)
        (144, 10, True)
    """
    draw = random.Random(f"trace {seed}")
    interval = Trace.interval_minutes
    a_day = 24 * 60 // interval
    count = kind.days * a_day
    bursts = _spells(draw, count, kind.bursts_a_day / a_day, kind.burst_minutes // interval)
    spikes = _spells(draw, count, kind.spikes_a_day / a_day, kind.spike_minutes // interval)
    arrivals, prices, drift = [], [], 0.0
    for now in range(count):
        phase = math.sin(2 * math.pi * (now / a_day - 0.3))
        day = math.tanh(kind.sharpness * phase) / math.tanh(kind.sharpness) if kind.sharpness > 1 else phase
        drift = 0.9 * drift + draw.gauss(0, kind.noise) * math.sqrt(1 - 0.9**2)
        load = kind.mean_chips * (1 + kind.swing * day) * (1 + drift) + kind.burst_chips * bursts[now]
        arrivals.append(_GRAIN * max(0, round(load * interval / _GRAIN)))
        wobble = 1 + 0.03 * draw.gauss(0, 1)
        prices.append(round(min(_ON_DEMAND, _SPOT * wobble * (kind.spike_factor if spikes[now] else 1.0)), 4))
    chance = kind.preemptions_a_day / a_day
    taken = tuple(now for now in range(1, count) if draw.random() < chance)
    return Trace(name or f"seed {seed}", tuple(arrivals), tuple(prices), taken, highest_price=_ON_DEMAND)


def _spells(draw: random.Random, count: int, chance: float, mean_length: int) -> list[bool]:
    """Where something that begins by chance is going on; its length is drawn around the mean."""
    going = [False] * count
    now = 0
    while now < count:
        if draw.random() < chance:
            length = max(1, round(mean_length * draw.uniform(0.5, 1.5)))
            going[now : now + length] = [True] * len(going[now : now + length])
            now += length
        now += 1
    return going
