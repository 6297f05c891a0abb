"""The documented training names, as far as this version has them."""

from __future__ import annotations

from typing import Any

from capibara.parallel.training_mesh import create_training_mesh, training_mesh_config

__all__ = ["create_training_mesh", "training_mesh_config"]


def __getattr__(name: str) -> Any:
    if name == "TpuDistributedTrainer":
        raise AttributeError(f"{__name__}.{name} is not implemented yet in this version")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
