"""Mesh presets, the optimisation context and sharding by name, beside everything of jax's own `_src.core`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax._src.core import *  # noqa: F403

from capibara.dropin import alias as _alias
from capibara.mesh.context import tpu_v4_optimization_context as tpu_v4_optimization_context
from capibara.mesh.mesh import MeshConfig as MeshConfig
from capibara.mesh.mesh import TPUv4MeshConfigurations as TPUv4MeshConfigurations
from capibara.mesh.mesh import create_tpu_mesh_config as create_tpu_mesh_config
from capibara.mesh.rules import with_sharding_constraint as with_sharding_constraint

_OWN = (
    "MeshConfig",
    "TPUv4MeshConfigurations",
    "create_tpu_mesh_config",
    "tpu_v4_optimization_context",
    "with_sharding_constraint",
)
_alias.adopt(__name__, own=_OWN)
