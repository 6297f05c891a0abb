"""What a call of summed_row may be, its sizes, its cost, and how far from exact it may come."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.layers.few_rows.rules import Sizes, check_parts, check_weight, is_quantized


def sizes(call: Call) -> Sizes:
    (rows, inner), held = call.need("residual").shape, call.need("weight").shape[0]
    return Sizes(rows, inner, held // 2 if call.params["gate"] is not None else held)


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    parts, residual, scale, weight, _ = call.args
    if parts is None or residual is None or scale is None or weight is None:
        raise rule_error("summed_row needs parts, residual, scale and weight", call.signature, "pass them")
    if len(residual.shape) != 2 or parts.shape[1:] != residual.shape or len(parts.shape) != 3 or not parts.shape[0]:
        raise rule_error(
            "parts is [parts, rows, K], and the residual [rows, K]",
            call.signature,
            "reshape them; one part has an axis too",
        )
    wide = jnp.promote_types(jnp.float32, residual.dtype)
    if np.dtype(residual.dtype).name not in FLOATS or parts.dtype != wide:
        raise rule_error(
            f"The residual is of {', '.join(FLOATS)}, and the parts are float32 or wider",
            f"{describe(residual)} and {describe(parts)}",
            f"convert the parts with .astype({str(wide)!r})",
        )
    if scale.shape != residual.shape[1:]:
        raise rule_error(f"The scale is one number a column, {residual.shape[1:]}", describe(scale), "reshape it")
    if len(weight.shape) != 2 or weight.shape[1] != residual.shape[1]:
        raise rule_error(
            "The weight is held by output, [outputs, K], with K numbers as the residual has",
            call.signature,
            "transpose the weight, or check which one it is",
        )
    check_weight(call, "residual")
    check_parts(call, alone=call.params["gate"] is None)


def out_dtype_of(call: Call) -> np.dtype[Any]:
    residual = call.need("residual").dtype
    return jnp.dtype(residual if call.params["out_parts"] is None else jnp.promote_types(jnp.float32, residual))


def cost(call: Call) -> Cost:
    """Everything read once, the sum and the product written once."""
    n, residual, parts = sizes(call), call.need("residual"), call.need("parts")
    out_parts: Any = call.params["out_parts"]
    written = nbytes(residual) + n.rows * n.outputs * (out_parts or 1) * out_dtype_of(call).itemsize
    held = call.need("weight").shape[0]
    beside = n.rows * n.inner * (parts.shape[0] + 7.0) + 10.0 * n.rows * n.outputs * (call.params["gate"] is not None)
    beside += n.rows * held * is_quantized(call)
    return Cost(
        matrix_flops=2.0 * n.rows * n.inner * held, vector_flops=beside,
        bytes=float(sum(map(nbytes, call.args)) + written), dtype=np.dtype(residual.dtype).name,
    )  # fmt: skip


def tolerance(call: Call) -> float:
    """The relative error, in norm and at the worst element against the largest, that a right result stays under.

    The sum is rounded, its norm is, and both an implementation may round apart: three units of their type, which the
    product of all columns carries on, not enlarged, for it is taken relative to the largest. A unit of the result's
    type, two more where factors are rounded before they are gated. Sums in float32 grow as the root of their length,
    four of them for an unlucky draw.
    """
    n, dtype = sizes(call), call.need("residual").dtype
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    units = 4 + 2 * (call.params["gate"] is not None)
    return units * unit_roundoff(dtype) + 8 * wide * max(n.inner, 1) ** 0.5
