"""The products inside a Pallas kernel that says nothing of its cost: those of one block, times the blocks."""

from __future__ import annotations

import math
from typing import Any

from capibara.kernels.core.counting import products

__all__ = ["kernel_products"]


def kernel_products(params: Any) -> tuple[float, str] | None:
    """Operations of a kernel's products and the type of their operands; None where none can be counted."""
    grid = getattr(params.get("grid_mapping"), "grid", None)
    if grid is None or not all(isinstance(size, int) for size in grid):
        return None
    found = list(products(params["jaxpr"]))
    return (math.prod(grid) * sum(flops for flops, _ in found), found[0][1]) if found else None
