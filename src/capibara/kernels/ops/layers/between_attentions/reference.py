"""The specification of between_attentions: the products of few_rows, one after another."""

from __future__ import annotations

from typing import Any

import jax

from capibara.kernels.ops.layers.few_rows.reference import reference as few_rows


def reference(
    x: jax.Array, residual: jax.Array, out_weight: jax.Array, scale: jax.Array, up_weight: jax.Array,
    down_weight: jax.Array, next_scale: jax.Array, next_weight: jax.Array | None = None,
    out_weight_scale: jax.Array | None = None, up_weight_scale: jax.Array | None = None,
    down_weight_scale: jax.Array | None = None, next_weight_scale: jax.Array | None = None,
    board: jax.Array | None = None, *, gate: str = "silu", eps: float = 1e-6, out_parts: int | None = None,
) -> Any:  # fmt: skip
    """Every step in float32 or wider, rounded to x's type where few_rows does so; a board stays as it is."""
    total, normal = few_rows(x, out_weight, residual, scale, out_weight_scale, eps=eps)
    inner = few_rows(normal, up_weight, weight_scale=up_weight_scale, gate=gate)
    total, normal = few_rows(inner, down_weight, total, next_scale, down_weight_scale, eps=eps)
    made = normal
    if next_weight is not None:
        made = few_rows(normal, next_weight, weight_scale=next_weight_scale, out_parts=out_parts or 1)
    return (total, made) if board is None else (total, made, board)
