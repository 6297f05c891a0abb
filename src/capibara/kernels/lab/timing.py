"""Honest timing of device functions.

Device work is asynchronous, so a sample queues calls back to back, waits once for the last result, and
divides: long enough that neither the clock nor the wait shows. Compilation and first-touch costs are warmed
away first. Inputs that would stay in the chip's cache are copied, and the calls walk over the copies, so that
memory is read as a program that comes by once would read it. Candidates that are compared take turns, sample
by sample, so that a clock that drifts hits all of them alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.context import target_of

MiB = 1024 * 1024
# How long one sample lasts. A launch costs some 10 µs and a wait about as much; 20 ms makes both under 0.1 %.
SAMPLE_SECONDS = {"cpu": 0.004, "gpu": 0.02, "tpu": 0.02}
# What a chip keeps of the last call's data. 60 MB of L2 on an H200 is the largest of the GPUs in the chip
# table; a host's last-level cache is of that order; a TPU's VMEM is filled by the program itself and keeps
# nothing.
CACHE_BYTES = {"cpu": 32 * MiB, "gpu": 64 * MiB, "tpu": 0}
# The copies together are this many caches large, so that a copy is evicted long before its turn comes again.
CACHES_APART = 3
MOST_COPIES = 64
MOST_REPEATS = 20_000
SAMPLES = 9
# A slow function gets fewer samples, so that one candidate stays within this time; three is the least for a
# median.
BUDGET_SECONDS = 3.0
LEAST_SAMPLES = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the samples and their quartiles."""

    seconds: float
    low: float
    high: float
    samples: int
    repeats: int
    """Calls that were queued in one sample."""
    copies: int = 1
    """Sets of inputs that the calls walked over."""
    launch_bound: bool = False
    """The host could not queue calls faster than this: the figure is the launch's and not the kernel's."""

    @property
    def spread(self) -> float:
        """Width of the middle half of the samples, as a fraction of the median."""
        return (self.high - self.low) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return f"{format_seconds(self.seconds)} ±{50 * self.spread:.1f} %"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def format_seconds(seconds: float) -> str:
    """`12.3 µs`, in the unit that keeps three digits in front of the reader."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def measure(
    fn: Callable[..., Any],
    *args: Any,
    samples: int = SAMPLES,
    sample_seconds: float | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    rotate: bool = True,
) -> Timing:
    """The time of `fn(*args)` on the device that holds `args`. `fn` is jitted here unless it is already.

    >>> measure(lambda x: x + 1, jnp.ones(8), samples=3).samples
    3
    """
    return compare(
        {"fn": fn},
        *args,
        samples=samples,
        sample_seconds=sample_seconds,
        budget_seconds=budget_seconds,
        rotate=rotate,
    )["fn"]


def compare(
    fns: Mapping[str, Callable[..., Any]],
    *args: Any,
    samples: int = SAMPLES,
    sample_seconds: float | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    rotate: bool = True,
    jit: bool = True,
) -> dict[str, Timing]:
    """The time of each function on the same arguments, their samples interleaved: A B C, A B C, ...

    Args:
      fns: functions by name, each of `*args`; jitted here unless they are already, or `jit` is False.
      args: arrays or trees of them; None is an absent operand.
      samples: rounds; fewer, three at the least, when a round of samples is slower than the budget allows.
      sample_seconds: the least time of one sample; by default 20 ms on an accelerator, 4 ms on a CPU.
      budget_seconds: roughly the most time spent on each function after its warm-up.
      rotate: walk over copies of inputs that would fit in the chip's cache.
      jit: False takes the functions as they are: one that launches several programs stays several.
    """
    if samples < 1:
        raise rule_error("samples is at least 1", samples, "leave it out for the default")
    platform = _platform(args)
    wanted = SAMPLE_SECONDS[platform] if sample_seconds is None else sample_seconds
    sets = input_sets(args, platform) if rotate else (args,)
    run = _run_waiting if platform == "cpu" else _run_queued
    jitted = {name: _jitted(fn) if jit else fn for name, fn in fns.items()}
    for fn in jitted.values():
        # Twice: the first call compiles, the second still grows the allocator's pool.
        for _ in range(2):
            jax.block_until_ready(fn(*sets[0]))
    # One walk for each function, kept up from sample to sample: starting over would find the first copies
    # cached.
    walks = {name: itertools.cycle(sets) for name in jitted}
    repeats = {name: _calibrate(run, fn, walks[name], wanted) for name, fn in jitted.items()}

    taken: dict[str, list[float]] = {name: [] for name in jitted}
    started = time.perf_counter()
    for index in range(samples):
        if index >= LEAST_SAMPLES and time.perf_counter() - started > budget_seconds * len(jitted):
            break
        for name, fn in jitted.items():
            taken[name].append(run(fn, walks[name], repeats[name]) / repeats[name])
    floor = launch_seconds(platform)
    return {name: _timing(taken[name], repeats[name], len(sets), floor) for name in jitted}


def input_sets(args: Sequence[Any], platform: str) -> tuple[tuple[Any, ...], ...]:
    """The arguments, and as many copies of them as it takes to outgrow the platform's cache.

    The copies hold the same values in other places of memory: a cache knows addresses only.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))
    cache = CACHE_BYTES.get(platform, 0)
    if not size or size > CACHES_APART * cache:
        return (tuple(args),)
    copies = min(math.ceil(CACHES_APART * cache / size), MOST_COPIES)
    copy = lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x  # noqa: E731
    made = [jax.tree.map(copy, tuple(args)) for _ in range(copies - 1)]
    return (tuple(args), *jax.block_until_ready(made))


