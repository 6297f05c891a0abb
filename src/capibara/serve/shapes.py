"""The few shapes that steps are compiled for: a step runs in the smallest that holds it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from capibara.serve.config import EngineConfig
from capibara.serve.programs import Shape
from capibara.serve.scheduler import StepPlan

__all__ = ["StepShapes", "ladder"]

_FEW_ROWS = 16
"""Prompts mostly come one by one: for so many sequences or fewer the head runs on so many rows and no more."""


def ladder(most: int, *, first: int = 1, by: int = 2) -> tuple[int, ...]:
    """Sizes up to `most`, each `by` times the one before.

    >>> ladder(200, first=16, by=4)
    (16, 64, 200)
    """
    sizes = []
    size = first
    while size < most:
        sizes.append(size)
        size *= by
    return (*sizes, most)


class StepShapes:
    """The shapes of an engine's steps."""

    def __init__(self, config: EngineConfig, max_pages: int) -> None:
        self._config = config
        drafted = 1 + config.speculative_tokens
        self._rows = drafted
        most = config.max_sequences
        self._one_shape = config.batch_invariant
        self.decode_steps = config.decode_steps
        """Of the programs that draw several tokens in a row."""
        # Padding costs little while weights are what is read: steps of four at first, of two where logits count.
        few = ladder(min(most, _FEW_ROWS), by=4)
        self.sequences = (*few, *ladder(most, first=2 * _FEW_ROWS)) if most > _FEW_ROWS else few
        self.pages = ladder(max_pages, first=min(16, max_pages), by=4)
        self.tokens = ladder(config.max_batch_tokens, first=min(64, config.max_batch_tokens))
        self.mixed_sequences = (_FEW_ROWS, most) if most > _FEW_ROWS else (most,)

    def of(self, plan: StepPlan) -> Shape:
        """What a planned step runs in."""
        # With drafts every step is ragged, also one that happens to have none.
        if plan.decodes_only and self._rows == 1:
            pages = max([len(chunk.sequence.pages.pages) for chunk in plan.chunks])
            return self.decode(len(plan.chunks), pages, plan.steps)
        return self.ragged(plan.tokens, len(plan.chunks))

    def decode(self, sequences: int, pages: int, steps: int = 1) -> Shape:
        """One token a sequence."""
        if self._one_shape:
            return self._whole()
        size = _at_least(self.sequences, sequences)
        return Shape(size, size, _at_least(self.pages, pages), size, steps)

    def ragged(self, tokens: int, sequences: int) -> Shape:
        """Any number of tokens of each sequence."""
        if self._one_shape:
            return self._whole()
        size = _at_least(self.mixed_sequences, sequences)
        return self._ragged(_at_least(self.tokens, tokens), size)

    def _ragged(self, tokens: int, sequences: int) -> Shape:
        # A ragged step is always of a length's own kind, also where each sequence happens to have one token.
        return Shape(max(tokens, sequences + 1), sequences, self.pages[-1], sequences * self._rows)

    def _whole(self) -> Shape:
        return self._ragged(self._config.max_batch_tokens, self._config.max_sequences)

    def all(self) -> Iterator[Shape]:
        """Every shape that a step may have, those first that most requests meet."""
        if self._one_shape:
            yield self._whole()
            return
        yield from dict.fromkeys(self._ragged(n, size) for size in self.mixed_sequences for n in self.tokens)
        if self._rows > 1:  # with drafts every step is ragged
            return
        for steps in dict.fromkeys((1, self.decode_steps)):
            yield from (Shape(n, n, pages, n, steps) for pages in self.pages for n in self.sequences)


def _at_least(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]
