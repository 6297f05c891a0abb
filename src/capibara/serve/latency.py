"""Keeping a latency: how many sequences run and how much of prompts a step takes, chosen from measured step times.

What a user sees between two tokens is the time of the step that brings the second. A step runs in one of a few compiled
shapes, and grows with the keys that its sequences have: each shape is timed before there are requests, with short
contexts and with long ones, and goes on being measured while there are. The most that is within the target by these
times bounds what the next step may hold. Where even the smallest piece of a prompt takes too long, pieces come so
seldom that they stay outside of the 95th percentile.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from capibara.errors import rule_error
from capibara.serve.config import check_target
from capibara.serve.programs import Shape
from capibara.serve.shapes import ladder

if TYPE_CHECKING:
    from capibara.serve.engine import Engine, StepTime
    from capibara.serve.request import RequestOutput

__all__ = ["LatencyController", "LatencyReport", "TpuInferenceOptimizer", "choose_steps"]

_log = logging.getLogger(__name__)

_SEEN = 512
"""Gaps between tokens that the percentile is taken over."""
_NEW = 0.2
"""How much a new measurement of a shape counts against those before it."""
_MOST = 4.0
"""How many times what was expected a single measurement counts as at most: a machine that stalls for a second says
nothing of the shape that it stalled in."""
_FADING = 0.9993
"""What is left, after a step, of how far a shape is off its first times: one that is held to be too slow is not run,
and so not measured, and would never be tried again. Half of it is left after a thousand steps."""
_SELDOM = 25
"""Steps between two that take longer than the target: 4 in 100 are outside of the 95th percentile."""
_LEAST_MARGIN = 0.5


@dataclass(frozen=True)
class TpuInferenceOptimizer:
    """How an inference pipeline is to run; `create_inference_pipeline` takes it.

    Args:
      target_latency_ms: the 95th percentile of the time between two tokens of a request stays below it; None takes
        what the device gives.
      batch_size_optimizer: choose how many requests run at a time from measured step times; False always lets as many
        run as the pipeline's max_batch_size says, and keeps to the target by the size of prompts' pieces alone.
      memory_efficient_attention: attention in tiles that never holds all scores at once; False computes them whole.
      use_kv_cache: keep keys and values of tokens that were computed; False computes all of them anew for every token.
    """

    target_latency_ms: float | None = None
    batch_size_optimizer: bool = True
    memory_efficient_attention: bool = True
    use_kv_cache: bool = True

    def __post_init__(self) -> None:
        check_target(self.target_latency_ms)


@dataclass(frozen=True)
class LatencyReport:
    """Whether a target can be kept, and how it stands."""

    target_ms: float | None
    possible: bool
    """Whether a step of one sequence is within the target."""
    best_ms: float
    """Of one sequence alone, measured: no setting gives less on this device."""
    p95_ms: float | None
    """Of the last gaps between tokens; None before there were any."""
    max_sequences: int
    """That may run now."""
    prefill_tokens: int
    """Of prompts, that the next step may take."""
    decode_steps: int

    def __str__(self) -> str:
        if self.target_ms is None:
            return f"no target; one sequence alone takes {self.best_ms:.2f} ms a token"
        if not self.possible:
            return (
                f"A latency of {self.target_ms:g} ms a token is impossible here: one sequence alone takes "
                f"{self.best_ms:.2f} ms, which is the best this device does with this model"
            )
        return f"{self.target_ms:g} ms a token is kept with up to {self.max_sequences} sequences at a time"


@dataclass
class _ShapeTime:
    """Seconds of a step of one shape, by the keys that its sequences have in all."""

    base: float
    per_key: float = 0.0
    off: float = 1.0
    """Times what the line says: as steps of late were."""
    measured: int = 0
    """The number of the step that was measured last."""

    def seconds(self, keys: float) -> float:
        return self.off * (self.base + self.per_key * keys)

    def at(self, step: int) -> _ShapeTime:
        """As it is held to be at a step, when it was not measured since."""
        faded = 1 + (self.off - 1) * _FADING ** (step - self.measured)
        return _ShapeTime(self.base, self.per_key, faded, step)

    def took(self, seconds: float, keys: float) -> None:
        times = min(seconds / (self.base + self.per_key * keys), _MOST * self.off)
        self.off += _NEW * (times - self.off)

    def most_keys(self, seconds: float) -> float:
        """That a step has within so long; endless where keys cost nothing, below 0 where it is longer without any."""
        left = seconds / self.off - self.base
        return left / self.per_key if self.per_key else math.copysign(math.inf, left)


def choose_steps(engine: Engine, target_ms: float | None) -> None:
    """Have programs draw as many tokens in a row as take one sequence no longer than half of the target.

    Programs of more would be made and seldom run, for several sequences with long contexts take twice as long; and of
    single ones the host starts many. On an H200 with a target of 5 ms and 16 users, programs of two tokens gave 10,933
    a second, and of four 9,361. It is done before `Engine.warm_up`. Nothing may be running.
    """
    check_target(target_ms)
    most = engine.decode_steps
    if target_ms is None or most == 1 or not _decodes_alone(engine):
        return
    shapes = engine.runner.shapes
    within = int(1e-3 * target_ms / (2 * engine.runner.time_step(shapes.decode(1, 1))))
    engine.decode_steps = shapes.decode_steps = max((n for n in ladder(most) if n <= within), default=1)


def _decodes_alone(engine: Engine) -> bool:
    """Whether steps of one token a sequence have shapes of their own."""
    config = engine.config
    return not (config.batch_invariant or config.speculative_tokens or not config.keep_keys)


class LatencyController:
    """Bounds an engine's steps so that a target is kept; `adjust` before each step, `saw` after it."""

    def __init__(self, engine: Engine, target_ms: float | None, *, choose_batch: bool = True) -> None:
        check_target(target_ms)
        self.engine = engine
        self.target_ms = target_ms
        self.choose_batch = choose_batch
        self._times: dict[Shape, _ShapeTime] = {}
        self._measurements = 0
        self._margin = 1.0
        self._since_long = _SELDOM
        self._gaps: deque[float] = deque(maxlen=_SEEN)
        self._last: dict[str, float] = {}
        self._steps = engine.decode_steps
        engine.on_step = self._measured

    # What is known of step times.

    def calibrate(self, repeats: int = 3) -> LatencyReport:
        """Time every shape of steps, with short contexts and with long, and say what the target comes to.

        Nothing may be running.
        """
        if self.engine.has_work():
            raise rule_error("Steps are timed while nothing runs", "an engine with requests", "calibrate it first")
        # Those of single tokens first: what a key takes is read off them for the others.
        for shape in sorted(self.engine.runner.shapes.all(), key=lambda shape: not shape.decodes):
            self._times[shape] = self._timed(shape, repeats)
        self.engine.scheduler.pool.forget()  # timing wrote over the keys of prompts that were answered before
        self.adjust()
        report = self.report()
        if self.target_ms is not None and not report.possible:
            _log.warning("%s.", report)
        return report

    def _timed(self, shape: Shape, repeats: int = 3) -> _ShapeTime:
        runner = self.engine.runner
        if shape.decodes:
            few, many = (shape.sequences * context for context in (1, self._half(shape)))
            short, long = (runner.time_step(shape, context=n // shape.sequences, repeats=repeats) for n in (few, many))
            per_key = max(0.0, long - short) / (many - few) if many > few else 0.0
            # A line through two noisy points may start below nothing, and a step never does.
            return _ShapeTime(max(max(short, long) - per_key * many, 0.1 * short), per_key)
        # Of prompts, which have no past; the keys of those that draw beside them are read as in a step of these alone.
        seconds, per_key = runner.time_step(shape, repeats=repeats), 0.0
        if _decodes_alone(self.engine):
            per_key = self._time(runner.shapes.decode(shape.sequences, shape.pages)).per_key
        return _ShapeTime(max(seconds - per_key * shape.tokens, 0.1 * seconds), per_key)

    def _half(self, shape: Shape) -> int:
        return max(1, shape.pages * self.engine.config.page_size // 2)

    def _measured(self, step: StepTime) -> None:
        self.took(step.shape, step.seconds, sum(chunk.start + chunk.count for chunk in step.plan.chunks))

    def took(self, shape: Shape, seconds: float, keys: int = 0) -> None:
        """A step of this shape, whose sequences had so many keys, took so long."""
        if not 0 < seconds < math.inf:  # no step does: the clock was set, or is too coarse
            return
        self._measurements += 1
        known = self._times.get(shape)
        if known is None:
            self._times[shape] = _ShapeTime(seconds, measured=self._measurements)
        else:
            now = self._times[shape] = known.at(self._measurements)
            now.took(seconds, keys)

    def _time(self, shape: Shape) -> _ShapeTime:
        """Of a step of this shape: as it was measured, else as the nearest measured one has it by its tokens."""
        known = self._times.get(shape)
        if known is not None:
            return known.at(self._measurements)
        like = [s for s in list(self._times) if s.decodes == shape.decodes]
        if not like:
            return _ShapeTime(0.0)
        near = min(like, key=lambda s: abs(s.tokens * s.steps - shape.tokens * shape.steps))
        more = max(1.0, shape.tokens * shape.steps / (near.tokens * near.steps))
        known = self._times[near].at(self._measurements)
        return replace(known, off=known.off * more)

    def _milliseconds(self, shape: Shape, keys: float) -> float:
        return 1e3 * self._time(shape).seconds(keys)

    @property
    def best_ms(self) -> float:
        """Of one sequence's next token, nothing else in the step."""
        return self._best_ms(self._pages(), self._context())

    def _best_ms(self, pages: int, context: float) -> float:
        shapes = self.engine.runner.shapes
        alone = shapes.decode(1, pages) if _decodes_alone(self.engine) else shapes.ragged(1, 1)
        return self._milliseconds(alone, context)

    def _pages(self) -> int:
        """Of the running sequence that has most: every one has room for so many in a step of single tokens."""
        return max([len(s.pages.pages) for s in list(self.engine.scheduler.running)], default=1)

    def _context(self) -> float:
        """Tokens of a sequence, in the mean: of those that run, else of those that wait, else half of a short table."""
        scheduler = self.engine.scheduler
        # Lists of their own: a report is asked for by any thread while the engine's goes on.
        sequences = list(scheduler.running) or list(itertools.islice(scheduler.waiting, _SEEN))
        lengths = [s.length for s in sequences]
        return (
            sum(lengths) / len(lengths) if lengths else self._half(self.engine.runner.shapes.decode(1, self._pages()))
        )

    # What follows from it.

    def adjust(self) -> None:
        """Set what the next step may hold."""
        if self.target_ms is None:
            return
        engine, limits = self.engine, self.engine.limits
        config = engine.config
        pages, context = self._pages(), self._context()
        # An impossible target is not given up: what is possible is kept to, with a little room.
        budget = max(self.target_ms * self._margin, 1.1 * self._best_ms(pages, context))
        if self.choose_batch:
            limits.max_sequences = self._most_sequences(budget, pages, context)
        decoding = [length for s in engine.scheduler.running if (length := s.length) - s.computed <= 1]
        keys = sum(decoding)
        longest = engine.config.prefill_chunk or config.max_batch_tokens
        if not decoding:  # nobody waits for a next token
            limits.prefill_tokens = limits.prefill_chunk = longest
        else:
            limits.prefill_tokens = self._prompt_tokens(budget, len(decoding), keys)
            limits.prefill_chunk = max(1, min(longest, limits.prefill_tokens))
        several = (
            _decodes_alone(self.engine)
            and self._milliseconds(engine.runner.shapes.decode(max(1, len(decoding)), pages, self._steps), keys)
            <= budget
        )
        engine.decode_steps = self._steps if several else 1

    def _most_sequences(self, budget: float, pages: int, context: float) -> int:
        shapes, config = self.engine.runner.shapes, self.engine.config
        if _decodes_alone(self.engine):
            most, smaller = 1, 0
            for size in shapes.sequences:
                fit = min(size, self._time(shapes.decode(size, pages)).most_keys(1e-3 * budget) / max(context, 1))
                most, smaller = max(most, int(fit) if fit > smaller else 1), size
            return most
        # Every step is ragged: as many as the longest one within the budget has tokens for.
        fits = [n for n in shapes.tokens if self._milliseconds(shapes.ragged(n, 1), n) <= budget]
        tokens = max((shapes.ragged(n, 1).tokens for n in fits), default=1)
        return max(1, min(config.max_sequences, tokens // (1 + config.speculative_tokens)))

    def _prompt_tokens(self, budget: float, decoding: int, keys: int) -> int:
        """Of prompts, beside so many sequences that draw; none where that takes too long and was allowed just now."""
        shapes, most = self.engine.runner.shapes, self.engine.config.max_sequences
        sizes = [n for n in shapes.tokens if n > decoding]
        of_size = {n: shapes.ragged(n, min(decoding + 1, most)) for n in sizes}
        fit = [n for n in sizes if self._milliseconds(of_size[n], keys + n) <= budget]
        if fit:
            return max(fit) - decoding
        if self._since_long < _SELDOM:
            return 0
        return max(1, min(sizes, default=shapes.tokens[-1]) - decoding)

    # How it goes.

    def saw(self, outputs: Iterable[RequestOutput], now: float) -> None:
        """What a step brought, at this time of `time.perf_counter`."""
        slowest = 0.0
        for output in outputs:
            if output.tokens:
                before = self._last.get(output.id)
                if before is not None:
                    gap = 1e3 * (now - before) if now > before else 0.0
                    if gap > slowest:
                        slowest = gap
                    self._gaps.append(gap)
                    # Tokens that come together have nothing between them.
                    self._gaps.extend([0.0] * (len(output.tokens) - 1))
                self._last[output.id] = now
            if output.finish_reason is not None:
                self._last.pop(output.id, None)
        if self.target_ms is None or not slowest:
            return
        self._since_long = 0 if slowest > self.target_ms else self._since_long + 1
        # What lies between steps is in no step's time: the room left for it follows what is seen.
        p95 = self.p95_ms
        if p95 is not None and len(self._gaps) >= 32:
            if p95 > self.target_ms:
                self._margin = max(_LEAST_MARGIN, self._margin * 0.98)
            elif p95 < 0.9 * self.target_ms:
                self._margin = min(1.0, self._margin * 1.005)

    @property
    def p95_ms(self) -> float | None:
        if not self._gaps:
            return None
        # Asked for after every step. All of a step's gaps are alike, and sorting takes runs as they are; numpy would
        # first make an array of them.
        gaps = sorted(self._gaps)
        below, share = divmod(95 * (len(gaps) - 1), 100)
        return gaps[below] + share / 100 * (gaps[min(below + 1, len(gaps) - 1)] - gaps[below])

    def report(self) -> LatencyReport:
        """How it stands."""
        limits, best = self.engine.limits, self.best_ms
        return LatencyReport(
            target_ms=self.target_ms,
            possible=self.target_ms is None or best <= self.target_ms,
            best_ms=best,
            p95_ms=self.p95_ms,
            max_sequences=limits.max_sequences,
            prefill_tokens=limits.prefill_tokens,
            decode_steps=self.engine.decode_steps,
        )
