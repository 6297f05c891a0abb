"""Layouts as plain values, for reports and for another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.mesh.layout import Layout

__all__ = ["layout_as_dict", "layout_from_dict"]


def layout_as_dict(layout: Layout) -> dict[str, Any]:
    return {
        "name": layout.name,
        "mesh": dict(layout.mesh.axes),
        "specs": [[list(part) if isinstance(part, tuple) else part for part in spec] for spec in layout.specs],
        "rules": {name: list(axes) if isinstance(axes, tuple) else axes for name, axes in layout.rules.items()},
        "choices": dict(layout.choices),
        "host": list(layout.host),
        "stages": layout.stages,
    }


def layout_from_dict(fields: dict[str, Any]) -> Layout:
    from jax.sharding import PartitionSpec

    from capibara.mesh.layout import Layout
    from capibara.mesh.mesh import MeshConfig

    axes = fields["mesh"]
    specs = ([tuple(part) if isinstance(part, list) else part for part in spec] for spec in fields["specs"])
    rules = {name: tuple(value) if isinstance(value, list) else value for name, value in fields["rules"].items()}
    return Layout(
        mesh=MeshConfig(tuple(axes.values()), tuple(axes)),
        specs=tuple(PartitionSpec(*spec) for spec in specs),
        rules=rules,
        choices=tuple(fields["choices"].items()),
        host=tuple(fields["host"]),
        stages=fields["stages"],
        name=fields["name"],
    )
