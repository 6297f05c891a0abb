"""The documented cost names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.fleet.operation_cost import estimate_operation_cost as estimate_operation_cost
    from capibara.fleet.spending import TpuCostOptimizer as TpuCostOptimizer

__all__, __getattr__, __dir__ = exports(
    __name__,
    {"capibara.fleet.operation_cost": "estimate_operation_cost", "capibara.fleet.spending": "TpuCostOptimizer"},
)
