"""The compiled programs of an engine: a step of a ragged batch, steps of one token a sequence, and the drawing.

All that the host has to say of a step is one array of 32-bit numbers, sent in one piece; a program takes it apart. The
cache and the last tokens stay on the device: a step's tokens are the next one's inputs without coming to the host.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.pallas.overlap import overlapping
from capibara.models import decoder
from capibara.models.blocks.spec import PagedBatch
from capibara.serve import sampling

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = [
    "DeviceState",
    "Fields",
    "Forward",
    "Shape",
    "StepPrograms",
    "begin_counts",
    "copy_pages",
    "decode_fields",
    "fields_of",
    "ragged_fields",
    "row_fields",
    "sampling_fields",
]

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)


class Shape(NamedTuple):
    """What a program is compiled for."""

    tokens: int
    sequences: int
    pages: int
    """Of one sequence."""
    rows: int
    """That tokens are drawn for."""
    steps: int = 1

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one token, which also is drawn after."""
        return self.tokens == self.sequences == self.rows

    def __str__(self) -> str:
        what = f"{self.sequences} x {self.steps}" if self.decodes else f"{self.tokens} tokens of {self.sequences}"
        return f"{what}, {self.pages} pages" + ("" if self.decodes else f", {self.rows} drawn")


_ALIGNMENT = 64
"""Numbers of 4 bytes that a part's start is a multiple of: XLA hands a kernel the part where it lies in the whole, and
kernels of Mosaic take what is aligned to 256 bytes."""


class Fields:
    """Named arrays laid one after another in one of int32; floats keep their bits."""

    def __init__(self, **fields: tuple[tuple[int, ...], np.dtype[Any]]) -> None:
        self.fields = fields
        self.size = sum(_aligned(math.prod(shape)) for shape, _ in fields.values())

    def new(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the whole, its parts): writing to a part writes to the whole."""
        whole = np.zeros(self.size, np.int32)
        return whole, self._parts(whole, lambda part, dtype: part.view(dtype))

    def unpack(self, whole: jax.Array) -> dict[str, jax.Array]:
        return self._parts(whole, jax.lax.bitcast_convert_type)

    def _parts(self, whole: Any, cast: Callable[[Any, Any], Any]) -> dict[str, Any]:
        parts, at = {}, 0
        for name, (shape, dtype) in self.fields.items():
            size = math.prod(shape)
            part = whole[at : at + size]
            parts[name] = (part if dtype == _INT else cast(part, dtype)).reshape(shape)
            at += _aligned(size)
        return parts


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def sampling_fields(rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    whole_numbers = ("number", "seed_high", "seed_low", "top_k", "slot")
    return {name: ((rows,), _INT if name in whole_numbers else _FLOAT) for name in sampling.Rows._fields}


def row_fields(rows: int) -> Fields:
    """What is said of the rows that tokens are drawn for: the first part of what is said of a step."""
    return Fields(**sampling_fields(rows))


def decode_fields(shape: Shape) -> Fields:
    n = shape.sequences
    return Fields(
        **sampling_fields(n),
        tokens=((n,), _INT),
        context_lengths=((n,), _INT),
        left=((n,), _INT),
        adapters=((n,), _INT),
        page_table=((n, shape.pages), _INT),
    )


def ragged_fields(shape: Shape) -> Fields:
    return Fields(
        **sampling_fields(shape.rows),
        tokens=((shape.tokens,), _INT),
        positions=((shape.tokens,), _INT),
        row_of_token=((shape.tokens,), _INT),
        adapters=((shape.tokens,), _INT),
        context_lengths=((shape.sequences,), _INT),
        query_starts=((shape.sequences + 1,), _INT),
        slots=((shape.sequences,), _INT),
        page_table=((shape.sequences, shape.pages), _INT),
        sampled_at=((shape.rows,), _INT),
    )


def fields_of(shape: Shape) -> Fields:
    """What the host says of a step of this shape."""
    return decode_fields(shape) if shape.decodes else ragged_fields(shape)


class DeviceState(NamedTuple):
    """What stays on the device from step to step."""

    cache: list[Any]
    last_tokens: jax.Array
    """[slots]: the token that each sequence drew last."""


class Forward(NamedTuple):
    """What a step's program gives."""

    likeliest: jax.Array
    """[rows]: tokens, which are the last ones in `state`."""
    logits: jax.Array
    state: DeviceState
    said_of_rows: jax.Array


