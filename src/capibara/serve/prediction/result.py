"""What `capibara plan --serve` says: what fits, what users see, what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from capibara.hardware.topology import Slice
from capibara.prices.table import Price
from capibara.serve.cache_size import CacheSize
from capibara.serve.config import EngineConfig
from capibara.serve.prediction.simulation import Outcome

__all__ = ["ServingMemory", "ServingPlan", "TokenPrice", "TrafficRow"]

MILLION = 1e6


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of one chip of an engine."""

    weights: int
    """As the engine holds them."""
    loaded: int
    """As they were loaded, which stay beside the engine's own."""
    working: int
    """What a step needs beside weights and cache, about."""
    limit: int
    """What programs can have of the chip."""
    cache: int | None
    """Pages and states; None where not one sequence has room."""


@dataclass(frozen=True)
class TokenPrice:
    """Dollars for a million tokens. A step's time is its new tokens', but for what pieces of prompts add to it."""

    kind: str
    """on_demand or spot."""
    usd_per_million_in: float
    usd_per_million_out: float


@dataclass(frozen=True)
class TrafficRow:
    """What so many users see of the whole slice."""

    users: int
    """Of all engines of the slice."""
    engine: Outcome
    """Of one of them."""
    tokens_in_per_second: float
    tokens_out_per_second: float
    costs: tuple[TokenPrice, ...]
    """A way to pay each."""
    within: bool
    """Whether the targets are kept, and hardly anybody waits for a place."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def traffic_row(outcome: Outcome, engines: int, chips: int, prices: tuple[Price, ...], within: bool) -> TrafficRow:
    """The row of the slice, of what one engine does."""
    tokens_in, tokens_out = (
        engines * rate for rate in (outcome.prompt_tokens_per_second, outcome.output_tokens_per_second)
    )

    def cost(price: Price) -> TokenPrice:
        a_second = price.usd * chips / 3600
        return TokenPrice(
            price.kind,
            a_second * outcome.prompt_share / tokens_in * MILLION,
            a_second * (1 - outcome.prompt_share) / tokens_out * MILLION,
        )

    return TrafficRow(
        outcome.users * engines, outcome, tokens_in, tokens_out, tuple(map(cost, prices)), within
    )  # fmt: skip


@dataclass(frozen=True)
class ServingPlan:
    """Serving one model on one slice; all of it predicted."""

    name: str
    where: Slice
    config: EngineConfig
    lengths: str
    """What users ask for, in words."""
    think_s: float
    target_ms: float | None
    """Of the 95th percentile between two tokens."""
    target_first_ms: float | None
    """Of the 95th percentile to the first token."""
    tensor_parallel: int
    """Chips of one engine."""
    memory: ServingMemory
    cache: CacheSize | None
    misfit: str
    """Why it does not fit; empty where it does."""
    best_ms: float | None
    """Between two tokens of one user alone: no setting gives less here."""
    best_range_ms: tuple[float, float] | None
    """The same at the chip's highest and lowest efficiencies."""
    rows: tuple[TrafficRow, ...]
    """By the number of users."""
    held: TrafficRow | None
    """The most users for whom the targets are kept; None where they are kept for nobody."""
    anatomy: tuple[tuple[str, float], ...]
    """Of a step of single tokens for those users: (what, share of its time), the longest first."""
    prices: tuple[Price, ...]
    notes: tuple[str, ...]
    date: str
    planning_seconds: float

    @property
    def fits(self) -> bool:
        return not self.misfit

    @property
    def engines(self) -> int:
        """Side by side on the slice, each with users of its own."""
        return self.where.chips // self.tensor_parallel

    @property
    def possible(self) -> bool:
        """Whether it fits and the targets are kept for somebody."""
        return self.fits and self.held is not None

    @property
    def verdict(self) -> str:
        """Why not, in a sentence; empty where it is possible."""
        if not self.fits:
            return f"It does not fit. {self.misfit}"
        if self.possible:
            return ""
        assert self.best_ms is not None
        if self.target_ms is not None and self.best_ms > self.target_ms:
            return (
                f"A latency of {self.target_ms:g} ms a token is impossible on {self.where.name}: one user alone is "
                f"predicted to wait {self.best_ms:.2f} ms, which is the best it does with this model."
            )
        first = min(row.engine.first_p95_ms for row in self.rows)
        return (
            f"The targets are kept for nobody: one user alone is predicted to wait {self.best_ms:.2f} ms for a token "
            f"and {first:.2f} ms for the first."
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the same figures."""
        config = self.config
        return {
            "name": self.name,
            "on": self.where.name,
            "chip": self.where.chip.name,
            "chips": self.where.chips,
            "predicted": True,
            "fits": self.fits,
            "possible": self.possible,
            "engines": self.engines,
            "tensor_parallel": self.tensor_parallel,
            "lengths": self.lengths,
            "think_s": self.think_s,
            "target_latency_ms": self.target_ms,
            "target_first_ms": self.target_first_ms,
            "best_ms": self.best_ms,
            "best_range_ms": self.best_range_ms,
            "memory": asdict(self.memory),
            "cache": None if self.cache is None else asdict(self.cache),
            "engine": {
                "max_sequences": config.max_sequences,
                "max_batch_tokens": config.max_batch_tokens,
                "page_size": config.page_size,
                "cache_dtype": config.cache_dtype,
                "weights": config.weights,
            },
            "prices": [asdict(price) for price in self.prices],
            "users": 0 if self.held is None else self.held.users,
            "held": None if self.held is None else self.held.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
            "anatomy": [{"part": part, "share": share} for part, share in self.anatomy],
            "notes": list(self.notes),
            "date": self.date,
            "planning_seconds": self.planning_seconds,
        }
