"""The inside of shard_map: one chip's arrays already, and exchanges that the program itself writes."""

from __future__ import annotations

from typing import Any

__all__ = ["EXCHANGES", "exchange_of"]

EXCHANGES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
    "pbroadcast": "permute",
}
"""Primitive -> the kind of `Collective` that it is."""


def exchange_of(eqn: Any) -> tuple[str, tuple[str, ...]] | None:
    """Kind and mesh axes of an exchange; None for any other primitive."""
    kind = EXCHANGES.get(eqn.primitive.name)
    if kind is None:
        return None
    named = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    axes = named if isinstance(named, tuple | list) else (named,)
    if all(isinstance(axis, int) for axis in axes):  # a dimension that vmap named: nothing leaves the chip
        return None
    return kind, tuple(str(axis) for axis in axes)
