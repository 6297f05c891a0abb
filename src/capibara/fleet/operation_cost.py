"""What one operation costs: the chips that it needs, their price, its time."""

from __future__ import annotations

import math
from pathlib import Path

from capibara.errors import rule_error
from capibara.fleet import cost_models
from capibara.fleet.cost_models import CostModel
from capibara.hardware.facts import GiB
from capibara.prices.table import PriceTable

__all__ = ["chips_needed", "estimate_operation_cost"]


def chips_needed(
    operation_flops: float,
    memory_gb: float,
    duration_seconds: float,
    tpu_utilization: float,
    model: CostModel,
) -> int:
    """Chips whose memory holds the operation and whose bfloat16 peak, used so far, does it in that time."""
    numbers = {"operation_flops": operation_flops, "memory_gb": memory_gb, "duration_seconds": duration_seconds}
    for name, value in numbers.items():
        if not 0 <= value < math.inf or (name == "duration_seconds" and value == 0):
            least = "above 0" if name == "duration_seconds" else "from 0 up"
            raise rule_error(f"{name} is a number {least}", repr(value), "give what the operation takes")
    if not 0 < tpu_utilization <= 1:
        raise rule_error("tpu_utilization is a share above 0 and up to 1", repr(tpu_utilization), "use 0.8 for 80 %")
    rate = model.chip.peak_flops("bfloat16") * tpu_utilization * duration_seconds
    by_memory = math.ceil(memory_gb * GiB / model.chip.capacity_bytes)
    return max(1, by_memory, math.ceil(operation_flops / rate))


def estimate_operation_cost(
    operation_flops: float,
    memory_gb: float,
    duration_seconds: float,
    tpu_utilization: float,
    *,
    cost_model: str | CostModel = "tpu_v4_pricing",
    pricing: PriceTable | str | Path | None = None,
    region: str | None = None,
) -> float:
    """Dollars: chips needed x price x time.

    Args:
      operation_flops: of the whole operation.
      memory_gb: GiB that it holds at once, over all chips.
      duration_seconds: in which it is to be done, and for which the chips are paid.
      tpu_utilization: share of a chip's bfloat16 peak that it reaches.
      cost_model: whose price: "tpu_v4_pricing" (on demand), "tpu_v4_spot" and so on.
      pricing: a table, or a TOML file laid over the shipped one.
      region: the chip's first in the table by default.

    Examples:
        >>> round(estimate_operation_cost(1e12, 16.0, 10.0, 0.8), 4)
        0.0089
    """
    model = cost_models.cost_model(cost_model, pricing=pricing, region=region)
    chips = chips_needed(operation_flops, memory_gb, duration_seconds, tpu_utilization, model)
    return chips * model.price().usd * duration_seconds / 3600
