"""This process's pieces of an array in the host's memory, and an array made of them again on any layout they cover."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["Index", "assembled", "bounds", "covered", "from_pieces", "host_shards"]

Index = tuple[tuple[int, int], ...]
"""Of each axis, where a piece begins and where it ends."""


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(
        (one.start or 0, size if one.stop is None else one.stop) for one, size in zip(index, shape, strict=True)
    )


def host_shards(leaf: Any) -> dict[Index, Any]:
    """This process's part of an array, each piece once, in the host's memory and nobody else's."""
    import jax
    import numpy as np

    if not isinstance(leaf, jax.Array):
        value = np.array(leaf)
        return {tuple((0, size) for size in value.shape): value}
    pieces: dict[Index, Any] = {}
    for shard in leaf.addressable_shards:
        place = bounds(shard.index, leaf.shape)
        if place not in pieces:
            # On the CPU the array's memory is the host's own, and the next step may be given it to write into.
            pieces[place] = np.array(shard.data, copy=True)
    return pieces


def _overlap(a: Index, b: Index) -> Index | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _volume(place: Index) -> int:
    size = 1
    for start, stop in place:
        size *= stop - start
    return size


def covered(place: Index, pieces: Collection[Index]) -> bool:
    # Pieces of one array do not overlap, so that their parts of a place add up to it, or do not.
    if place in pieces or _volume(place) == 0:
        return True
    return sum(_volume(both) for piece in pieces if (both := _overlap(place, piece))) == _volume(place)


def assembled(place: Index, pieces: Mapping[Index, Any]) -> Any:
    import numpy as np

    if place in pieces:
        return pieces[place]
    kind = next(iter(pieces.values())).dtype
    whole = np.empty([stop - start for start, stop in place], kind)
    for piece, value in pieces.items():
        if both := _overlap(place, piece):
            into = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(both, place, strict=True))
            of = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(both, piece, strict=True))
            whole[into] = value[of]
    return whole


def from_pieces(shape: tuple[int, ...], sharding: Any, pieces: Mapping[Index, Any]) -> Any:
    """The array, laid out anew. The pieces cover what this process has of it."""
    import jax

    def piece(index: tuple[slice, ...] | None) -> Any:
        assert index is not None
        return assembled(bounds(index, shape), pieces)

    return jax.make_array_from_callback(shape, sharding, piece)
