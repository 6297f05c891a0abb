"""How a kernel of rope is differentiated: the gradient is turned back, by the angles alone."""

from __future__ import annotations

from typing import Any

import jax

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer
from capibara.kernels.ops.attention.rope.reference import reference

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """Only angles that may be learned have a gradient of their own, for which x is kept."""
    x, cos, sin = arrays
    return run(op, arrays, params, prefer=prefer), (None if params["fixed_angles"] else x, cos, sin)


def backward(op: Op, kept: Any, flow: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    x, cos, sin = kept
    d_x = run(op, (flow, cos, -sin), params, prefer=prefer)
    if x is None:
        return d_x, None, None

    def by_angles(cos: Any, sin: Any) -> Any:
        return reference(x, cos, sin, style=params["style"], layout=params["layout"])

    return d_x, *jax.vjp(by_angles, cos, sin)[1](flow)
