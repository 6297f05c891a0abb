"""What a function does after its loop over layers, cut where its rows meet.

Up to there it runs a microbatch at a time. Sums over rows are added up over the microbatches, and what is made of them,
a division by the number of unmasked tokens for one, is done once: so the result is the function's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from capibara.errors import rule_error
from capibara.parallel.pipelines.microbatch_twin import Twins
from capibara.parallel.pipelines.stages import wide

__all__ = ["AfterLayers"]


@dataclass(frozen=True)
class _Join:
    """How the parts of a reduction over rows become that of all of them."""

    two: Callable[[Any, Any], Any]
    every: Callable[..., Any]
    start: Callable[[Any], Any]
    """What changes nothing, for a type."""


_SUM = _Join(jnp.add, jnp.sum, lambda dtype: 0)
_JOINS = {
    "reduce_sum": _SUM,
    "dot_general": _SUM,
    "reduce_max": _Join(jnp.maximum, jnp.max, lambda dtype: _ends(dtype)[0]),
    "reduce_min": _Join(jnp.minimum, jnp.min, lambda dtype: _ends(dtype)[1]),
    "reduce_and": _Join(jnp.logical_and, jnp.all, lambda dtype: True),
    "reduce_or": _Join(jnp.logical_or, jnp.any, lambda dtype: False),
}


def _ends(dtype: Any) -> tuple[Any, Any]:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    return (False, True) if dtype == jnp.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)


class AfterLayers:
    """Which values each microbatch makes, and which are made of them once.

    With `by_hand`, a result without rows is one that each microbatch makes.
    """

    def __init__(self, twins: Twins, by_hand: bool) -> None:
        layers = self.layers = twins.part
        self.twins = twins
        self.places = [twins.rows(atom) for atom in layers.outputs]
        """Of each result, the dimension of its rows; None where it has none."""
        of_layers = set(layers.made_of([*layers.results, *layers.extras]))
        _, stacks = layers.needed(layers.stacked)
        of_stacks = set(layers.made_of(stacks))
        ends = {*layers.results, *layers.extras}
        known = [
            var
            for equation in layers.needed(layers.outputs, ends)[0]
            for var in equation.outvars
            if var not in of_layers
            and (not by_hand and twins.rows(var) is None if layers.depends(var) else var in of_stacks)
        ]
        # What is made of the stacked parameters is made outside, where none is whole; what is made of all rows before
        # the layers is made of all of them.
        given = [*layers.results, *layers.extras, *known]
        self.meets: dict[Any, _Join] = {}
        """Values that rows meet in, and how those of two microbatches are joined."""
        if not by_hand:
            self._find_meets(of_layers, given)
        self.made = [atom for atom, place in zip(layers.outputs, self.places, strict=True) if place is not None]
        """Results with rows."""
        self.numbers = [atom for atom, place in zip(layers.outputs, self.places, strict=True) if place is None]
        self.joined = [*(self.numbers if by_hand else self.meets)]
        """Of each microbatch, what is joined with that of the others."""
        kept, read = layers.needed([*self.made, *self.joined], given)
        if not by_hand:
            twins.check_equations_do_not_count(kept)
        batch = {var for var in layers.arguments if layers.depends(var)}
        self.fixed = [var for var in read if var not in ends and var not in batch]
        """What every microbatch reads: parameters, and what is made of all rows."""
        self.rows = [n for n, var in enumerate(layers.arguments) if var in read and var in batch]
        """Flat arguments of the batch."""

    def nothing(self, stages: int) -> list[Any]:
        """What `joined` is of no microbatch, for each stage."""
        kinds = [jax.eval_shape(wide, atom.aval) for atom in self.joined]
        pairs = zip(self._how(), kinds, strict=True)
        return [jnp.full((stages, *kind.shape), how.start(kind.dtype), kind.dtype) for how, kind in pairs]

    def join(self, some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """`joined` of two sets of microbatches."""
        return [how.two(*pair) for how, *pair in zip(self._how(), some, others, strict=True)]

    def join_stages(self, totals: Sequence[Any]) -> list[Any]:
        """`joined` of all microbatches, from [stages, ...], in its own types."""
        kinds = [atom.aval.dtype for atom in self.joined]
        return [how.every(x, axis=0).astype(kind) for how, x, kind in zip(self._how(), totals, kinds, strict=True)]

    def _how(self) -> list[_Join]:
        return list(self.meets.values()) if self.meets else [_SUM] * len(self.joined)

    def _find_meets(self, of_layers: set[Any], given: list[Any]) -> None:
        layers, rows = self.layers, self.twins.rows
        totals: set[Any] = set()
        for equation in layers.needed(layers.outputs, given)[0]:
            ins = [atom for atom in equation.invars if not isinstance(atom, core.Literal)]
            outs = [var for var in equation.outvars if var in of_layers]
            if not outs:
                continue
            name = equation.primitive.name
            late = any(atom in totals for atom in ins)
            with_rows = any(rows(atom) is not None for atom in ins)
            if late and (with_rows or any(rows(var) is not None for var in outs)):
                raise _refused(f"{name}, which brings back to the rows what was made of all of them")
            if late:
                totals.update(outs)
            elif with_rows and any(rows(var) is None for var in outs):
                if name not in _JOINS:
                    raise _refused(f"{name}, in which rows meet and which is no sum, product, maximum or minimum")
                self.meets.update(dict.fromkeys(outs, _JOINS[name]))
                totals.update(outs)


def _refused(got: str) -> ValueError:
    return rule_error(
        "After its layers a function that runs as a pipeline makes numbers of rows by sums over them, once",
        got,
        'take the loss of each row alone, or say how the microbatches\' results become one: combine="mean" or "sum"',
    )
