"""Where a job is to run, and the meshes that it may have there."""

from __future__ import annotations

from collections.abc import Mapping

from capibara.errors import rule_error, unknown_name
from capibara.hardware.topology import Slice, place

__all__ = ["hosts_of", "mesh_axes", "place"]

AXES = ("pipeline", "data", "expert", "sequence", "model")
"""Axes that a mesh for a plan may have."""


def hosts_of(where: Slice) -> int:
    """Machines, each of which can be taken away."""
    return 1 if where.chip.platform == "gpu" else where.hosts


def mesh_axes(text: str, where: Slice) -> dict[str, int]:
    """The axes of "data=4,model=8", which must multiply to the chips of the slice.

    Examples:
        >>> mesh_axes("data=4,model=8", place("v4-64"))
        {'data': 4, 'model': 8}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.strip().isdigit() or int(size) < 1 or name in axes:
            raise rule_error("A mesh is written axis=size,axis=size", repr(text), "use data=4,model=8")
        if name not in AXES:
            raise unknown_name("mesh axis", name, AXES)
        axes[name] = int(size)
    return checked_mesh(axes, where)


def checked_mesh(axes: Mapping[str, int], where: Slice) -> dict[str, int]:
    """These axes, or an error with the nearest sizes that multiply to the chips."""
    product = 1
    for size in axes.values():
        product *= size
    if product != where.chips:
        nearest = _nearest_sizes(tuple(axes.values()), where.chips)
        written = ",".join(f"{name}={size}" for name, size in zip(axes, nearest, strict=True))
        raise rule_error(
            f"The axes of a mesh on {where.name} multiply to its {where.chips} chips",
            f"{','.join(f'{name}={size}' for name, size in axes.items())} = {product}",
            f"use {written}",
        )
    return dict(axes)


def _nearest_sizes(wanted: tuple[int, ...], chips: int) -> tuple[int, ...]:
    """Sizes with that product which change the wanted ones by the least factors; ties keep the last axes."""

    def distance(sizes: tuple[int, ...]) -> tuple[float, tuple[bool, ...], tuple[int, ...]]:
        change = sum(max(a, b) / min(a, b) for a, b in zip(sizes, wanted, strict=True))
        changed = tuple(a != b for a, b in zip(reversed(sizes), reversed(wanted), strict=True))
        return change, changed, sizes

    return min(_factorings(chips, len(wanted)), key=distance)


def _factorings(number: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(number,)]
    divisors = [one for one in range(1, number + 1) if number % one == 0]
    return [(one, *rest) for one in divisors for rest in _factorings(number // one, parts - 1)]
