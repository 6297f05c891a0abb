"""The exchanges in a compiled program's text, with how often each runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from capibara.program.chip import Collective
from capibara.program.hlo_text import BRANCHES, CALL, CALLED, array_bytes, computations, trips

__all__ = ["KINDS", "collectives_in"]

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}
"""HLO's opcodes of the exchanges -> what `Collective` calls them."""


def collectives_in(hlo_text: str, mesh_axes: Mapping[str, int] | None = None) -> list[Collective]:
    """Every exchange of a compiled program (`compiled.as_text()`), once for each time it runs.

    One inside of a loop is there as often as the loop runs, where the compiler knows (else once, and `why` says so).
    `bytes` is counted as in `Collective`. With the axes of the mesh, in their order, `axes` names those along which the
    groups of devices run; without, and for groups that are no product of axes, it is empty.
    """
    bodies, entry = computations(hlo_text)
    found: list[Collective] = []
    _walk(entry, bodies, 1, "", mesh_axes, found, ())
    return found


def _walk(
    name: str, bodies: dict[str, list[tuple[str, str]]], times: int, why: str,
    mesh_axes: Mapping[str, int] | None, found: list[Collective], path: tuple[str, ...],
) -> None:  # fmt: skip
    if name in path:
        return
    shapes = dict(bodies.get(name, ()))
    for _, rest in bodies.get(name, ()):
        call = CALL.search(rest)
        if call is None:
            continue
        op = call.group(1)
        kind = KINDS.get(op.removesuffix("-start"))
        if kind is not None and not op.endswith("-done"):
            size = _bytes(rest, call, kind, op, shapes)
            made = Collective(kind, _axes(rest, mesh_axes), size, why or _source(rest))
            found += [made] * times
            continue
        again, said = 1, why
        if op == "while":
            known = trips(rest, shapes, bodies)
            again = 1 if known is None else known
            said = why if known is not None else "inside a loop of unknown length, counted once"
        inner = CALLED.findall(rest)
        branches = BRANCHES.search(rest)
        if branches:
            inner += [one.strip().lstrip("%") for one in branches.group(1).split(",")]
        if op in ("while", "call", "conditional", "async-start", "fusion"):
            for called in inner:
                _walk(called, bodies, times * again, said, mesh_axes, found, (*path, name))


def _bytes(rest: str, call: re.Match[str], kind: str, op: str, shapes: dict[str, str]) -> float:
    result = array_bytes(rest[: call.start()])
    names = re.findall(r"%?([\w.\-]+)", rest[call.end() : rest.index(")", call.end())])
    operands = 0.0
    for name in names:
        if name in shapes:
            made = shapes[name]
            inner = CALL.search(made)
            operands += array_bytes(made[: inner.start()] if inner else made)
    if kind != "all_gather":
        return operands or result
    # The asynchronous form returns its operands beside its result.
    return result - operands if op.endswith("-start") else result


def _source(rest: str) -> str:
    found = re.search(r'op_name="([^"]*)"', rest)
    return found.group(1) if found else ""


def _axes(rest: str, mesh_axes: Mapping[str, int] | None) -> tuple[str, ...]:
    """The mesh axes along which devices of one group differ."""
    if mesh_axes and "replica_groups={}" in rest:  # one group of all devices
        return tuple(name for name, size in mesh_axes.items() if size > 1)
    group = _group(rest)
    if not mesh_axes or len(group) < 2:
        return ()
    names, sizes = list(mesh_axes), list(mesh_axes.values())
    sent = "source_target_pairs" in rest

    def place(device: int) -> list[int]:
        spot = []
        for size in reversed(sizes):
            spot.append(device % size)
            device //= size
        return spot[::-1]

    spots = [place(device) for device in group]
    differ = [name for i, name in enumerate(names) if len({spot[i] for spot in spots}) > 1]
    whole = sent or math.prod(mesh_axes[name] for name in differ) == len(group)
    return tuple(differ) if whole else ()


def _group(rest: str) -> list[int]:
    """The devices of the first group, in any of the three ways of writing them; [] where it is written otherwise."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", rest)
    if listed:
        return [int(one) for one in listed.group(1).split(",")]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        return _counted(iota.group(3), iota.group(4))[: int(iota.group(2))]
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", rest
    )
    if named is None:
        return []
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
    along = [one.strip().strip("'") for one in named.group(4).split(",")]
    if any(one not in axes for one in along):  # a part of an axis
        return []
    devices = _counted(named.group(2) or str(math.prod(axes.values())), named.group(3))
    places = [0]
    for position, (name, size) in enumerate(axes.items()):
        stride = math.prod(list(axes.values())[position + 1 :])
        places = [base + stride * i for base in places for i in range(size if name in along else 1)]
    return [devices[place] for place in places]


def _counted(dims: str, order: str | None) -> list[int]:
    """0, 1, 2, ... in an array of these dimensions, turned, and read row by row."""
    lengths = [int(one) for one in dims.split(",")]
    axes = [int(one) for one in order.split(",")] if order else range(len(lengths))
    numbers = [0]
    for axis in axes:
        stride = math.prod(lengths[axis + 1 :])
        numbers = [base + stride * i for base in numbers for i in range(lengths[axis])]
    return numbers
