"""How norm is differentiated: the forward pass keeps what it normalised and the row statistics."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer
from capibara.kernels.ops.layers.norm.reference import wide_type

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The outputs asked for, and what the backward pass needs: the sum (or x) and one or two numbers a row."""
    x, scale, bias, residual = arrays
    summed = residual is not None
    made = run(op, arrays, params | {"return_residual": summed, "return_stats": True}, prefer=prefer)
    y, *rest = made
    total = rest.pop(0) if summed else x
    mean, rstd = rest if params["kind"] == "layer" else (None, rest[0])
    # The residual's type and axes are remembered without keeping its values alive.
    like = None if residual is None else jnp.zeros((0,) * residual.ndim, residual.dtype)
    wanted = [y]
    if params["return_residual"]:
        wanted.append(total)
    if params["return_stats"]:
        wanted += rest
    return (tuple(wanted) if len(wanted) > 1 else y), (total, scale, bias, mean, rstd, like)


def backward(grad_op: Op, residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of (x, scale, bias, residual): one call of norm_grad."""
    total, scale, bias, mean, rstd, like = residuals
    d_out, *rest = cotangent if isinstance(cotangent, tuple) else (cotangent,)
    d_sum = rest.pop(0) if params["return_residual"] else None
    kept = {name: params[name] for name in ("kind", "eps", "offset")}
    dx, dscale, dbias = run(grad_op, (total, scale, bias, mean, rstd, d_out, d_sum), kept, prefer=prefer)
    if params["return_stats"]:
        # Only where a gradient is differentiated again do the statistics have cotangents of their own.
        dx = (dx.astype(wide_type(total)) + _of_statistics(total, mean, rstd, rest)).astype(dx.dtype)
    return dx, dscale, dbias, None if like is None else dx.astype(like.dtype)


def _of_statistics(total: Any, mean: Any, rstd: Any, rest: list[Any]) -> Any:
    """What the cotangents of mean and rstd add to dx: d mean/dx = 1/n, d rstd/dx = -rstd³ · (x - mean) / n."""
    columns = total.shape[-1]
    *d_mean, d_rstd = rest
    values = total.astype(wide_type(total))
    centred = values if mean is None else values - mean[..., None]
    added = centred * (-d_rstd * rstd**3 / columns)[..., None]
    return added + d_mean[0][..., None] / columns if d_mean else added
