"""Where a job is to run: a TPU slice by name, or the GPUs of one host."""

from __future__ import annotations

import re
from collections.abc import Mapping

from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import CHIPS, chip
from capibara.hardware.topology import Slice, slice_by_name, slice_names

__all__ = ["hosts_of", "mesh_axes", "place"]

AXES = ("pipeline", "data", "expert", "sequence", "model")
"""Axes that a mesh for a plan may have."""

_MOST_GPUS = 8


def place(on: str | Slice) -> Slice:
    """The slice called "v4-32" or "v4:2x2x4", or so many GPUs of a host: "h200", "h200x8".

    Examples:
        >>> place("v4-64").chips, place("h200x8").chips
        (32, 8)
    """
    if isinstance(on, Slice):
        return on
    text = on.strip()
    match = re.fullmatch(r"(?P<kind>.+?)(?:x(?P<count>\d+))?", text)
    gpus = [one for one in CHIPS if one.platform == "gpu"]
    if match is not None and ":" not in text:
        try:
            found = chip(match["kind"])
        except ValueError:
            found = None
        if found is not None and found.platform == "gpu":
            count = int(match["count"] or 1)
            if count & (count - 1) or not 1 <= count <= _MOST_GPUS:
                rule = f"A host has 1, 2, 4 or {_MOST_GPUS} GPUs"
                raise rule_error(rule, repr(on), f"use {match['kind']}x{_MOST_GPUS}")
            return Slice(text, found, (count,))
        if found is not None and found.platform == "cpu":
            raise rule_error("A plan is for a TPU slice or GPUs", repr(on), "name a slice such as v4-32, or h200")
    try:
        return slice_by_name(text)
    except ValueError as error:
        if str(error).startswith("Unknown TPU slice"):
            # The cubes of 128 cores up to v4-8192 would bury the rest.
            usual = [name for name in slice_names("v4") if slice_by_name(name).chips.bit_count() == 1]
            names = [*usual, *(one.name for one in gpus), *("v5e-16", "v5p-32", "v6e-16")]
            raise unknown_name("slice or GPU", on, names) from None
        raise


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
