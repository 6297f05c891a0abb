"""The products inside a Pallas kernel that says nothing of its cost: those of one block, times the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from capibara.program.jaxprs import dtype_of, opened

__all__ = ["kernel_products"]


def kernel_products(params: Any) -> tuple[float, str] | None:
    """Operations of a kernel's products and the type of their operands; None where none can be counted."""
    grid = getattr(params.get("grid_mapping"), "grid", None)
    if grid is None or not all(isinstance(size, int) for size in grid):
        return None
    found = list(_products(opened(params["jaxpr"])[0], 1))
    return (math.prod(grid) * sum(flops for flops, _ in found), found[0][1]) if found else None


def _products(jaxpr: Any, times: int) -> Iterator[tuple[float, str]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in summed)
            yield 2.0 * times * depth * math.prod(eqn.outvars[0].aval.shape), dtype_of(eqn.invars[0].aval)[0]
            continue
        # A block may be skipped, as under a causal mask; what there is of a branch counts.
        branches = [list(_products(opened(one)[0], times)) for one in eqn.params.get("branches", ())]
        yield from max(branches, key=lambda one: sum(flops for flops, _ in one), default=[])
        again = times * int(eqn.params["length"]) if eqn.primitive.name == "scan" else times
        for key in ("jaxpr", "call_jaxpr", "body_jaxpr"):
            inner = eqn.params.get(key)
            if inner is not None and hasattr(opened(inner)[0], "eqns"):
                yield from _products(opened(inner)[0], again)
