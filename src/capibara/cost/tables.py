"""Tables: what one product of activations leaves for another, with only elementwise work and sums between them.

The scores of attention that is not one kernel are the case in point: queries times keys, a softmax, times values, and
the same backward. Nobody's weights are in either product, so a table grows with the square of the sequence, and it is
what the memory of such a program is made of. How many of them exist at once is the compiler's choice, program by
program: whether the exponentials are stored beside the scores or computed again, whether the softmax is stored until
its gradient is, whether that gradient is stored at all. So tables are known by what they are, and the rest of the model
gives a range where they are many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capibara.cost.fusion import LoopPass, Pass
from capibara.cost.kinds import CHEAP, DEAR
from capibara.program.chip import ChipProgram

__all__ = ["Tables", "tables"]


_AGAIN = (CHEAP | DEAR) - {"convert_element_type"}
# A table is more than so many times what it is made of: queries and keys grow as the sequence, and it as the square.
_LARGER = 2
# A reduction of a table, a row's sum, is none: this much of the table's numbers are.
_SHARE = 1 / 8


@dataclass(frozen=True)
class Tables:
    """The tables of a program, of all its levels."""

    all: frozenset[int]
    source: Mapping[int, int]
    """Those that are one other table with elementwise work done to it -> that table. Mostly they are not stored: the
    compiler keeps what the product wrote, in its type, and does the work again wherever the result is read. A softmax
    that was converted for the next product is stored all the same."""


def tables(program: ChipProgram, passes: Sequence[Pass | LoopPass], same: Mapping[int, int]) -> Tables:
    """The buffers that are tables."""
    finder = _Finder({id: math.prod(buffer.shape) for id, buffer in program.buffers.items()})
    finder.level(passes, same, set())
    source = {one: of for one, of in finder.source.items() if one in finder.found and of in finder.found}
    return Tables(frozenset(finder.found), source)


class _Finder:
    def __init__(self, numbers: Mapping[int, int]) -> None:
        self.numbers = numbers
        self.found: set[int] = set()
        self.source: dict[int, int] = {}

    def level(self, passes: Sequence[Pass | LoopPass], same: Mapping[int, int], computed: set[int]) -> None:
        """Add this level's tables. `computed` are buffers that a product had a part in: activations, no weights."""
        made: dict[int, int] = {}
        for one in passes:
            if isinstance(one, LoopPass):
                self.level(one.body, one.same, _inside(one, computed))
                computed.update(one.writes)
                continue
            if one.kind == "matrix":
                least = self._least(one, same, computed)
            else:
                least = max((made[read] for read in one.reads if read in made), default=0)
            if least and one.kind == "vector":
                self._derived(one, made)
            if least:
                made.update({written: least for written in one.writes if self.numbers[written] >= _SHARE * least})
            if one.kind in ("matrix", "op") or any(read in computed for read in one.reads):
                computed.update(one.writes)
        # Of those, what a product reads in the end: what is only added up and leaves is no table.
        wanted: set[int] = set()
        for one in reversed(passes):
            if isinstance(one, Pass) and (one.kind == "matrix" or any(written in wanted for written in one.writes)):
                wanted.update(one.reads)
        self.found.update(made.keys() & wanted)

    def _derived(self, one: Pass, made: Mapping[int, int]) -> None:
        """Note what a pass writes where it reads one table and beside it nothing of its size."""
        of = [read for read in one.reads if read in made]
        least = made[of[0]]
        large = [read for read in one.reads if self.numbers[read] >= _SHARE * least]
        if large == of and len(of) == 1 and one.steps[-1].primitive in _AGAIN:
            self.source.update(dict.fromkeys(one.writes, of[0]))

    def _least(self, one: Pass, same: Mapping[int, int], computed: set[int]) -> int:
        """Numbers of a product's result, where no weight enters it and it is far larger than both operands; else 0."""
        known = set(computed)
        for step in one.steps:
            reads = [same.get(read, read) for read in step.reads]
            if step.matrix:
                result = self.numbers[step.writes[0]]
                larger = all(result > _LARGER * self.numbers[read] for read in reads)
                return result if larger and all(read in known for read in reads) else 0
            # What a product's prologue makes of an activation is one.
            if any(read in known for read in reads):
                known.update(step.writes)
        return 0


def _inside(one: LoopPass, computed: set[int]) -> set[int]:
    """What is an activation inside of a loop: what it carries, and slices of activations from outside."""
    loop = one.loop
    found = {body for _, body in loop.carried[0::2]} | {body for outer, body in loop.sliced if outer in computed}
    return found | {read for read in loop.reads if read in computed}
