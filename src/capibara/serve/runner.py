"""The device's half of an engine: weights, cache and programs, and how a planned step becomes arrays."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.compile.cache import ExecutableCache
from capibara.compile.warmup import Program, WarmupReport, make_program, warm_up
from capibara.errors import say_once
from capibara.kernels.core.trusting import trusted
from capibara.kernels.pallas.overlap import ONE_BY_ONE
from capibara.mesh import current_rules, shard_params
from capibara.models import decoder
from capibara.serve import programs, sampling
from capibara.serve.adapters import with_adapters
from capibara.serve.cache_size import cache_size
from capibara.serve.config import EngineConfig
from capibara.serve.invariance import attention_implementation
from capibara.serve.launching import cannot_overlap, launched_one_by_one
from capibara.serve.programs import DeviceState, Shape, StepPrograms
from capibara.serve.scheduler import Chunk, Sequence, StepPlan
from capibara.serve.shapes import StepShapes
from capibara.serve.weights import nbytes_on_one, prepared

if TYPE_CHECKING:
    from capibara.models.modular import ModularCapibaraModel

__all__ = ["SEVERAL_FORMS", "Runner", "Sent", "form_of"]

_log = logging.getLogger(__name__)
_COPIES = 8
"""Pages that one program copies."""
_IN_A_ROW = 8
"""Steps that are timed together, where starting one may be a good part of its time."""
_SHORT_STEP = 20e-3
"""Seconds of a step of which it may."""
SEVERAL_FORMS: tuple[sampling.Form, ...] = ("greedy", "drawn", "filtered")
"""Forms that need nothing of the host between tokens."""

_fields_of = functools.lru_cache(maxsize=256)(programs.fields_of)
"""Where each part lies is the same at every step of a shape."""


@dataclass
class Sent:
    """A step that the device has been given."""

    plan: StepPlan
    rows: list[int]
    """The first row of each chunk that draws; -1 for others."""
    tokens: jax.Array
    logprobs: tuple[jax.Array, ...] | None
    at: float
    shape: Shape
    compiled: bool
    """Whether a program was made for it: its time is then no step's."""

    def drawn(self) -> Iterator[tuple[Chunk, list[int], int]]:
        """(chunk, its tokens, its first row) of each chunk that draws. Waits for the device."""
        tokens = np.asarray(self.tokens)
        if tokens.ndim == 2:
            columns = tokens.T.tolist()
            for chunk, row in zip(self.plan.chunks, self.rows, strict=True):
                yield chunk, columns[row][: chunk.drawn], row
            return
        listed = tokens.tolist()
        for chunk, row in zip(self.plan.chunks, self.rows, strict=True):
            if row >= 0:
                yield chunk, listed[row : row + 1 + len(chunk.draft)], row

    @functools.cached_property
    def chances(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Of each row the log-probability of its token, the likeliest tokens, and theirs; None where nobody asked."""
        if self.logprobs is None:
            return None
        own, ids, top = (np.asarray(part) for part in self.logprobs)
        return own, ids, top


class Runner:
    """Weights and cache on the device, and the programs that use them."""

    def __init__(self, model: ModularCapibaraModel, config: EngineConfig, *, max_length: int, words: int) -> None:
        self.config = config
        self.model = model.config
        self._surroundings = model._surroundings
        dtype = model._dtype
        self.shapes = StepShapes(config, -(-max_length // config.page_size))
        slots = config.max_sequences
        with self.context():
            params = model.params
            if config.mesh is not None:
                params = shard_params(params, decoder.axes(self.model), config.mesh)
            self.params = prepared(self.model, params, dtype, joint=config.mesh is None, int8=config.weights == "int8")
            self.params = with_adapters(self.model, self.params, config.adapters, dtype)
            self.cache_size = cache_size(
                self.model,
                config,
                max_length=max_length,
                dtype=self._cache_dtype(dtype),
                weight_bytes=nbytes_on_one(self.params) + nbytes_on_one(params),
            )
            self.pages = pages = self.cache_size.pages
            self.state = self._state(dtype)
        keeps_state = any(self.model.blocks[name].keeps_state for layer in self.model.period for name in layer)
        self.programs = StepPrograms(
            self.model,
            dtype,
            words,
            longest=lambda shape: shape.tokens if keeps_state else 1,
            key_splits=1 if config.batch_invariant else None,
            attention=attention_implementation(model, config),
            adapters=bool(config.adapters),
            overlaps=self._overlaps,
        )
        why_not = cannot_overlap(self.model, config, self.devices[0].device_kind)
        if config.overlap and why_not is not None:
            say_once(_log, why_not, "overlap=True means nothing here: %s", why_not)
        self._layer_bytes = nbytes_on_one(self.params["layers"]) / self.model.layers
        self._page_bytes = nbytes_on_one(self.state.cache) / self.model.layers / pages
        self._executables: dict[tuple[Any, ...], Any] = {}
        self._disk = None if config.cache_folder is None else ExecutableCache(config.cache_folder)
        # What programs hang on and their arguments' shapes do not show.
        own = (jnp.dtype(dtype), words, config.batch_invariant, config.attention, bool(config.adapters), config.mesh)
        self._identity = f"{self.model.to_toml()}\n{own}\n{dict(current_rules())}\n{trusted()}"
        self.compilations = 0
        self._counts: sampling.Counts | None = None
        self._all_allowed: dict[int, jax.Array] = {}
        self._words32 = -(-self.model.vocab // 32)
        # By slot: what the host says of a sequence at each of its steps.
        self._owner: list[Sequence | None] = [None] * slots
        self._admission = [0] * slots
        """Which of its owner's `admissions` the place was filled for."""
        self._filled = [0] * slots
        self._table = np.full((slots, self.shapes.pages[-1]), pages, np.int32)
        self._slot_params = {
            name: np.zeros(slots, dtype) for name, (_, dtype) in programs.sampling_fields(slots).items()
        }
        self._form = [0] * slots
        self._adapter = np.full(slots, -1, np.int32)

    @property
    def devices(self) -> list[Any]:
        return jax.devices()[:1] if self.config.mesh is None else list(self.config.mesh.devices.flat)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What programs are traced and run in."""
        with (
            self._surroundings(),
            contextlib.nullcontext() if self.config.mesh is None else jax.set_mesh(self.config.mesh),
        ):
            yield

    def _cache_dtype(self, dtype: Any) -> np.dtype[Any]:
        if self.config.cache_dtype is not None:
            return jnp.dtype(self.config.cache_dtype)
        # A CPU has no 16-bit numbers: XLA turns whole pools into 32-bit ones and back, in every layer of every step.
        on_cpu = self.devices[0].platform == "cpu"
        return jnp.dtype(jnp.float32 if on_cpu else dtype)

    def _state(self, dtype: Any) -> DeviceState:
        config = self.config
        cache_dtype = self._cache_dtype(dtype)

        def new() -> DeviceState:
            cache = decoder.new_paged_cache(self.model, self.pages, config.page_size, config.max_sequences, cache_dtype)
            return DeviceState(cache, jnp.zeros(config.max_sequences, jnp.int32))

        return jax.jit(new)()

    # Programs.

    def _overlaps(self, shape: Shape) -> bool:
        kind = self.devices[0].device_kind
        read = {"layer_bytes": self._layer_bytes, "page_bytes": self._page_bytes}
        return launched_one_by_one(self.model, self.config, shape, kind, **read)

    def _program(self, key: tuple[Any, ...], build: Callable[[], Any], *args: Any, donate: tuple[int, ...]) -> Program:
        return Program(
            name=" ".join(map(str, key)),
            what=f"{self._identity}\n{key!r}",
            build=build,
            args=jax.tree.map(_described, args),
            donate=donate,
            context=self.context,
            devices=None if self.config.mesh is None else tuple(self.config.mesh.devices.flat),
            options=ONE_BY_ONE if key[0] == "several" and self._overlaps(key[1]) else {},
        )

    def _executable(self, key: tuple[Any, ...], build: Callable[[], Any], *args: Any, donate: tuple[int, ...]) -> Any:
        """The program of this key, made where it is not there yet."""
        executable = self._executables.get(key)
        if executable is None:
            program = self._program(key, build, *args, donate=donate)
            executable, compiled = make_program(program, self._disk)
            self._executables[key] = executable
            self.compilations += compiled
        return executable

    def _all_programs(self) -> dict[tuple[Any, ...], Program]:
        """Every program that a step may need."""
        vocab, every = self.model.vocab, {}

        def add(key: tuple[Any, ...], build: Callable[[], Any], *args: Any, donate: tuple[int, ...]) -> None:
            every[key] = self._program(key, build, *args, donate=donate)

        counts_shape = (self.config.max_sequences, vocab)
        of_output, of_prompt = (_shaped(counts_shape, dtype) for dtype in (jnp.int32, bool))
        counts = sampling.Counts(of_output, of_prompt)  # type: ignore[arg-type]
        for shape in self.shapes.all():
            said = _shaped((programs.fields_of(shape).size,), jnp.int32)
            if shape.steps > 1:
                for form in SEVERAL_FORMS:
                    several = functools.partial(self.programs.several, shape, form)
                    add(("several", shape, form), several, self.params, self.state, said, donate=(1,))
                continue
            build = functools.partial(self.programs.forward, shape)
            add(("forward", shape), build, self.params, self.state, said, donate=(1,))
        for rows in sorted({shape.rows for shape in self.shapes.all() if shape.steps == 1}):
            for form in self._forms[1:]:  # the forward programs draw the likeliest themselves
                said = _shaped((programs.row_fields(rows).size,), jnp.int32)
                args: tuple[Any, ...] = (_shaped((rows, vocab), jnp.float32), self.state.last_tokens, said)
                full = form in ("full", "penalised")
                if full:
                    allowed = _shaped((rows, self._words32), jnp.uint32)
                    args = (*args, allowed, counts if form == "penalised" else None)
                draw = functools.partial(self.programs.draw, rows, form)
                add(("draw", rows, form), draw, *args, donate=(1, 4) if full else (1,))
        numbers = _shaped((_COPIES,), jnp.int32)
        add(("copy",), self._copying, self.state.cache, numbers, numbers, donate=(0,))
        of_slot = (_shaped((), jnp.int32), _shaped((vocab,), bool), _shaped((vocab,), jnp.int32))
        add(("begin_counts",), lambda: programs.begin_counts, counts, *of_slot, donate=(0,))
        return every

    def _copying(self) -> Any:
        return functools.partial(programs.copy_pages, self.model)

    def warm_up(
        self,
        progress: Callable[[int, int, str], None] | None = None,
        forms: Collection[sampling.Form] | None = None,
    ) -> WarmupReport:
        """Make every program that a step may need; of those that draw, the ones of these forms, or all."""

        def wanted(kind: str, *of: Any) -> bool:
            return forms is None or kind not in ("several", "draw") or of[1] in forms

        every = {
            key: program
            for key, program in self._all_programs().items()
            if key not in self._executables and wanted(*key)
        }
        made, report = warm_up(list(every.values()), self._disk, progress=progress)
        self._executables.update(zip(every, made, strict=True))
        self.compilations += report.compiled
        return report

    def close(self) -> None:
        """Give back the device's memory: the cache and the weights' copy."""
        for leaf in jax.tree.leaves((self.state, self._counts, self._all_allowed)):
            leaf.delete()
        self._executables.clear()
        self.params = self._counts = None
        self._all_allowed.clear()

    # A step.

    def send(self, plan: StepPlan, allowed: np.ndarray | None = None) -> Sent:
        """Give the device a step; what it draws is fetched by `Sent.drawn`.

        Args:
          allowed: [chunks, vocab / 32] of uint32: the tokens that grammars allow each chunk's sequence.
        """
        made = self.compilations
        with self.context():
            if plan.copies:
                self._copy(plan.copies)
            slots = np.array([chunk.sequence.slot for chunk in plan.chunks], np.int32)
            for chunk in plan.chunks:
                self._place(chunk.sequence)
            drawing = [self._form[chunk.sequence.slot] for chunk in plan.chunks if chunk.samples]
            form = self._form_of_step(sampling.FORMS[max(drawing)]) if drawing else None
            shape = self.shapes.of(plan)
            said, rows = (self._say_decode if shape.decodes else self._say_ragged)(plan, slots, shape)
            if plan.steps > 1:
                tokens, chances = self._run_several(shape, form, said), None
            else:
                tokens, chances = self._run(shape, form, said, rows, allowed)
        if tokens is not None:
            tokens.copy_to_host_async()
        return Sent(plan, rows, tokens, chances, time.perf_counter(), shape, self.compilations > made)

    @property
    def _forms(self) -> tuple[sampling.Form, ...]:
        """The forms that drawing programs are made in."""
        # Two programs may add up a row's chances in two orders: what a request's neighbours ask for must not choose
        # between them. The likeliest token is the same in each.
        return ("greedy", "penalised") if self.config.batch_invariant else sampling.FORMS

    def _form_of_step(self, least: sampling.Form) -> sampling.Form:
        return next(form for form in self._forms if sampling.FORMS.index(form) >= sampling.FORMS.index(least))

    def time_step(self, shape: Shape, *, context: int | None = None, repeats: int = 3) -> float:
        """Seconds of a step of this shape among others like it, the likeliest tokens drawn.

        It writes over the cache: nothing may be running.

        Args:
          context: keys of each sequence, where each has one token; by default half of what its table has room for.
        """
        said = self._made_up(shape, context)

        def seconds(steps: int) -> float:
            start = time.perf_counter()
            with self.context():
                for _ in range(steps):
                    if shape.steps > 1:
                        tokens = self._run_several(shape, "greedy", said)
                    else:
                        tokens, _ = self._run(shape, "greedy", said, [], None)
            tokens.block_until_ready()
            return (time.perf_counter() - start) / steps

        seconds(1)  # the first may compile
        # An engine gives the device a step before the last one is done: what starting one takes the host is no part of
        # it, unless it is longer than the step.
        in_a_row = _IN_A_ROW if seconds(1) < _SHORT_STEP else 1
        return float(np.median([seconds(in_a_row) for _ in range(repeats)]))

    def _made_up(self, shape: Shape, context: int | None) -> np.ndarray:
        whole, parts = programs.fields_of(shape).new()
        count, size = shape.sequences, self.config.page_size
        half = max(1, min(shape.pages, self.pages) * size // 2)
        parts["adapters"][:] = -1
        parts["page_table"][:] = np.arange(count * shape.pages).reshape(count, -1) % self.pages
        parts["slot"][:] = np.arange(shape.rows) % self.config.max_sequences
        if shape.decodes:
            parts["context_lengths"][:] = half if context is None else context
            parts["left"][:] = shape.steps
            return whole
        parts["slots"][:] = np.arange(count) % self.config.max_sequences
        starts = np.minimum(np.arange(count + 1) * half, shape.tokens)
        parts["query_starts"][:] = starts
        lengths = np.diff(starts)
        parts["context_lengths"][:] = lengths
        row = np.minimum(np.searchsorted(starts, np.arange(shape.tokens), side="right") - 1, count - 1)
        parts["row_of_token"][:] = row
        inside = np.arange(shape.tokens) < starts[-1]
        parts["positions"][:] = np.where(inside, np.arange(shape.tokens) - starts[row], -1)
        return whole

    def _run_several(self, shape: Shape, form: Any, said: np.ndarray) -> Any:
        args = (self.params, self.state, said)
        run = self._executable(("several", shape, form), lambda: self.programs.several(shape, form), *args, donate=(1,))
        tokens, self.state = run(*args)
        return tokens

    def _run(self, shape: Shape, form: Any, said: np.ndarray, rows: list[int], allowed: Any) -> tuple[Any, Any]:
        args: tuple[Any, ...] = (self.params, self.state, said)
        run = self._executable(("forward", shape), lambda: self.programs.forward(shape), *args, donate=(1,))
        likeliest, logits, self.state, said_of_rows = run(*args)
        if form is None:
            return None, None
        if form == "greedy":
            return likeliest, None
        args = (logits, self.state.last_tokens, said_of_rows)
        full = form in ("full", "penalised")
        if full:
            counts = self._counts_of_slots() if form == "penalised" else None
            args = (*args, self._allowed(shape.rows, rows, allowed), counts)
        run = self._executable(
            ("draw", shape.rows, form),
            lambda: self.programs.draw(shape.rows, form),
            *args,
            donate=(1, 4) if full else (1,),
        )
        tokens, last_tokens, *beside = run(*args)
        self.state = self.state._replace(last_tokens=last_tokens)
        if not full:
            return tokens, None
        chances, counts = beside
        if form == "penalised":
            self._counts = counts
        return tokens, chances

    def _allowed(self, count: int, rows: list[int], allowed: np.ndarray | None) -> Any:
        if allowed is None:
            if count not in self._all_allowed:
                self._all_allowed[count] = jnp.full((count, self._words32), 0xFFFFFFFF, jnp.uint32)
            return self._all_allowed[count]
        bits = np.full((count, self._words32), 0xFFFFFFFF, np.uint32)
        for row, of_chunk in zip(rows, allowed, strict=True):
            if row >= 0:
                bits[row] = of_chunk
        return bits

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        for at in range(0, len(copies), _COPIES):
            some = copies[at : at + _COPIES]
            pairs = np.full((2, _COPIES), self.pages, np.int32)
            pairs[:, : len(some)] = np.array(some, np.int32).T
            args = (self.state.cache, pairs[0], pairs[1])
            run = self._executable(("copy",), self._copying, *args, donate=(0,))
            self.state = self.state._replace(cache=run(*args))

    def _place(self, sequence: Sequence) -> None:
        """Have what is said of a sequence at every step in its slot's place."""
        slot, pages = sequence.slot, sequence.pages.pages
        if self._owner[slot] is not sequence or self._admission[slot] != sequence.admissions:
            self._owner[slot], self._admission[slot], self._filled[slot] = sequence, sequence.admissions, 0
            self._table[slot] = self.pages
            self._begin(sequence)
        filled = self._filled[slot]
        if filled < len(pages):
            self._table[slot, filled : len(pages)] = pages[filled:]
            self._filled[slot] = len(pages)

    def _begin(self, sequence: Sequence) -> None:
        slot, asked = sequence.slot, sequence.request.sampling
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty"):  # fmt: skip
            self._slot_params[name][slot] = getattr(asked, name)
        seed = np.array([sequence.seed % 2**64], np.uint64).view(np.int32)
        self._slot_params["seed_low"][slot], self._slot_params["seed_high"][slot] = seed
        self._form[slot] = sampling.FORMS.index(form_of(asked))
        self._adapter[slot] = -1 if asked.adapter is None else list(self.config.adapters).index(asked.adapter)
        if asked.penalised:
            self._begin_counts(sequence)

    def _counts_of_slots(self) -> sampling.Counts:
        """Made when they are first needed: most servers never see a penalty."""
        if self._counts is None:
            shape = (self.config.max_sequences, self.model.vocab)
            self._counts = sampling.Counts(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
        return self._counts

    def _begin_counts(self, sequence: Sequence) -> None:
        vocab = self.model.vocab
        tokens = np.array(sequence.tokens)
        prompt = np.bincount(tokens[: sequence.prompt_length], minlength=vocab) > 0
        output = np.bincount(tokens[sequence.prompt_length :], minlength=vocab).astype(np.int32)
        args = (self._counts_of_slots(), np.int32(sequence.slot), prompt, output)
        run = self._executable(("begin_counts",), lambda: programs.begin_counts, *args, donate=(0,))
        self._counts = run(*args)

    def _say_sampling(self, parts: dict[str, np.ndarray], slots: np.ndarray) -> None:
        """What the first rows are drawn by: those of these slots."""
        count = len(slots)
        for name, values in self._slot_params.items():
            if name not in ("number", "slot"):
                parts[name][:count] = values[slots]
        parts["slot"][:] = self.config.max_sequences
        parts["slot"][:count] = slots

    def _say_decode(self, plan: StepPlan, slots: np.ndarray, shape: Shape) -> tuple[np.ndarray, list[int]]:
        chunks, count = plan.chunks, len(slots)
        lengths = np.array([chunk.start for chunk in chunks], np.int32) + 1
        whole, parts = _fields_of(shape).new()
        parts["tokens"][:count] = [token for chunk in chunks for token in _tokens(chunk)]
        parts["context_lengths"][:count] = parts["number"][:count] = lengths
        parts["left"][:count] = np.array([chunk.sequence.last_token_number for chunk in chunks], np.int32) - lengths
        parts["adapters"][:] = -1
        parts["adapters"][:count] = self._adapter[slots]
        parts["page_table"][:count] = self._table[slots, : shape.pages]
        self._say_sampling(parts, slots)
        return whole, list(range(count))

    def _say_ragged(self, plan: StepPlan, slots: np.ndarray, shape: Shape) -> tuple[np.ndarray, list[int]]:
        chunks, count = plan.chunks, len(slots)
        whole, parts = _fields_of(shape).new()
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        of_token = np.repeat(np.arange(count), counts)
        parts["tokens"][:total] = [token for chunk in chunks for token in _tokens(chunk)]
        parts["positions"][:] = -1
        parts["positions"][:total] = np.arange(total) + (starts + counts - ends)[of_token]
        parts["row_of_token"][:total] = of_token
        parts["adapters"][:] = -1
        parts["adapters"][:total] = self._adapter[slots][of_token]
        parts["context_lengths"][:count] = starts + counts
        parts["query_starts"][1:] = total
        parts["query_starts"][1 : count + 1] = ends
        parts["slots"][:] = self.config.max_sequences
        parts["slots"][:count] = slots
        parts["page_table"][:count] = self._table[slots]
        # A row for the last token of each chunk that draws, and for each of the drafted ones before it.
        drawn = np.array([1 + len(chunk.draft) if chunk.drawn else 0 for chunk in chunks], np.int32)
        row_ends = np.cumsum(drawn)
        of_row = np.repeat(np.arange(count), drawn)
        back = np.arange(len(of_row)) - row_ends[of_row]  # from -drawn to -1
        parts["sampled_at"][: len(of_row)] = ends[of_row] + back
        parts["number"][: len(of_row)] = (starts + counts)[of_row] + back + 1
        self._say_sampling(parts, slots[of_row])
        return whole, np.where(drawn > 0, row_ends - drawn, -1).tolist()


def _tokens(chunk: Chunk) -> Collection[int]:
    """-1 for one that is being drawn, and not known here yet."""
    tokens, start = chunk.sequence.tokens, chunk.start
    if start >= len(tokens):
        return (-1,)
    return (*tokens[start : start + chunk.count], *chunk.draft)


def form_of(asked: Any) -> sampling.Form:
    """The least form that draws what is asked."""
    if asked.penalised:
        return "penalised"
    if asked.constrained or asked.logprobs is not None:
        return "full"
    if asked.temperature == 0:
        return "greedy"
    if asked.top_k or asked.top_p < 1 or asked.min_p > 0:
        return "filtered"
    return "drawn"


def _shaped(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 else None
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)
