"""Users of an engine that is not there: its own scheduler and its own keeping of a latency, over predicted step times.

What is simulated is what an engine does, step by step, and nothing else: requests come, `Scheduler` plans steps, the
steps take the time that `StepTimes` predicts for their tokens and contexts, and `LatencyController`, where a target is
set, bounds the next ones. Prompts are all different: no prefix is shared.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from capibara.errors import rule_error
from capibara.serve.kv_cache import PagePool
from capibara.serve.latency import LatencyController, choose_steps
from capibara.serve.load.trace import Lengths
from capibara.serve.prediction.step_times import StepTimes
from capibara.serve.request import Request, RequestOutput, SamplingParams, Usage
from capibara.serve.scheduler import Limits, Scheduler, StepPlan
from capibara.serve.shapes import StepShapes

if TYPE_CHECKING:
    from capibara.serve.cache_size import CacheSize
    from capibara.serve.programs import Shape

__all__ = ["Outcome", "SimulatedEngine", "Traffic", "all_at_once", "steady"]

_FEWEST = 8
"""Requests that are measured at least."""
_MOST_STEPS = 20_000


@dataclass(frozen=True)
class Traffic:
    """What users ask for."""

    lengths: Sequence[Lengths]
    """Of requests, one after another; the first again after the last."""
    think_s: float = 0.0
    """Between an answer and the same user's next request."""

    def __post_init__(self) -> None:
        if not self.lengths:
            raise rule_error("Traffic has a request", "no lengths", "pass [Lengths(512, 128)]")
        if not 0 <= self.think_s < math.inf:
            raise rule_error("think_s is 0 or more seconds", self.think_s, "use 0 for users who ask again at once")
        for one in self.lengths:
            if min(one.prompt, one.output) < 1:
                raise rule_error("A request has a token and asks for one", one, "use Lengths(512, 128)")

    @property
    def longest(self) -> int:
        return max(one.prompt + one.output for one in self.lengths)


@dataclass(frozen=True)
class Outcome:
    """What a number of users see of one engine."""

    users: int
    running: float
    """Requests that run at a time, in the mean."""
    waiting: float
    """Requests that wait for a place, in the mean."""
    p50_ms: float
    p95_ms: float
    """Of the time between two tokens of an answer."""
    first_p50_ms: float
    first_p95_ms: float
    """From a request to its first token."""
    prompt_tokens_per_second: float
    """Of prompts that were read to their ends: those whose first token came."""
    output_tokens_per_second: float
    prompt_share: float
    """Of the time: what steps take more for the pieces of prompts in them."""
    steps: int


