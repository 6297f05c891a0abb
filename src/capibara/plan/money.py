"""What a predicted step costs: dollars an hour and for a billion tokens, on demand and on spot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from capibara.cost.result import Estimate
from capibara.hardware.topology import Slice
from capibara.plan.place import hosts_of
from capibara.prices.spot import SpotAssumptions, SpotRun, spot_run
from capibara.prices.table import KINDS, Price, PriceTable

__all__ = ["Bill", "bills"]

BILLION = 1e9


@dataclass(frozen=True)
class Bill:
    """One way to pay for the run."""

    price: Price
    usd_per_hour: float
    usd_per_billion_tokens: float | None
    """None for a job whose tokens are not known."""
    low: float | None
    high: float | None
    """The same for the two ends of the predicted time of a step."""
    spot: SpotRun | None = None
    """What the interruptions take, for a price of spot chips; the dollars above include it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bills(
    estimate: Estimate,
    where: Slice,
    tokens: int | None,
    state_bytes: float,
    table: PriceTable,
    *,
    region: str | None = None,
    kinds: tuple[str, ...] = KINDS,
    assumptions: SpotAssumptions | None = None,
) -> tuple[Bill, ...]:
    """A bill for each kind of price that the table has. `state_bytes` is what a checkpoint holds, of the whole job."""
    made = []
    for kind in kinds:
        price = table.find(where.chip, region, kind)
        if price is None:
            continue
        run = spot_run(state_bytes, hosts_of(where), assumptions) if kind == "spot" else None
        hourly = price.usd * where.chips
        kept = 1.0 if run is None else run.efficiency
        mid, low, high = (
            _per_billion(hourly, time, tokens, kept) for time in (estimate.seconds, estimate.low, estimate.high)
        )
        made.append(Bill(price, hourly, mid, low, high, run))
    return tuple(made)


def _per_billion(usd_per_hour: float, seconds: float, tokens: int | None, kept: float) -> float | None:
    if not tokens:
        return None
    if kept <= 0:
        return float("inf")
    return usd_per_hour / 3600 * seconds / kept * BILLION / tokens
