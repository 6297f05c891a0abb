"""What a call of few_rows may be, its sizes, its cost, and how far from exact it may come."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.layers.activation.formulas import KINDS


class Sizes(NamedTuple):
    rows: int
    inner: int
    """Numbers of a row, which the product sums over."""
    outputs: int
    """Of the result: half of the weight's where there is a gate."""


def sizes(call: Call) -> Sizes:
    (rows, inner), held = call.need("x").shape, call.need("weight").shape[0]
    return Sizes(rows, inner, held // 2 if call.params["gate"] is not None else held)


def is_quantized(call: Call) -> bool:
    """Whether the weight is of 8-bit numbers."""
    return np.dtype(call.need("weight").dtype).name == "int8"


def out_dtype_of(call: Call) -> np.dtype[Any]:
    chosen: Any = call.params["out_dtype"]
    if call.params["out_parts"] is not None:
        return jnp.dtype(jnp.promote_types(jnp.float32, call.need("x").dtype))
    return jnp.dtype(chosen or call.need("x").dtype)


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, weight, residual, scale, _ = call.args
    gate, out_dtype = call.params["gate"], call.params["out_dtype"]
    if x is None or weight is None or len(x.shape) != 2 or len(weight.shape) != 2:
        raise rule_error("few_rows takes x [rows, K] and weight [outputs, K]", call.signature, "reshape them")
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is None or np.dtype(given.dtype).name in FLOATS or (name == "weight" and is_quantized(call)):
            continue
        raise rule_error(
            f"few_rows takes {', '.join(FLOATS)}, and weights of int8",
            f"{name} of {describe(given)}",
            f"convert {name} with .astype()",
        )
    if x.shape[1] != weight.shape[1]:
        raise rule_error(
            "The weight is held by output, [outputs, K], with K numbers as a row of x has",
            f"{x.shape[1]} and {weight.shape[1]} ({call.signature})",
            "transpose the weight, or check which one it is",
        )
    check_weight(call, "x")
    if (residual is None) != (scale is None):
        raise rule_error("A residual and the scale of its norm come together", call.signature, "pass both, or neither")
    n = sizes(call)
    if residual is not None and (residual.shape != (n.rows, n.outputs) or residual.dtype != x.dtype):
        raise rule_error(
            f"The residual has the product's shape {(n.rows, n.outputs)} and x's type", describe(residual), "convert it"
        )
    if scale is not None and scale.shape != (n.outputs,):
        raise rule_error(f"The scale is one number an output, ({n.outputs},)", describe(scale), "reshape it")
    if out_dtype is not None and (out_dtype not in FLOATS or residual is not None):
        raise rule_error(
            f"out_dtype is one of {', '.join(FLOATS)}, of a product without a residual, which has x's type",
            f"{out_dtype!r} ({call.signature})",
            "leave it out",
        )
    check_parts(call, alone=gate is None and residual is None and out_dtype is None)


def check_weight(call: Call, like: str) -> None:
    """What holds of a weight that is held by output, its scales, its gate and the norm beside it: of few_rows and of
    summed_row. `like` is the operand that has the weight's type."""
    weight, weight_scale = call.need("weight"), call["weight_scale"]
    gate, eps = call.params["gate"], call.params["eps"]
    if is_quantized(call) != (weight_scale is not None):
        raise rule_error(
            "A weight of int8 and the scales of its outputs, weight_scale, come together",
            call.signature,
            "pass weight_scale [outputs] with an int8 weight, and none with another",
        )
    if call.need(like).dtype != weight.dtype and not is_quantized(call):
        raise rule_error(f"{like} and the weight have one type", call.signature, "convert one with .astype()")
    if weight_scale is not None and weight_scale.shape != weight.shape[:1]:
        raise rule_error(
            f"weight_scale is one number an output of the weight, ({weight.shape[0]},)",
            describe(weight_scale),
            "reshape it; a gated weight has scales for both its halves",
        )
    if gate is not None and gate not in KINDS:
        raise unknown_name(f"gate of {call.op.name}", gate, KINDS)
    if gate is not None and weight.shape[0] % 2:
        raise rule_error(
            "A gated weight has the gate's outputs, then as many of up", describe(weight), "concatenate both"
        )
    if not isinstance(eps, float) or not 0 < eps < float("inf"):
        raise rule_error("eps is a finite float above 0", repr(eps), "pass a small positive float, e.g. 1e-6")


def check_parts(call: Call, *, alone: bool) -> None:
    """Of `out_parts`, where it is asked for: of a product that is `alone`, with nothing that would need the sum."""
    out_parts, inner = call.params["out_parts"], call.need("weight").shape[1]
    if out_parts is None:
        return
    whole = isinstance(out_parts, int) and out_parts >= 1 and not inner % out_parts
    if not whole:
        raise rule_error("out_parts divides the inputs", f"{out_parts!r} of {inner}", "use 4")
    if not alone:
        raise rule_error(
            "Parts of a product are float32 sums, before a gate, a residual or another type",
            call.signature,
            "leave out_parts or the others out",
        )


def cost(call: Call) -> Cost:
    """The weight, the rows and what is added read once, the results written once."""
    n, x, residual = sizes(call), call.need("x"), call["residual"]
    out_parts: Any = call.params["out_parts"]
    written = n.rows * n.outputs * out_dtype_of(call).itemsize * (1 if residual is None else 2) * (out_parts or 1)
    products = 2.0 * n.rows * n.inner * call.need("weight").shape[0]
    beside = n.rows * n.outputs * (10.0 * (call.params["gate"] is not None) + 8.0 * (residual is not None))
    beside += n.rows * call.need("weight").shape[0] * is_quantized(call)
    moved = sum(map(nbytes, call.args)) + written
    return Cost(matrix_flops=products, vector_flops=beside, bytes=float(moved), dtype=np.dtype(x.dtype).name)


def tolerance(call: Call) -> float:
    """The relative error, in norm and at the worst element against the largest, that a right result stays under.

    One unit of the result's type for it. An implementation may round the product before it is gated (two factors) or
    added: two more; the sum is rounded before its norm: one. Sums in float32 grow as the root of their length, four of
    them for an unlucky draw.
    """
    n, x = sizes(call), call.need("x")
    units = 1 + 2 * (call.params["gate"] is not None) + 3 * (call["residual"] is not None)
    wide = unit_roundoff(jnp.promote_types(jnp.float32, x.dtype))
    return units * unit_roundoff(out_dtype_of(call)) + 4 * wide * (max(n.inner, 1) ** 0.5 + max(n.outputs, 1) ** 0.5)
