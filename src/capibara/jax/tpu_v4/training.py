"""The documented training names, as far as this version has them."""

from __future__ import annotations

from typing import Any

from capibara import to_come
from capibara.mesh.training_mesh import create_training_mesh, training_mesh_config

__all__ = ["create_training_mesh", "training_mesh_config"]

to_come.announce(__name__)


def __getattr__(name: str) -> Any:
    raise to_come.no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
