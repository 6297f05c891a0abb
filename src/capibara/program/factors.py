"""How the dimensions of an operation's arrays belong together.

Each dimension of each operand and result names a factor; dimensions with one factor are split alike. A dimension made
of several (a reshape that merges) names its outer one, which carries the split. -1 is a dimension that cannot be split
here. A reduced factor is in no result: split, it leaves partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WHOLE", "Factors", "elementwise", "whole"]

WHOLE = -1


@dataclass(frozen=True)
class Factors:
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    """Of each factor."""
    reduced: frozenset[int] = frozenset()
    linear: bool = False
    """Of its operands together: a sum of partial operands is the partial result."""
    unknown: bool = False
    """No rule is known: operands are gathered whole."""
    granted: frozenset[int] = frozenset()
    """Factors that keep their mesh axes when two layouts meet, whoever asks for them."""

    def dims(self, side: tuple[int, ...]) -> dict[int, int]:
        """Factor -> dimension of one array."""
        return {factor: dim for dim, factor in reversed(tuple(enumerate(side))) if factor >= 0}


def elementwise(
    shapes: tuple[tuple[int, ...], ...], results: tuple[tuple[int, ...], ...], linear: bool = False
) -> Factors:
    """All arrays have one shape, but for operands that are one long where the others are longer, and scalars."""
    shape = results[0]
    dims = tuple(range(len(shape)))
    sides = tuple(
        tuple(dim if size == shape[dim] else WHOLE for dim, size in enumerate(each)) if each else () for each in shapes
    )
    return Factors(sides, tuple(dims for _ in results), shape, linear=linear)


def whole(shapes: tuple[tuple[int, ...], ...], results: tuple[tuple[int, ...], ...], unknown: bool = True) -> Factors:
    """Nothing can be split."""
    return Factors(
        tuple((WHOLE,) * len(each) for each in shapes), tuple((WHOLE,) * len(each) for each in results), (),
        unknown=unknown,
    )  # fmt: skip
