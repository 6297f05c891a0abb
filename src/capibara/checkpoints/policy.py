"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from capibara.errors import rule_error, unknown_name

__all__ = ["Keep"]


class _Saved(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Keep:
    """The newest always stays; beside it what any of these rules keeps.

    Examples:
        >>> Keep(last=2, every=1000, best=1, metric="loss").last
        2
    """

    last: int = 3
    """So many of the newest."""
    every: int | None = None
    """Steps that are multiples of it stay for ever."""
    best: int = 0
    """So many of the best by `metric`, of those that were saved with it."""
    metric: str = "loss"
    mode: str = "min"
    """Whether the least ("min") or the greatest ("max") is best."""

    def __post_init__(self) -> None:
        for name, low in (("last", 1), ("every", 1), ("best", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise rule_error(f"{name} is a whole number from {low} up", repr(value), f"use {low} or more")
        if self.mode not in ("min", "max"):
            raise unknown_name("mode", self.mode, ("min", "max"))

    def kept(self, saved: Sequence[_Saved]) -> set[int]:
        """The serials that stay."""
        newest_first = sorted(saved, key=lambda entry: entry.serial, reverse=True)
        stay = {entry.serial for entry in newest_first[: self.last]}
        if self.every:
            stay |= {entry.serial for entry in saved if entry.step % self.every == 0}
        sign = 1 if self.mode == "min" else -1
        measured = [entry for entry in newest_first if math.isfinite(entry.metrics.get(self.metric, math.nan))]
        ranked = sorted(measured, key=lambda entry: sign * entry.metrics[self.metric])
        return stay | {entry.serial for entry in ranked[: self.best]}
