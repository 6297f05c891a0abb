"""What the planner knows of a primitive: how its dimensions belong together, what it computes, what it moves."""

from __future__ import annotations

import math
from typing import Any

from capibara.program.factors import Factors, elementwise, whole

# These files register their rules.
from capibara.program.primitives import contractions, movement, randomness, reductions  # noqa: F401
from capibara.program.primitives.elementwise import FLOPS, LINEAR
from capibara.program.primitives.registry import RULES, Made, Shape

__all__ = ["made_of"]


def made_of(name: str, shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    """The rule's answer; a primitive without one is whole on every chip, and says so."""
    found = RULES.get(name)
    if found is not None:
        return found(shapes, results, params)
    elements = max((math.prod(shape) for shape in results), default=0)
    alike = results and all(shape == results[0] for shape in results)
    if name in FLOPS and alike and all(_fits(shape, results[0]) for shape in shapes):
        factors = elementwise(tuple(shapes), tuple(results), name in LINEAR)
        return Made(factors, float(FLOPS[name] * elements))
    if name == "optimization_barrier":
        return Made(_pairs(shapes))
    note = "" if elements <= 1 else f"{name}: no rule is known, so every chip computes the whole of it"
    return Made(whole(tuple(shapes), tuple(results)), float(FLOPS.get(name, 1) * elements), note=note)


def _fits(shape: Shape, result: Shape) -> bool:
    if not shape:
        return True
    return len(shape) == len(result) and all(a in (1, b) for a, b in zip(shape, result, strict=True))


def _pairs(shapes: list[Shape]) -> Factors:
    sides: list[tuple[int, ...]] = []
    lengths: list[int] = []
    for shape in shapes:
        sides.append(tuple(range(len(lengths), len(lengths) + len(shape))))
        lengths += shape
    return Factors(tuple(sides), tuple(sides), tuple(lengths))
