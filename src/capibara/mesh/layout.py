"""A layout: where each argument of a program lies on a mesh, and what was chosen of what may be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jax.sharding import PartitionSpec

from capibara.axes import Rules, current_rules
from capibara.mesh.mesh import MeshConfig

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """One way to run a job on a mesh."""

    mesh: MeshConfig
    specs: tuple[PartitionSpec, ...]
    """One for each flat argument (leaves of the arguments' pytree, in jax's order)."""
    rules: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=lambda: MappingProxyType({}))
    """Logical axis -> mesh axes, for the constraints that the program itself writes by logical names."""
    choices: tuple[tuple[str, Any], ...] = ()
    """What was chosen of the job's knobs, ("remat", "full") and so on, in the order of the knobs."""
    host: tuple[int, ...] = ()
    """Flat arguments kept in the host's memory and fetched when used."""
    stages: int = 1
    """Pipeline stages that the layers are cut into."""
    name: str = ""
    """In words: "data 4 x model 8, fully sharded, remat full"."""

    def rules_in_force(self) -> Rules:
        """What a program under this layout is traced with: a name that the layout says nothing of stays whole."""
        return {**dict.fromkeys(current_rules()), **self.rules}
