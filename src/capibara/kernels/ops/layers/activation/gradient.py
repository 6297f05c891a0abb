"""How activation is differentiated: the forward pass keeps its operands and nothing else."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    return run(op, arrays, params, prefer=prefer), arrays


def backward(grad_op: Op, arrays: Any, d_out: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of (x, up, seed, offsets): one call of activation_grad, which draws the mask again."""
    d_x, d_up = run(grad_op, (*arrays, d_out), params, prefer=prefer)
    return d_x, d_up, None, None
