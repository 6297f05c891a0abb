"""How cross_entropy is differentiated: the forward pass keeps its operands and one number a token."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    made = run(op, arrays, params, prefer=prefer)
    return made, (*arrays, made[0])


def backward(grad_op: Op, residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of (hidden, weights, labels): one call of cross_entropy_grad."""
    kept = {name: params[name] for name in grad_op.params}
    return *run(grad_op, (*residuals, *cotangent), kept, prefer=prefer), None
