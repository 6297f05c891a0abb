"""Meshes, the rules that put logical axes on them, and the context that turns kernel dispatch on.

Names load when they are first used: importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.mesh.axis_wiring import AxisWiring as AxisWiring
    from capibara.mesh.axis_wiring import wiring as wiring
    from capibara.mesh.context import active as active
    from capibara.mesh.context import current as current
    from capibara.mesh.context import tpu_v4_optimization_context as tpu_v4_optimization_context
    from capibara.mesh.layout import Layout as Layout
    from capibara.mesh.mesh import MeshConfig as MeshConfig
    from capibara.mesh.mesh import TPUv4MeshConfigurations as TPUv4MeshConfigurations
    from capibara.mesh.mesh import create_tpu_mesh_config as create_tpu_mesh_config
    from capibara.mesh.rule_check import RuleCheck as RuleCheck
    from capibara.mesh.rule_check import check_rules as check_rules
    from capibara.mesh.rules import RULES as RULES
    from capibara.mesh.rules import current_rules as current_rules
    from capibara.mesh.rules import logical_sharding as logical_sharding
    from capibara.mesh.rules import partition_spec as partition_spec
    from capibara.mesh.rules import shard_params as shard_params
    from capibara.mesh.rules import use_rules as use_rules
    from capibara.mesh.rules import with_sharding_constraint as with_sharding_constraint
    from capibara.mesh.training_mesh import create_training_mesh as create_training_mesh
    from capibara.mesh.training_mesh import training_mesh_config as training_mesh_config
    from capibara.mesh.validate import validate_sharding as validate_sharding

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "axis_wiring": "AxisWiring wiring",
        "context": "active current tpu_v4_optimization_context",
        "layout": "Layout",
        "mesh": "MeshConfig TPUv4MeshConfigurations create_tpu_mesh_config",
        "rule_check": "RuleCheck check_rules",
        "rules": (
            "RULES current_rules logical_sharding partition_spec shard_params use_rules with_sharding_constraint"
        ),
        "training_mesh": "create_training_mesh training_mesh_config",
        "validate": "validate_sharding",
    },
)
