"""Primitives on random keys: an array of keys is split like any other, and what one key makes is made in parts."""

from __future__ import annotations

import math
from typing import Any

from capibara.program.factors import WHOLE, Factors
from capibara.program.primitives.registry import Made, Shape, rule

__all__: list[str] = []

# Vector instructions for one number of threefry, jax's default.
_EACH = 110


def _keys_lead(shapes: list[Shape], results: list[Shape]) -> Factors:
    """The dimensions of the keys lead on both sides; those of what a key makes, or of its words, follow."""
    new = results[0]
    sides = tuple(
        tuple(dim if dim < len(new) and size == new[dim] else WHOLE for dim, size in enumerate(shape))
        for shape in shapes
    )
    return Factors(sides, (tuple(range(len(new))),), new)


@rule("random_bits", "random_split", "random_fold_in")
def numbers(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    return Made(_keys_lead(shapes, results), float(_EACH * math.prod(results[0])))


@rule("random_wrap", "random_unwrap", "random_clone", "random_seed")
def same_words(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    return Made(_keys_lead(shapes, results))
