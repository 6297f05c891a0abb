"""How attention is differentiated: the forward pass keeps its log-sum-exp, and the backward pass is an op."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The output, and what the backward pass needs: the operands, the output and one number a query."""
    out, lse = run(op, arrays, params | {"return_lse": True}, prefer=prefer)
    return ((out, lse) if params["return_lse"] else out), (*arrays, out, lse)


def backward(grad_op: Op, residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    d_out, d_lse = cotangent if params["return_lse"] else (cotangent, None)
    kept = {name: value for name, value in params.items() if name != "return_lse"}
    dq, dk, dv, dbias = run(grad_op, (*residuals, d_out, d_lse), kept, prefer=prefer)
    # Masks, segment ids and seeds are not numbers to differentiate by.
    return dq, dk, dv, dbias, None, None, None, None, None
