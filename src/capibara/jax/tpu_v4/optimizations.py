"""The documented optimisations, as far as this version has them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara import to_come
from capibara.jax._information import get_optimization_status
from capibara.parallel.context import tpu_v4_optimization_context

if TYPE_CHECKING:
    from capibara.parallel.model_sharding import create_mesh_sharding
    from capibara.parallel.planner import optimize_sharding_strategy

__all__ = [
    "create_mesh_sharding",
    "get_optimization_status",
    "optimize_sharding_strategy",
    "tpu_v4_optimization_context",
]

to_come.announce(__name__)

# They import jax and the cost model, so they load when they are first used.
_SHARDING = {"create_mesh_sharding": "model_sharding", "optimize_sharding_strategy": "planner"}


def __getattr__(name: str) -> Any:
    if name in _SHARDING:
        return getattr(importlib.import_module(f"capibara.parallel.{_SHARDING[name]}"), name)
    raise to_come.no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
