"""Seconds of an engine's step on a chip that is not here: its own programs traced for their shapes, and priced.

A step's program is traced as the engine would compile it, its drawing after it, and priced pass by pass
(`capibara.cost`). Two things are not in its shapes. How long the contexts are: paged attention reads the keys that are
there, whatever the table has room for, so that its calls are taken out of the program and priced for the lengths of the
step at hand, by the op's own cost. And the depth: layers are written one after another, so that two traces, of one and
of two repetitions of the layers' pattern, tell what each further one adds.

What the host does between steps is not in it: an engine sends the next step before the last one is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.cost.estimate import estimate
from capibara.cost.roofline import Work, call_work
from capibara.models import decoder
from capibara.parallel.trainer_step import compute_dtype
from capibara.program.chip import Loop, Step
from capibara.program.spreading import spread
from capibara.program.tracing import trace
from capibara.serve import programs
from capibara.serve.prediction.placement import EnginePlacement, prepared_shapes
from capibara.serve.programs import DeviceState, Shape, StepPrograms

if TYPE_CHECKING:
    from capibara.cost.result import Part
    from capibara.hardware.topology import Slice
    from capibara.kernels.core.spec import Call
    from capibara.models.config import ModularModelConfig
    from capibara.program.chip import ChipProgram
    from capibara.serve.config import EngineConfig
    from capibara.serve.prediction.served import ServedModel
    from capibara.serve.sampling import Form
    from capibara.serve.scheduler import StepPlan

__all__ = ["StepTimes", "Tokens"]

_ATTENTION = "paged_attention"


@dataclass(frozen=True)
class Tokens:
    """One sequence's part of a step."""

    count: int
    """Tokens that are computed."""
    context: int
    """Keys that it has then, these included."""

    def pages(self, page_size: int, window: int | None) -> int:
        """That attention reads: those with a key that one of the tokens sees."""
        first = 0 if window is None else max(0, self.context - self.count - window + 1)
        return -(-self.context // page_size) - first // page_size

    def pairs(self, window: int | None) -> float:
        """(token, key that it sees) in all."""
        before = self.context - self.count
        if window is None:
            return self.count * before + self.count * (self.count + 1) / 2
        rising = min(self.count, max(0, window - before))  # tokens that still see everything before them
        return rising * before + rising * (rising + 1) / 2 + (self.count - rising) * window


@dataclass(frozen=True)
class _Attention:
    """Paged attention of one block of every repetition: work that grows with the pages read and the pairs seen."""

    window: int | None
    page_size: int
    tokens: int
    least: Work
    """Of one page, each token seeing one page's keys."""
    page_seconds: float
    """Of memory at its peak, for a page more."""
    pair_seconds: float
    """Of the matrix units at their peak, for a pair more."""

    def seconds(self, step: Sequence[Tokens], level: str) -> float:
        pages = sum(one.pages(self.page_size, self.window) for one in step)
        pairs = sum(one.pairs(self.window) for one in step)
        least = self.least
        work = least._replace(
            memory=least.memory + self.page_seconds * (pages - 1),
            matrix=max(0.0, least.matrix + self.pair_seconds * (pairs - self.tokens * self.page_size)),
        )
        # A launch is in the program's own time.
        return work.seconds(level) - least.chip.efficiency.launch_seconds


@dataclass(frozen=True)
class _Priced:
    """A program without the time that its contexts take."""

    seconds: dict[str, float]
    """By level: low, mid, high efficiency of the chip."""
    attention: tuple[_Attention, ...]
    parts: tuple[Part, ...]
    link_seconds: float
    """Of exchanges between the engine's chips, that nothing hides."""
    notes: tuple[str, ...]


class StepTimes:
    """Predicted seconds of the steps of one engine on so many chips of a slice.

    Args:
      served: the model.
      config: of the engine; its `mesh` is not read.
      where: the slice that the engine's chips are of.
      tensor_parallel: chips of one engine.
      pages: of its cache.
      max_length: tokens that a sequence has at most.
      form: how tokens are drawn: one of `capibara.serve.sampling.FORMS` that needs no more than the logits.

    >>> from capibara.plan.place import place
    >>> from capibara.serve.config import EngineConfig
    >>> from capibara.serve.prediction.served import served_model
    >>> times = StepTimes(served_model("dev"), EngineConfig(max_sequences=4), place("h200"), pages=64, max_length=128)
    >>> short, long = (times.seconds(times.decode_shape(4), [Tokens(1, length)] * 4) for length in (16, 128))
    >>> 0 < short < long
    True
    """

    def __init__(
        self,
        served: ServedModel,
        config: EngineConfig,
        where: Slice,
        *,
        pages: int,
        max_length: int,
        tensor_parallel: int = 1,
        form: Form = "greedy",
    ) -> None:
        self.served, self.config, self.where = served, config, where
        self.tensor_parallel, self.form = tensor_parallel, form
        self.pages = pages
        self.table_pages = -(-max_length // config.page_size)
        self.dtype = compute_dtype(served.precision)
        self.cache_dtype = jnp.dtype(config.cache_dtype or self.dtype)
        self.placement = EnginePlacement(served, tensor_parallel, int8=config.weights == "int8")
        self._priced: dict[Shape, _Priced] = {}

    def decode_shape(self, sequences: int) -> Shape:
        """A step of one token each, with tables for the longest contexts."""
        return Shape(sequences, sequences, self.table_pages, sequences)

    def seconds(self, shape: Shape, step: Iterable[Tokens], level: str = "mid") -> float:
        """Of a step of this shape that holds these tokens; of all its steps, where it draws several in a row.

        Args:
          level: "low", "mid" or "high": the chip's efficiencies that are counted with.
        """
        priced = self.priced(shape)
        held = list(step)
        repeats = self.served.config.repeats
        total = 0.0
        for done in range(shape.steps):
            now = held if not done else [Tokens(one.count, one.context + done) for one in held]
            total += priced.seconds[level] + repeats * sum(one.seconds(now, level) for one in priced.attention)
        return total

    def anatomy(self, shape: Shape, step: Iterable[Tokens]) -> dict[str, float]:
        """Seconds of one step by what they go to: lines of the model, paged_attention, links; the longest first."""
        priced = self.priced(shape)
        held = list(step)
        read = self.served.config.repeats * sum(one.seconds(held, "mid") for one in priced.attention)
        parts = {_ATTENTION: read, "links": priced.link_seconds}
        for part in priced.parts:
            parts[part.name] = parts.get(part.name, 0.0) + part.seconds
        return dict(sorted(((k, v) for k, v in parts.items() if v > 0), key=lambda item: -item[1]))

    def of_plan(self, shape: Shape, plan: StepPlan) -> float:
        """Of a step that a scheduler planned."""
        return self.seconds(shape, (Tokens(chunk.count, chunk.start + chunk.count) for chunk in plan.chunks))

    def of_shape(self, shape: Shape, context: int | None = None) -> float:
        """Of a step as an engine times it before there are requests: contexts half as long as they may be, or so."""
        half = max(1, min(shape.pages, self.pages) * self.config.page_size // 2)
        if shape.decodes:
            return self.seconds(shape, [Tokens(1, context or half)] * shape.sequences)
        counts = [max(0, min(half, shape.tokens - number * half)) for number in range(shape.sequences)]
        return self.seconds(shape, [Tokens(count, count) for count in counts if count])

    def priced(self, shape: Shape) -> _Priced:
        """The program of a shape. A program of several steps is one step's, so many times: its body is the same."""
        # Only pages of 8-bit numbers are widened by the table; else its width is next to nothing.
        pages = shape.pages if self.cache_dtype == jnp.int8 else self.table_pages
        key = shape._replace(pages=pages, steps=1)
        found = self._priced.get(key)
        if found is None:
            found = self._priced[key] = self._price(key)
        return found

    def _price(self, shape: Shape) -> _Priced:
        model = self.served.config
        first = self._repetitions(shape, 1)
        if model.repeats == 1:
            return first
        second = self._repetitions(shape, 2)
        more = model.repeats - 1
        return dataclasses.replace(
            first,
            seconds={level: first.seconds[level] + more * (second.seconds[level] - first.seconds[level])
                     for level in first.seconds},
            parts=_grown(first.parts, second.parts, more),
            link_seconds=first.link_seconds + more * (second.link_seconds - first.link_seconds),
        )  # fmt: skip

    def _repetitions(self, shape: Shape, repetitions: int) -> _Priced:
        whole = self.served.config
        model = dataclasses.replace(whole, layers=repetitions * len(whole.period))
        run, args = self._program(model, shape)
        where = self.where
        layout = self.placement.layout(model, args, where)
        traced = trace(
            run,
            args,
            donate=(1,),
            roles=("params", "other", "batch"),
            device_kind=where.chip.device_kinds[0],
            layout=layout if self.tensor_parallel > 1 else None,
            share_repeats=True,
            closed=frozenset({_ATTENTION}),
        )
        chip_program, calls = _without_attention(spread(traced, layout))
        found = estimate(chip_program, layout.mesh, where)
        return _Priced(
            {"low": found.high, "mid": found.seconds, "high": found.low},
            tuple(self._attention(call) for call in calls[: len(calls) // repetitions]),
            found.parts,
            found.exposed_seconds,
            found.notes,
        )

    def _program(self, model: ModularModelConfig, shape: Shape) -> tuple[Any, tuple[Any, Any, Any]]:
        """One step and its drawing as a function, and the shapes of its arguments."""
        config = self.config
        keeps_state = any(model.blocks[name].keeps_state for names in model.period for name in names)
        steps = StepPrograms(
            model,
            self.dtype,
            model.vocab,
            longest=lambda shape: shape.tokens if keeps_state else 1,
            key_splits=1 if config.batch_invariant else None,
            attention=config.attention,
        )
        forward, draw = steps.forward(shape), steps.draw(shape.rows, self.form)

        def step(params: Any, state: DeviceState, said: jax.Array) -> Any:
            tokens, logits, state, said_of_rows = forward(params, state, said)
            if self.form == "greedy":
                return tokens, state
            tokens, last_tokens = draw(logits, state.last_tokens, said_of_rows)
            return tokens, state._replace(last_tokens=last_tokens)

        params = prepared_shapes(
            model, self.served.precision, joint=self.placement.joint, int8=config.weights == "int8"
        )
        cache = jax.eval_shape(
            lambda: decoder.new_paged_cache(model, self.pages, config.page_size, config.max_sequences, self.cache_dtype)
        )
        last_tokens: Any = jax.ShapeDtypeStruct((config.max_sequences,), jnp.int32)
        said = jax.ShapeDtypeStruct((programs.fields_of(shape).size,), jnp.int32)
        return step, (params, DeviceState(cache, last_tokens), said)

    def _attention(self, call: Call) -> _Attention:
        chip, page_size = self.where.chip, self.config.page_size
        tokens = call.need("query").shape[0]
        one = call_work(_with_context(call, pages=1, width=1), chip)
        many = self.table_pages + 1
        pages = call_work(_with_context(call, pages=many, width=1), chip)
        keys = call_work(_with_context(call, pages=1, width=many), chip)
        window = call.params["window"]
        widened = many if window is None else max(1.0, min(many, window / page_size))  # type: ignore[operator]
        further = tokens * page_size * (widened - 1)
        return _Attention(
            window,  # type: ignore[arg-type]
            page_size,
            tokens,
            one,
            (pages.memory - one.memory) / (many - 1),
            (keys.matrix - one.matrix) / further if further else one.matrix / (tokens * page_size),
        )


def _with_context(call: Call, *, pages: int, width: int) -> Call:
    """The call with pools of so many pages and tables so wide: its cost reads a pool once, and a table's keys."""

    def shaped(name: str, x: Any) -> Any:
        if name in ("key_pages", "value_pages"):
            return jax.ShapeDtypeStruct((pages, *x.shape[1:]), x.dtype)
        return jax.ShapeDtypeStruct((x.shape[0], width), x.dtype) if name == "page_table" and x is not None else x

    args = tuple(shaped(name, x) for name, x in zip(call.op.operands, call.args, strict=True))
    return dataclasses.replace(call, args=args)


def _without_attention(program: ChipProgram) -> tuple[ChipProgram, list[Call]]:
    """The program with the work of its calls of paged attention taken out, a launch each left; and the calls."""
    calls: list[Call] = []

    def stripped(steps: Sequence[Step | Loop]) -> tuple[Step | Loop, ...]:
        made: list[Step | Loop] = []
        for step in steps:
            if isinstance(step, Loop):
                made.append(dataclasses.replace(step, body=stripped(step.body)))
            elif step.call is not None and step.call.op.name == _ATTENTION:
                calls.append(step.call)
                made.append(dataclasses.replace(step, flops=0.0, vector_flops=0.0, bytes=0.0, call=None))
            else:
                made.append(step)
        return tuple(made)

    return dataclasses.replace(program, steps=stripped(program.steps)), calls


def _grown(first: Sequence[Part], second: Sequence[Part], more: int) -> tuple[Part, ...]:
    """The parts of as many repetitions as there are, by what the second one added to the first."""
    before = {part.name: part for part in first}
    grown = []
    for part in second:
        began = before.get(part.name, dataclasses.replace(part, flops=0.0, bytes=0.0, seconds=0.0))
        changed = {
            field: max(0.0, getattr(began, field) + more * (getattr(part, field) - getattr(began, field)))
            for field in ("flops", "bytes", "seconds")
        }
        grown.append(dataclasses.replace(part, **changed))
    return tuple(sorted(grown, key=lambda part: -part.seconds))
