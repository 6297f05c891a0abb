"""Mesh axes that a planner knows, and the meshes of so many chips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from capibara.errors import rule_error, unknown_name
from capibara.mesh.mesh import MeshConfig

__all__ = ["AXES", "divisors", "mesh_axes", "mesh_config"]

AXES = ("pipeline", "data", "expert", "sequence", "model")
"""Mesh axes from the outermost in: the innermost has the shortest links, and a model axis talks the most."""


def mesh_axes(mesh: MeshConfig | Mapping[str, int] | None, chips: int) -> tuple[tuple[str, int], ...] | None:
    """The mesh that a caller gave, checked against the chips."""
    if mesh is None:
        return None
    given = mesh.axes if isinstance(mesh, MeshConfig) else dict(mesh)
    for name in given:
        if name not in AXES:
            raise unknown_name("mesh axis", name, AXES)
    sizes = math.prod(given.values())
    if sizes != chips:
        text = " x ".join(f"{name} {size}" for name, size in given.items())
        raise rule_error(
            f"A mesh's sizes multiply to the chips, {chips}", f"{text} = {sizes}", _nearest_mesh(given, chips)
        )
    return tuple((name, size) for name, size in given.items() if size > 1)


def mesh_config(axes: Mapping[str, int]) -> MeshConfig:
    """The mesh of these axes; data and model are always there, so that a spec may name them."""
    whole = {**({} if "data" in axes else {"data": 1}), **axes, **({} if "model" in axes else {"model": 1})}
    return MeshConfig(tuple(whole.values()), tuple(whole))


def _nearest_mesh(given: Mapping[str, int], chips: int) -> str:
    names = list(given)
    options = [
        sizes for sizes in itertools.product(*(divisors(chips, chips) for _ in names)) if math.prod(sizes) == chips
    ]
    if not options:
        return f"make the sizes multiply to {chips}"
    wanted = list(given.values())
    best = min(
        options, key=lambda sizes: (sum(abs(math.log(a / b)) for a, b in zip(sizes, wanted, strict=True)), sizes)
    )
    return "use " + ", ".join(f"{name}={size}" for name, size in zip(names, best, strict=True))


def divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