class SimulatedEngine:
    """What `LatencyController` sees of an engine: `Engine`'s own parts, but for the device."""

    def __init__(self, times: StepTimes, size: CacheSize, target_ms: float | None = None) -> None:
        config = times.config
        self.times, self.config = times, config
        self.shapes = StepShapes(config, -(-size.max_length // config.page_size))
        self.runner = self
        prefill = config.prefill_chunk or config.max_batch_tokens
        self.limits = Limits(config.max_sequences, config.max_batch_tokens, config.max_batch_tokens, prefill)
        self.scheduler = Scheduler(
            PagePool(size.pages, config.page_size, sharing=False),
            self.limits,
            max_length=size.max_length,
            max_queue=2**31,
            shares=False,
        )
        self.decode_steps = 1 if config.batch_invariant or config.speculative_tokens else config.decode_steps
        self.on_step: Any = None
        choose_steps(cast(Any, self), target_ms)
        self.latency = None if target_ms is None else _PredictedLatency(cast(Any, self), target_ms)

    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def time_step(self, shape: Shape, *, context: int | None = None, repeats: int = 1) -> float:
        del repeats  # the same every time
        return self.times.of_shape(shape, context)


class _PredictedLatency(LatencyController):
    """A shape is timed when it is first thought of, in place of all of them at the start."""

    def _time(self, shape: Shape) -> Any:
        if shape not in self._times:
            self._times[shape] = self._timed(shape)
        return self._times[shape]


@dataclass
class _Sent:
    plan: StepPlan
    shape: Shape
    seconds: float
    end: float


class _Clock:
    """Runs an engine's loop in predicted time."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.now = 0.0
        self.began: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.gaps: list[float] = []
        self.firsts: list[float] = []
        self.prompt_tokens = self.output_tokens = self.steps = self.answered = 0
        self.prompt_seconds = self.running_seconds = self.waiting_seconds = 0.0
        self.since = 0.0
        self._sent: deque[_Sent] = deque()
        self._free = 0.0

    def ask(self, id: str, lengths: Lengths) -> None:
        sampling = SamplingParams(max_tokens=lengths.output, ignore_eos=True)
        self.engine.scheduler.add(Request(id, (0,) * lengths.prompt, sampling))
        self.began[id] = self.now

    @property
    def busy(self) -> bool:
        return bool(self._sent) or self.engine.has_work()

    def forget(self) -> None:
        """Measure from here."""
        self.gaps, self.firsts = [], []
        self.prompt_tokens = self.output_tokens = self.steps = self.answered = 0
        self.prompt_seconds = self.running_seconds = self.waiting_seconds = 0.0
        self.since = self.now

    def step(self) -> list[str]:
        """As `Engine.step`: send the next step, then take what the one before it brought; requests that ended."""
        engine = self.engine
        if engine.latency is not None:
            engine.latency.adjust()
        plan = engine.scheduler.plan(steps=engine.decode_steps)
        if plan is not None:
            shape = engine.shapes.of(plan)
            seconds = engine.times.of_plan(shape, plan)
            self._free = max(self._free, self.now) + seconds
            self._sent.append(_Sent(plan, shape, seconds, self._free))
        ahead = 1 if engine.config.asynchronous and plan is not None else 0
        ended: list[str] = []
        while len(self._sent) > ahead:
            ended += self._receive(self._sent.popleft())
        return ended

    def _receive(self, sent: _Sent) -> list[str]:
        engine, plan = self.engine, sent.plan
        waited = sent.end - self.now
        self.running_seconds += len(engine.scheduler.running) * waited
        self.waiting_seconds += len(engine.scheduler.waiting) * waited
        self.now = sent.end
        self.steps += 1
        self.prompt_seconds += self._for_prompts(sent)
        outputs, ended = [], []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if not chunk.samples:
                continue
            left = sequence.last_token_number - len(sequence.tokens)
            tokens = [0] * min(plan.steps, left)
            engine.scheduler.take(sequence, tokens, drawn=chunk.drawn)
            if not tokens:
                continue
            id = sequence.request.id
            self._heard(id, sequence.prompt_length, len(tokens))
            done = len(sequence.tokens) >= sequence.last_token_number
            if done:
                engine.scheduler.remove(sequence)
                self.answered += 1
                ended.append(id)
            usage = Usage(sequence.prompt_length, sequence.generated, 0)
            outputs.append(RequestOutput(id, tuple(tokens), "", usage, finish_reason="length" if done else None))
        if engine.latency is not None:
            engine.latency.saw(outputs, self.now)
            engine.latency.took(sent.shape, sent.seconds, sum(chunk.start + chunk.count for chunk in plan.chunks))
        return ended

    def _heard(self, id: str, prompt: int, tokens: int) -> None:
        before = self.last.get(id)
        if before is None:
            self.prompt_tokens += prompt
            self.firsts.append(self.now - self.began[id])
        else:
            self.gaps += [self.now - before, *[0.0] * (tokens - 1)]
        self.last[id] = self.now
        self.output_tokens += tokens

    def _for_prompts(self, sent: _Sent) -> float:
        """What a step takes more than one of its single tokens alone would."""
        plan = sent.plan
        if plan.decodes_only:
            return 0.0
        alone = [chunk for chunk in plan.chunks if chunk.count == 1 and chunk.samples]
        if not alone:
            return sent.seconds
        rest = StepPlan(alone)
        engine = self.engine
        return max(0.0, sent.seconds - engine.times.of_plan(engine.shapes.of(rest), rest))

    def outcome(self, users: int) -> Outcome:
        seconds = self.now - self.since
        gaps = self.gaps or [0.0]
        return Outcome(
            users=users,
            running=self.running_seconds / seconds,
            waiting=self.waiting_seconds / seconds,
            p50_ms=1e3 * float(np.percentile(gaps, 50)),
            p95_ms=1e3 * float(np.percentile(gaps, 95)),
            first_p50_ms=1e3 * float(np.percentile(self.firsts, 50)),
            first_p95_ms=1e3 * float(np.percentile(self.firsts, 95)),
            prompt_tokens_per_second=self.prompt_tokens / seconds,
            output_tokens_per_second=self.output_tokens / seconds,
            prompt_share=self.prompt_seconds / seconds,
            steps=self.steps,
        )


def steady(engine: SimulatedEngine, traffic: Traffic, users: int) -> Outcome:
    """So many users who ask again after each answer; measured once those who had a place at first are answered."""
    clock = _Clock(engine)
    numbers, lengths = itertools.count(), _cycled(traffic)
    arrivals: list[tuple[float, int]] = []
    first = min(users, engine.config.max_sequences)
    for number in range(users):
        # Those who have a place begin spread over their answers, and not all at one point of them.
        one, part = next(lengths), min(number + 1, first)
        clock.ask(str(next(numbers)), Lengths(one.prompt, max(1, one.output * part // first)))
    measuring = False
    streams = any(one.output > 1 for one in traffic.lengths)  # answers of one token have no gaps to wait for
    while True:
        while arrivals and arrivals[0][0] <= clock.now:
            heapq.heappop(arrivals)
            clock.ask(str(next(numbers)), next(lengths))
        if not clock.busy:
            clock.now = arrivals[0][0]
            continue
        for _ in clock.step():
            heapq.heappush(arrivals, (clock.now + traffic.think_s, 0))
        if not measuring and clock.answered >= first:
            measuring = True
            clock.forget()
        enough = clock.answered >= max(_FEWEST, first) or clock.steps >= _MOST_STEPS
        if measuring and enough and clock.firsts and (clock.gaps or not streams):
            return clock.outcome(users)


def all_at_once(engine: SimulatedEngine, traffic: Traffic, requests: int) -> Outcome:
    """So many requests that come together and run to their ends: what a benchmark of a batch measures."""
    clock = _Clock(engine)
    for number, lengths in zip(range(requests), _cycled(traffic), strict=False):
        clock.ask(str(number), lengths)
    while clock.busy:
        clock.step()
    return clock.outcome(requests)


def _cycled(traffic: Traffic) -> Iterator[Lengths]:
    return itertools.cycle(traffic.lengths)
