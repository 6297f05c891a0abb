"""few_rows by XLA: a product, and what follows it as passes of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.layers.activation.api import gated_activation
from capibara.kernels.ops.layers.activation.reference import wide_type
from capibara.kernels.ops.layers.norm.api import rms_norm


def xla(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    weight_scale: jax.Array | None = None,
    *,
    gate: str | None,
    eps: float,
    out_dtype: str | None,
    out_parts: int | None,
) -> Any:
    """The product is rounded to x's type before anything is done with it, as where each step is called by itself.

    But for the scales of an 8-bit weight: they multiply the float32 sums. Every 8-bit number is one of x's type.
    """
    if out_parts is not None:
        cut = (a.astype(x.dtype).reshape(a.shape[0], out_parts, -1) for a in (x, weight))
        sums = jnp.einsum("rpk,opk->pro", *cut, preferred_element_type=wide_type(x))
        return sums if weight_scale is None else sums * weight_scale.astype(sums.dtype)
    out = jnp.dtype(out_dtype or x.dtype)
    if weight_scale is None and out == x.dtype:
        y = jnp.tensordot(x, weight, ((1,), (1,)))
    else:
        wide = wide_type(x)
        y = jnp.tensordot(x, weight.astype(x.dtype), ((1,), (1,)), preferred_element_type=wide)
        y = (y if weight_scale is None else y * weight_scale.astype(wide)).astype(out)
    if gate is not None:
        y = gated_activation(*jnp.split(y, 2, axis=-1), kind=gate)
    if residual is None:
        return y
    total = residual + y
    return total, rms_norm(total, scale, eps=eps)
