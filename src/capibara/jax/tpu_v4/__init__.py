"""The documented TPU v4 names. Each loads when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara.parallel.mesh import MeshConfig, TPUv4MeshConfigurations, create_tpu_mesh_config

if TYPE_CHECKING:
    from capibara.jax.tpu_v4 import backend as backend
    from capibara.jax.tpu_v4 import kernels as kernels
    from capibara.jax.tpu_v4 import optimizations as optimizations
    from capibara.jax.tpu_v4 import training as training

_MODULES = ("backend", "kernels", "optimizations", "training")
_PLANNED = (
    "autoscaling",
    "cost",
    "diagnostics",
    "inference",
    "monitoring",
    "recovery",
)

__all__ = ["MeshConfig", "TPUv4MeshConfigurations", "create_tpu_mesh_config", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _PLANNED:
        raise AttributeError(f"{__name__}.{name} is not implemented yet in this version")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
