"""Meshes, the rules that put logical axes on them, and the context that turns kernel dispatch on.

Names load when they are first used: importing this package does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.parallel.context import active, current, tpu_v4_optimization_context
    from capibara.parallel.job import Job, program_job
    from capibara.parallel.layout import Layout
    from capibara.parallel.mesh import MeshConfig, TPUv4MeshConfigurations, create_tpu_mesh_config
    from capibara.parallel.mesh_wiring import AxisWiring, wiring
    from capibara.parallel.model_sharding import MeshSharding, create_mesh_sharding
    from capibara.parallel.pipeline_program import pipelined
    from capibara.parallel.pipeline_schedule import Schedule
    from capibara.parallel.pipeline_stages import pipeline
    from capibara.parallel.planner import ShardingStrategy, optimize_sharding_strategy
    from capibara.parallel.plans import Plans
    from capibara.parallel.remat import checkpoint_scans
    from capibara.parallel.rule_check import RuleCheck, check_rules
    from capibara.parallel.rules import (
        RULES,
        current_rules,
        logical_sharding,
        partition_spec,
        shard_params,
        use_rules,
        with_sharding_constraint,
    )
    from capibara.parallel.tpu_config import ScalingConfig, TPUConfig
    from capibara.parallel.training_mesh import create_training_mesh, training_mesh_config
    from capibara.parallel.training_step import training_job
    from capibara.parallel.validate import validate_sharding

_HOME = {
    "AxisWiring": "mesh_wiring",
    "Job": "job",
    "Layout": "layout",
    "MeshConfig": "mesh",
    "MeshSharding": "model_sharding",
    "Plans": "plans",
    "RULES": "rules",
    "RuleCheck": "rule_check",
    "ScalingConfig": "tpu_config",
    "Schedule": "pipeline_schedule",
    "ShardingStrategy": "planner",
    "TPUConfig": "tpu_config",
    "TPUv4MeshConfigurations": "mesh",
    "active": "context",
    "check_rules": "rule_check",
    "checkpoint_scans": "remat",
    "create_mesh_sharding": "model_sharding",
    "create_tpu_mesh_config": "mesh",
    "create_training_mesh": "training_mesh",
    "current": "context",
    "current_rules": "rules",
    "logical_sharding": "rules",
    "optimize_sharding_strategy": "planner",
    "partition_spec": "rules",
    "pipeline": "pipeline_stages",
    "pipelined": "pipeline_program",
    "program_job": "job",
    "shard_params": "rules",
    "tpu_v4_optimization_context": "context",
    "training_job": "training_step",
    "training_mesh_config": "training_mesh",
    "use_rules": "rules",
    "validate_sharding": "validate",
    "wiring": "mesh_wiring",
    "with_sharding_constraint": "rules",
}

__all__ = [
    "RULES",
    "AxisWiring",
    "Job",
    "Layout",
    "MeshConfig",
    "MeshSharding",
    "Plans",
    "RuleCheck",
    "ScalingConfig",
    "Schedule",
    "ShardingStrategy",
    "TPUConfig",
    "TPUv4MeshConfigurations",
    "active",
    "check_rules",
    "checkpoint_scans",
    "create_mesh_sharding",
    "create_tpu_mesh_config",
    "create_training_mesh",
    "current",
    "current_rules",
    "logical_sharding",
    "optimize_sharding_strategy",
    "partition_spec",
    "pipeline",
    "pipelined",
    "program_job",
    "shard_params",
    "tpu_v4_optimization_context",
    "training_job",
    "training_mesh_config",
    "use_rules",
    "validate_sharding",
    "wiring",
    "with_sharding_constraint",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"capibara.parallel.{_HOME[name]}"), name)
    raise AttributeError(f"module 'capibara.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
