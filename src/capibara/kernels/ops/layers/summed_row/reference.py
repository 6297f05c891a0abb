"""The specification of summed_row: what is left in parts added up, its norm, and a product by few_rows."""

from __future__ import annotations

import jax

from capibara.kernels.ops.layers.activation.reference import wide_type
from capibara.kernels.ops.layers.few_rows.reference import reference as product
from capibara.kernels.ops.layers.norm.reference import reference as norm


def reference(
    parts: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array | None = None,
    *,
    gate: str | None = None,
    eps: float = 1e-6,
    out_parts: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(residual + the sum of parts [parts, rows, K], rounded to the residual's type; the product of its RMS norm)."""
    total = (residual.astype(wide_type(residual)) + parts.sum(0)).astype(residual.dtype)
    normal = norm(total, scale, kind="rms", eps=eps)
    return total, product(normal, weight, weight_scale=weight_scale, gate=gate, out_parts=out_parts)
