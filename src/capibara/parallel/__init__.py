"""Meshes, the rules that put logical axes on them, and the context that turns kernel dispatch on.

Names load when they are first used: importing this package does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.parallel.context import active, current, tpu_v4_optimization_context
    from capibara.parallel.mesh import MeshConfig, TPUv4MeshConfigurations, create_tpu_mesh_config
    from capibara.parallel.rules import RULES, partition_spec, with_sharding_constraint

_HOME = {
    "MeshConfig": "mesh",
    "RULES": "rules",
    "TPUv4MeshConfigurations": "mesh",
    "active": "context",
    "create_tpu_mesh_config": "mesh",
    "current": "context",
    "partition_spec": "rules",
    "tpu_v4_optimization_context": "context",
    "with_sharding_constraint": "rules",
}

__all__ = [
    "RULES",
    "MeshConfig",
    "TPUv4MeshConfigurations",
    "active",
    "create_tpu_mesh_config",
    "current",
    "partition_spec",
    "tpu_v4_optimization_context",
    "with_sharding_constraint",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"capibara.parallel.{_HOME[name]}"), name)
    raise AttributeError(f"module 'capibara.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
