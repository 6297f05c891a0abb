"""The work of a traced function, counted: by XLA, and its matrix products one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from capibara.kernels.core.spec import Cost

__all__ = ["products", "traced_cost"]


def traced_cost(traced: Any, dtype: str) -> Cost:
    """Flops and bytes by XLA's count, of which as many are matrix work as the products have."""
    counted = traced.lower().cost_analysis() or {}
    flops, moved = (float(counted.get(key, 0.0)) for key in ("flops", "bytes accessed"))
    matrix = min(flops, sum(each for each, _ in products(traced.jaxpr)))
    return Cost(matrix_flops=matrix, vector_flops=flops - matrix, bytes=moved, dtype=dtype)


def products(jaxpr: Any, times: int = 1) -> Iterator[tuple[float, str]]:
    """Flops of each product and convolution, loops of known length as often as they run, and its operands' type."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        depth = _summed(eqn)
        if depth is not None:
            yield 2.0 * times * depth * math.prod(eqn.outvars[0].aval.shape), eqn.invars[0].aval.dtype.name
            continue
        # A block may be skipped, as under a causal mask; what there is of a branch counts.
        branches = [list(products(branch, times)) for branch in eqn.params.get("branches", ())]
        yield from max(branches, key=lambda branch: sum(flops for flops, _ in branch), default=[])
        again = times * int(eqn.params["length"]) if eqn.primitive.name == "scan" else times
        for key in ("jaxpr", "call_jaxpr", "body_jaxpr"):
            inner = eqn.params.get(key)
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from products(inner, again)


def _summed(eqn: Any) -> float | None:
    """How many products are added up for one number of the result; None for what is no product of matrices."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        return math.prod(eqn.invars[0].aval.shape[dim] for dim in summed)
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        return math.prod(kernel) / kernel[spec[0]]
    if name == "ragged_dot_general":
        ((summed, _), _) = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return math.prod(eqn.invars[0].aval.shape[dim] for dim in summed)
    return None
