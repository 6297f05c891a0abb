"""Asking a compiler about the layouts that a model ranked: which ones, in what order, and when to stop.

A compile takes from seconds to minutes, so it is asked about few. A layout that it refuses is out, and its bytes say
how far off the model is for this program: the next one asked about is the best that still fits when the model's bytes
are off by as much, and the smallest where none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capibara.mesh.layout import Layout
from capibara.plan.search.plans import Ranked, Refused, bytes_in_words

__all__ = ["MOST_REFUSALS", "Confirmation", "may_fit"]

MOST_REFUSALS = 4
"""So many layouts may be refused before the verdict is that none of those tried is taken."""


def may_fit(one: Ranked) -> bool:
    """Whether it fits by the model, be it without its margin: then only a compiler can tell."""
    memory = one.estimate.memory
    return memory.fits or memory.may_fit


@dataclass
class Confirmation:
    """What a compiler took and refused so far."""

    confirm: Callable[[Layout], Any]
    ranked: list[Ranked] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    unasked: int = 0
    """Layouts that may fit and that were not asked about, where none that was stands."""
    low: float = 1.0
    """How many times the model's bytes the compiler needed, of what it refused for its size."""

    def ask(self, candidates: Sequence[Ranked], top: int) -> None:
        """Rank `top` of the candidates, which come the best first, each of another kind."""
        waiting = list(candidates)
        while waiting and len(self.ranked) < top and len(self.refused) < MOST_REFUSALS:
            one = waiting.pop(self._next(waiting))
            answer = self._answer(one)
            if isinstance(answer, Refused):
                self.refused.append(answer)
                continue
            if answer.confirmed or (self._believed(one) and one.estimate.memory.fits):
                self.ranked.append(answer)
                # The same arrays in the same places with other knobs are not another layout to choose from.
                waiting = [other for other in waiting if _kind(other) != _kind(one)]
            elif not self.ranked:
                # The compiler answers no more, and by what it said this one does not fit.
                self.unasked += 1
        self.unasked = 0 if self.ranked else self.unasked + len(waiting)

    def _next(self, waiting: Sequence[Ranked]) -> int:
        """The best that fits when the model is as low as it was found to be; else the smallest."""
        good = [number for number, one in enumerate(waiting) if self._believed(one)]
        if good:
            return good[0]
        return min(range(len(waiting)), key=lambda number: (waiting[number].estimate.memory.total, number))

    def _believed(self, one: Ranked) -> bool:
        return self.low * one.estimate.memory.total <= one.estimate.memory.limit

    def _answer(self, one: Ranked) -> Ranked | Refused:
        said = self.confirm(one.layout)
        if said is None:
            return one
        memory, needed = one.estimate.memory, said.total_bytes
        if said.error:
            self._learn(memory.total, needed)
            return Refused(
                one.layout, f"the compiler refused it: {said.error}", one.layout.name, one.estimate, needed, True
            )
        if needed is None:
            return replace(one, confirmed=True)
        if needed > memory.limit:
            self._learn(memory.total, needed)
            text = f"the compiler needs {bytes_in_words(needed, memory.limit)} a chip"
            return Refused(one.layout, text, one.layout.name, one.estimate, needed, True)
        # What the arguments take is known; the rest of the compiler's bytes are what it needs beside them.
        settled = replace(memory, temporaries=needed - memory.arguments, margin=0.0, unsure=0.0)
        return replace(one, estimate=replace(one.estimate, memory=settled), confirmed=True)

    def _learn(self, predicted: float, needed: float | None) -> None:
        if needed is not None and predicted > 0:
            self.low = max(self.low, needed / predicted)


def _kind(one: Ranked) -> tuple[Any, ...]:
    return one.layout.mesh, one.layout.specs
