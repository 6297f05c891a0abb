"""Does it fit, how fast, what does it cost: before anything is rented. `capibara.plan.plan(fn, args, on="v4-32")`.

Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.plan.api import plan as plan
    from capibara.plan.compiled import LEVELS as LEVELS
    from capibara.plan.compiled import Compiled as Compiled
    from capibara.plan.compiled import compile_layout as compile_layout
    from capibara.plan.compiled import partition_layout as partition_layout
    from capibara.plan.measured import calibrate as calibrate
    from capibara.plan.measured import measurements as measurements
    from capibara.plan.result import Candidate as Candidate
    from capibara.plan.result import Plan as Plan
    from capibara.plan.search.plans import Plans as Plans
    from capibara.plan.sharding.mesh_sharding import MeshSharding as MeshSharding
    from capibara.plan.sharding.mesh_sharding import create_mesh_sharding as create_mesh_sharding
    from capibara.plan.sharding.strategy import ShardingStrategy as ShardingStrategy
    from capibara.plan.sharding.strategy import optimize_sharding_strategy as optimize_sharding_strategy
    from capibara.plan.target import Recipe as Recipe
    from capibara.plan.target import TargetError as TargetError
    from capibara.plan.target import load_job as load_job

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "api": "plan",
        "compiled": "LEVELS Compiled compile_layout partition_layout",
        "measured": "calibrate measurements",
        "result": "Candidate Plan",
        "search.plans": "Plans",
        "sharding.mesh_sharding": "MeshSharding create_mesh_sharding",
        "sharding.strategy": "ShardingStrategy optimize_sharding_strategy",
        "target": "Recipe TargetError load_job",
    },
)
