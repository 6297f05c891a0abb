"""The documented TPU v4 names. Each loads when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara import to_come
from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.jax.tpu_v4 import autoscaling as autoscaling
    from capibara.jax.tpu_v4 import backend as backend
    from capibara.jax.tpu_v4 import cost as cost
    from capibara.jax.tpu_v4 import diagnostics as diagnostics
    from capibara.jax.tpu_v4 import inference as inference
    from capibara.jax.tpu_v4 import kernels as kernels
    from capibara.jax.tpu_v4 import monitoring as monitoring
    from capibara.jax.tpu_v4 import optimizations as optimizations
    from capibara.jax.tpu_v4 import recovery as recovery
    from capibara.jax.tpu_v4 import training as training
    from capibara.mesh.mesh import MeshConfig as MeshConfig
    from capibara.mesh.mesh import TPUv4MeshConfigurations as TPUv4MeshConfigurations
    from capibara.mesh.mesh import create_tpu_mesh_config as create_tpu_mesh_config

to_come.announce(__name__)

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "capibara.mesh.mesh": "MeshConfig TPUv4MeshConfigurations create_tpu_mesh_config",
    },
    modules=(
        "autoscaling",
        "backend",
        "cost",
        "diagnostics",
        "inference",
        "kernels",
        "monitoring",
        "optimizations",
        "recovery",
        "training",
    ),
    missing=to_come.no_attribute,
)