_LAUNCH: dict[str, float] = {}


def launch_seconds(platform: str) -> float:
    """What queueing one call of an almost empty program costs on this platform; measured once a process."""
    if platform not in _LAUNCH:
        device = jax.devices(platform)[0]
        x = jax.device_put(jnp.zeros(8, jnp.float32), device)
        empty = jax.jit(lambda x: x + 1)
        jax.block_until_ready(empty(x))
        run = _run_waiting if platform == "cpu" else _run_queued
        _LAUNCH[platform] = min(run(empty, itertools.repeat((x,)), 100) / 100 for _ in range(3))
    return _LAUNCH[platform]


def _platform(args: Sequence[Any]) -> str:
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return target_of(next(iter(leaf.devices()))).platform
    return target_of(jax.devices()[0]).platform


def _jitted(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn if hasattr(fn, "lower") else jax.jit(fn)


def _run_queued(fn: Callable[..., Any], inputs: Iterator[Sequence[Any]], repeats: int) -> float:
    """Seconds for `repeats` calls queued back to back: a device runs what it is given in order."""
    out = None
    start = time.perf_counter()
    for _ in range(repeats):
        out = fn(*next(inputs))
    jax.block_until_ready(out)
    return time.perf_counter() - start


def _run_waiting(fn: Callable[..., Any], inputs: Iterator[Sequence[Any]], repeats: int) -> float:
    """The same with a wait after each call: a host would run independent calls side by side on its cores."""
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(fn(*next(inputs)))
    return time.perf_counter() - start


def _calibrate(
    run: Callable[..., float], fn: Callable[..., Any], inputs: Iterator[Sequence[Any]], wanted: float
) -> int:
    """How many calls make a sample last `wanted` seconds."""
    repeats = 1
    for _ in range(6):
        elapsed = run(fn, inputs, repeats)
        if elapsed >= wanted or repeats == MOST_REPEATS:
            break
        # A single call carries the wait for its result, so the first guess is low; grow until it holds.
        growth = min(wanted / max(elapsed, 1e-7) * 1.2, 100.0)
        repeats = min(max(repeats + 1, math.ceil(repeats * growth)), MOST_REPEATS)
    return repeats


def _timing(taken: Sequence[float], repeats: int, copies: int, floor: float) -> Timing:
    middle = statistics.median(taken)
    if len(taken) > 1:
        low, _, high = statistics.quantiles(taken, n=4, method="inclusive")
    else:
        low = high = middle
    return Timing(middle, low, high, len(taken), repeats, copies, launch_bound=middle < 1.5 * floor)
