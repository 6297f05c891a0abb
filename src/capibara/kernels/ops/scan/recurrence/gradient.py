"""How the recurrence is differentiated: the forward pass keeps a and h, not b."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The outputs asked for, and what the backward pass needs."""
    a, _, initial = arrays
    made = run(op, arrays, params, prefer=prefer)
    h = made[0] if params["return_final"] else made
    return made, (a, h, initial)


def backward(grad_op: Op, residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of (a, b, initial): one call of linear_recurrence_grad."""
    a, h, initial = residuals
    d_h, d_final = cotangent if params["return_final"] else (cotangent, None)
    return run(grad_op, (a, h, initial, d_h, d_final), {"reverse": params["reverse"]}, prefer=prefer)
