"""Sensors for tests: they say what they are told to, die, lie, or block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from capibara.observe.sensors import Reading


class StandIn:
    """A sensor whose answer is a function's."""

    def __init__(
        self, answer: Callable[[], Sequence[Reading]], name: str = "stand-in", accelerators: bool = True
    ) -> None:
        self.name, self.accelerators = name, accelerators
        self.answer = answer
        self.closed = 0

    def read(self) -> Sequence[Reading]:
        return self.answer()

    def close(self) -> None:
        self.closed += 1


class Chips(StandIn):
    """Chips of one kind, all with the same figures, which a test changes as it likes."""

    def __init__(self, count: int = 2, chip: str | None = "TPU v4", kind: Any = "tpu", **figures: float) -> None:
        self.figures: dict[str, float] = figures or {"utilization": 0.8, "memory_used": 8e9, "memory_total": 32e9}
        self.count, self.chip, self.kind = count, chip, kind
        super().__init__(self._readings, name=f"{kind}s")

    def _readings(self) -> list[Reading]:
        return [Reading(f"{self.kind}:{i}", self.kind, dict(self.figures), self.chip) for i in range(self.count)]


class Blocked(StandIn):
    """Answers when it is let go of."""

    def __init__(self, name: str = "blocked") -> None:
        self.let_go = threading.Event()
        self.entered = threading.Event()
        super().__init__(self._wait, name)

    def _wait(self) -> list[Reading]:
        self.entered.set()
        self.let_go.wait(60)
        return [Reading("tpu:9", "tpu", {"utilization": 0.5})]


class Clock:
    """Time that goes when a test says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds
