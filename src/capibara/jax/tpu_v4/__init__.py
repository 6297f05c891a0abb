"""The documented TPU v4 names. Each loads when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara import to_come
from capibara.parallel.mesh import MeshConfig, TPUv4MeshConfigurations, create_tpu_mesh_config

if TYPE_CHECKING:
    from capibara.jax.tpu_v4 import backend as backend
    from capibara.jax.tpu_v4 import kernels as kernels
    from capibara.jax.tpu_v4 import optimizations as optimizations
    from capibara.jax.tpu_v4 import training as training

_MODULES = ("backend", "kernels", "optimizations", "training")

__all__ = ["MeshConfig", "TPUv4MeshConfigurations", "create_tpu_mesh_config", *_MODULES]

to_come.announce(__name__)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise to_come.no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
