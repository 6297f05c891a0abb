"""The specification of few_rows: x times a weight held by output, then a gate, or a residual and its norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.layers.activation.reference import FUNCTIONS, wide_type
from capibara.kernels.ops.layers.norm.reference import reference as norm


def reference(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    weight_scale: jax.Array | None = None,
    *,
    gate: str | None = None,
    eps: float = 1e-6,
    out_dtype: str | None = None,
    out_parts: int | None = None,
) -> Any:
    """x [rows, K] times weight [outputs, K], every step in float32 or wider, rounded once: to `out_dtype`, or x's type.

    Outputs of an 8-bit weight are multiplied by their scales before anything else is done with them. With a `gate` the
    first half of the outputs goes through that activation and multiplies the second half. With a residual and a scale
    there are two results: the residual's sum with the product, rounded, and its RMS norm. With `out_parts` they are the
    sums over as many parts of the inputs, one after another, [out_parts, rows, outputs] in float32 or wider.
    """
    wide = wide_type(x)
    if out_parts is not None:
        cut = (a.astype(wide).reshape(a.shape[0], out_parts, -1) for a in (x, weight))
        sums = jnp.einsum("rpk,opk->pro", *cut, precision=jax.lax.Precision.HIGHEST)
        return sums if weight_scale is None else sums * weight_scale.astype(wide)
    y = jnp.matmul(x.astype(wide), weight.astype(wide).T, precision=jax.lax.Precision.HIGHEST)
    if weight_scale is not None:
        y = y * weight_scale.astype(wide)
    if gate is not None:
        first, second = jnp.split(y, 2, axis=-1)
        y = FUNCTIONS[gate](first) * second
    if residual is None:
        return y.astype(out_dtype or x.dtype)
    total = (y + residual.astype(wide)).astype(x.dtype)
    return total, norm(total, scale, kind="rms", eps=eps)