@dataclass(frozen=True)
class StepPrograms:
    """The functions that are compiled, of one model."""

    model: ModularModelConfig
    dtype: Any
    words: int
    """Tokens that stand for something: those beyond fill the vocabulary up, and are not drawn."""
    longest: Callable[[Shape], int]
    """Tokens that one sequence has at most in a step of this shape."""
    key_splits: int | None = None
    attention: str | None = None
    adapters: bool = False
    """Whether the weights have low-rank changes that a token may take."""
    overlaps: Callable[[Shape], bool] = lambda shape: False
    """Whether a step's kernels start before the ones before them are done; its weights are the program's arguments."""

    def _logits(self, params: Any, x: jax.Array) -> jax.Array:
        scores = decoder.logits(self.model, params, x)
        if self.words < self.model.vocab:
            scores = jnp.where(jnp.arange(self.model.vocab) < self.words, scores, -jnp.inf)
        return scores

    def _decode(
        self, params: Any, state: DeviceState, tokens: jax.Array, parts: Mapping[str, jax.Array], done: Any = 0
    ) -> tuple[jax.Array, list[Any]]:
        """One token a sequence, `done` tokens after where `parts` has them.

        Who has as many as it may is padding from then on: its keys are what a step of many sequences is made of.
        """
        contexts = parts["context_lengths"]
        contexts = jnp.where((contexts > 0) & (done < parts["left"]), contexts + done, 0)
        batch = PagedBatch(
            positions=contexts - 1,
            rows=jnp.arange(contexts.shape[0], dtype=jnp.int32),
            page_table=parts["page_table"],
            context_lengths=contexts,
            query_starts=None,
            slots=parts["slot"],
            key_splits=self.key_splits,
            attention=self.attention,
            adapters=parts["adapters"] if self.adapters else None,
        )
        return decoder.paged(self.model, params, tokens, state.cache, batch, dtype=self.dtype)

    def forward(self, shape: Shape) -> Callable[[Any, DeviceState, jax.Array], Forward]:
        """(params, state, what the host says) -> what came of it, the likeliest token of each row drawn.

        Starting a program takes the host half a millisecond: a step of which no more is asked is one. Another form of
        drawing takes the place of what was drawn here.
        """
        of_rows = row_fields(shape.rows).size

        def run(params: Any, state: DeviceState, said: jax.Array) -> Forward:
            parts = fields_of(shape).unpack(said)
            slots = parts["slot"] if shape.decodes else parts["slots"][parts["row_of_token"]]
            # -1: the token was drawn by the step before, and the host has not seen it yet.
            known = parts["tokens"]
            tokens = jnp.where(known < 0, state.last_tokens.at[slots].get(mode="fill", fill_value=0), known)
            if shape.decodes:
                x, cache = self._decode(params, state, tokens, parts)
            else:
                batch = PagedBatch(
                    positions=parts["positions"],
                    rows=parts["row_of_token"],
                    page_table=parts["page_table"],
                    context_lengths=parts["context_lengths"],
                    query_starts=parts["query_starts"],
                    slots=parts["slots"],
                    longest=self.longest(shape),
                    key_splits=self.key_splits,
                    attention=self.attention,
                    adapters=parts["adapters"] if self.adapters else None,
                )
                x, cache = decoder.paged(self.model, params, tokens, state.cache, batch, dtype=self.dtype)
                x = x[parts["sampled_at"]]
            logits = self._logits(params, x)
            likeliest, last_tokens = self.draw(shape.rows, "greedy")(logits, state.last_tokens, said[:of_rows])
            return Forward(likeliest, logits, DeviceState(cache, last_tokens), said[:of_rows])

        return run

    def draw(self, rows: int, form: sampling.Form) -> Callable[..., Any]:
        """(logits, last tokens, what is said of so many rows) -> (tokens, last tokens).

        The forms "full" and "penalised" also take which tokens are allowed, and counts or None, and give
        log-probabilities and the counts then.
        """
        fields = row_fields(rows)

        def run(
            logits: jax.Array,
            last_tokens: jax.Array,
            said: jax.Array,
            allowed: jax.Array | None = None,
            counts: sampling.Counts | None = None,
        ) -> Any:
            parts = fields.unpack(said)
            rows = sampling.Rows(**{name: parts[name] for name in sampling.Rows._fields})
            tokens = sampling.draw(logits, rows, form, counts=counts, allowed=allowed)
            last_tokens = last_tokens.at[rows.slot].set(tokens, mode="drop")
            if form not in ("full", "penalised"):
                return tokens, last_tokens
            if counts is not None:
                counts = counts._replace(output=counts.output.at[rows.slot, tokens].add(1, mode="drop"))
            return tokens, last_tokens, sampling.logprobs(logits, tokens), counts

        return run

    def several(self, shape: Shape, form: sampling.Form) -> Callable[..., tuple[jax.Array, DeviceState]]:
        """(params, state, what the host says) -> (tokens [steps, sequences], state): one token after another."""

        def run(params: Any, state: DeviceState, said: jax.Array) -> tuple[jax.Array, DeviceState]:
            parts = decode_fields(shape).unpack(said)
            rows = sampling.Rows(**{name: parts[name] for name in sampling.Rows._fields})
            known = parts["tokens"]
            tokens = jnp.where(known < 0, state.last_tokens.at[rows.slot].get(mode="fill", fill_value=0), known)

            def step(done: Any, carry: Any) -> Any:
                tokens, cache, drawn = carry
                x, cache = self._decode(params, state._replace(cache=cache), tokens, parts, done)
                now = rows._replace(number=rows.number + done)
                tokens = sampling.draw(self._logits(params, x), now, form)
                return tokens, cache, drawn.at[done].set(tokens)

            drawn = jnp.zeros((shape.steps, shape.sequences), jnp.int32)
            with overlapping() if self.overlaps(shape) else contextlib.nullcontext():
                tokens, cache, drawn = jax.lax.fori_loop(0, shape.steps, step, (tokens, state.cache, drawn))
            last_tokens = state.last_tokens.at[rows.slot].set(tokens, mode="drop")
            return drawn, DeviceState(cache, last_tokens)

        return run


def copy_pages(model: ModularModelConfig, cache: list[Any], source: jax.Array, target: jax.Array) -> list[Any]:
    """Pages of every pool copied; numbers past the pool copy nothing. States, which no page holds, stay."""

    def copied(pool: jax.Array) -> jax.Array:
        return pool.at[target].set(pool.at[source].get(mode="fill", fill_value=0), mode="drop")

    return [
        {
            (slot := decoder.slot_of(names, number)): layer[slot]
            if model.blocks[name].keeps_state
            else jax.tree.map(copied, layer[slot])
            for number, name in enumerate(names)
        }
        for names, layer in zip(model.period * model.repeats, cache, strict=True)
    ]


def begin_counts(counts: sampling.Counts, slot: jax.Array, prompt: jax.Array, output: jax.Array) -> sampling.Counts:
    """The counts with those of one slot's tokens in place of what its last sequence left."""
    return sampling.Counts(counts.output.at[slot].set(output), counts.prompt.at[slot].set(prompt))
