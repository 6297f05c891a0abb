"""How cross_entropy is differentiated: the forward pass keeps its operands and one number a token, and the logits where
it is asked to."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    if not params["keep_logits"]:
        made = run(op, arrays, params, prefer=prefer)
        return made, (*arrays, made[0], made[-1] if params["return_logits"] else None)
    *made, logits = run(op, arrays, params | {"return_logits": True}, prefer=prefer)
    return (*made, logits) if params["return_logits"] else tuple(made), (*arrays, made[0], logits)


def backward(grad_op: Op, residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of (hidden, weights, labels): one call of cross_entropy_grad."""
    kept = {name: params[name] for name in grad_op.params}
    *arrays, logits = residuals
    flows = cotangent[:-1] if params["return_logits"] else cotangent
    d_sum = flows[2] if params["return_sum"] else None
    return *run(grad_op, (*arrays, *flows[:2], d_sum, logits), kept, prefer=prefer), None
