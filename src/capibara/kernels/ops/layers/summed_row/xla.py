"""summed_row by XLA: a pass for the sum and its norm, and few_rows by XLA."""

from __future__ import annotations

import jax

from capibara.kernels.ops.layers.activation.reference import wide_type
from capibara.kernels.ops.layers.few_rows.xla import xla as product
from capibara.kernels.ops.layers.norm.api import rms_norm


def xla(
    parts: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array | None = None,
    *,
    gate: str | None,
    eps: float,
    out_parts: int | None,
) -> tuple[jax.Array, jax.Array]:
    total = (residual.astype(wide_type(residual)) + parts.sum(0)).astype(residual.dtype)
    normal = rms_norm(total, scale, eps=eps)
    made = product(
        normal, weight, weight_scale=weight_scale, gate=gate, eps=eps, out_dtype=None, out_parts=out_parts
    )  # fmt: skip
    return total, made
