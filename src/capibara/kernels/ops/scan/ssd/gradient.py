"""How state space duality is differentiated: the operands are kept, and the states computed again from them."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    return run(op, arrays, params, prefer=prefer), arrays


def backward(grad_op: Op, residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    d_out, d_final = cotangent if params["return_final_state"] else (cotangent, None)
    return run(grad_op, (*residuals, d_out, d_final), {"chunk": params["chunk"]}, prefer=prefer)
