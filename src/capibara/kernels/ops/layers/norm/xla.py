"""Layer norm and RMS norm in plain JAX, written so that XLA makes few passes of it, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.layers.norm.reference import across, outputs, residual_sum, shrink_of, wide_type


def xla(
    x: jax.Array, scale: jax.Array | None = None, bias: jax.Array | None = None, residual: jax.Array | None = None,
    *, kind: str, eps: float, offset: float, return_residual: bool, return_stats: bool,
) -> Any:  # fmt: skip
    """The forward pass: a sum over the row, a sum of squares about its mean, and one elementwise pass."""
    total = residual_sum(x, residual)
    wide = total.astype(wide_type(x))
    mean = wide.mean(-1, keepdims=True) if kind == "layer" else None
    centred = wide if mean is None else wide - mean
    shrink = shrink_of(eps)
    rstd = shrink * lax.rsqrt(jnp.square(centred * shrink).mean(-1, keepdims=True) + eps * shrink**2)
    y = centred * rstd
    if scale is not None:
        y = y * (across(scale, x) + offset)
    if bias is not None:
        y = y + across(bias, x)
    flat = None if mean is None else mean[..., 0]
    return outputs(y.astype(x.dtype), total, flat, rstd[..., 0], kind, return_residual, return_stats)


def xla_grad(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, mean: jax.Array | None, rstd: jax.Array,
    d_out: jax.Array, d_sum: jax.Array | None = None, *, kind: str, eps: float, offset: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The backward pass from the row statistics: two sums a row, and two sums a column."""
    wide = wide_type(x)
    values, flow = x.astype(wide), d_out.astype(wide)
    centred = values if mean is None else values - mean.astype(wide)[..., None]
    spread = rstd.astype(wide)[..., None]
    normal = centred * spread
    weighted = flow if scale is None else flow * (across(scale, x) + offset)
    dx = weighted - normal * (weighted * normal).mean(-1, keepdims=True)
    if kind == "layer":
        dx = dx - weighted.mean(-1, keepdims=True)
    dx = dx * spread
    if d_sum is not None:
        dx = dx + d_sum.astype(wide)

    def down(terms: jax.Array, like: jax.Array) -> jax.Array:
        rows = tuple(
            range(like.ndim - 1, x.ndim - 1)
        )  # every axis but the columns, and the groups where there are some
        return terms.sum(rows).astype(like.dtype)

    dscale = None if scale is None else down(flow * normal, scale)
    dbias = None if bias is None else down(flow, bias)
    return dx.astype(x.dtype), dscale, dbias


# JAX's own derivative would keep intermediates as large as x in float32, so the op's gradient stands in.
IMPLEMENTATION = Implementation("xla", xla, own_gradient=True)
GRAD_IMPLEMENTATION = Implementation("xla", xla_grad, own_gradient=True)
