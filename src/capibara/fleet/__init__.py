"""Programs on many machines, and what they cost: `capibara.fleet.launch.launch` and the files that it writes for other
engines, cost models, `TpuCostOptimizer`, and scaling with the load (`capibara.fleet.scaling`).

Names load when they are first used: importing this package imports neither jax nor Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.fleet.cost_models import CostModel as CostModel
    from capibara.fleet.cost_models import cost_model as cost_model
    from capibara.fleet.cost_models import cost_model_names as cost_model_names
    from capibara.fleet.jobset import jobset_manifest as jobset_manifest
    from capibara.fleet.operation_cost import estimate_operation_cost as estimate_operation_cost
    from capibara.fleet.scaling.scaler import TpuAutoScaler as TpuAutoScaler
    from capibara.fleet.sky import sky_task as sky_task
    from capibara.fleet.spending import PlannedJob as PlannedJob
    from capibara.fleet.spending import TpuCostOptimizer as TpuCostOptimizer
    from capibara.fleet.spending import planned_job as planned_job

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "cost_models": "CostModel cost_model cost_model_names",
        "jobset": "jobset_manifest",
        "operation_cost": "estimate_operation_cost",
        "scaling.scaler": "TpuAutoScaler",
        "sky": "sky_task",
        "spending": "PlannedJob TpuCostOptimizer planned_job",
    },
)
