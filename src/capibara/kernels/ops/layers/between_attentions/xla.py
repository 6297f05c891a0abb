"""between_attentions by XLA: few_rows by XLA, four times."""

from __future__ import annotations

from typing import Any

import jax

from capibara.kernels.ops.layers.few_rows.xla import xla as few_rows


def xla(
    x: jax.Array, residual: jax.Array, out_weight: jax.Array, scale: jax.Array, up_weight: jax.Array,
    down_weight: jax.Array, next_scale: jax.Array, next_weight: jax.Array | None = None,
    out_weight_scale: jax.Array | None = None, up_weight_scale: jax.Array | None = None,
    down_weight_scale: jax.Array | None = None, next_weight_scale: jax.Array | None = None,
    board: jax.Array | None = None, *, gate: str, eps: float, out_parts: int | None,
) -> Any:  # fmt: skip
    def product(
        x: jax.Array, weight: jax.Array, weight_scale: jax.Array | None, residual: Any = None, scale: Any = None,
        gate: str | None = None, out_parts: int | None = None,
    ) -> Any:  # fmt: skip
        return few_rows(
            x, weight, residual, scale, weight_scale, gate=gate, eps=eps, out_dtype=None, out_parts=out_parts
        )

    total, normal = product(x, out_weight, out_weight_scale, residual, scale)
    inner = product(normal, up_weight, up_weight_scale, gate=gate)
    total, made = product(inner, down_weight, down_weight_scale, total, next_scale)
    if next_weight is not None:
        made = product(made, next_weight, next_weight_scale, out_parts=out_parts or 1)
    return (total, made) if board is None else (total, made, board)
