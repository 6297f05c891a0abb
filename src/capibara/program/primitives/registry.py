"""The table of rules: one a primitive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capibara.program.factors import Factors

__all__ = ["RULES", "Made", "Shape", "rule"]

Shape = tuple[int, ...]


@dataclass
class Made:
    """What a rule says of one operation on whole arrays."""

    factors: Factors
    flops: float = 0.0
    matrix: bool = False
    mnk: tuple[tuple[int, ...], ...] = ()
    moved: tuple[float, ...] | None = None
    """How often each operand's and result's bytes move, where it is not once each."""
    note: str = ""
    idle: float = 0.0
    """Of the flops, those of which no result comes: a compiler that multiplies zeros."""


Rule = Callable[[list[Shape], list[Shape], dict[str, Any]], Made]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule: it is given operands' and results' shapes and the parameters."""

    def register(made: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, made))
        return made

    return register
