"""What a call of activation must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.layers.activation.formulas import KINDS, SHORT_TAIL_ERROR
from capibara.kernels.ops.layers.activation.tanh_formulas import TANH_ERROR

ROUNDINGS = 32  # in float32, of the longest formula: a polynomial, an exponential, a division, a few products


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, kind, rate = call["x"], call.params["kind"], call.params["rate"]
    if kind not in KINDS:
        raise unknown_name("kind of activation", kind, KINDS)
    if x is None or len(x.shape) == 0:
        raise rule_error("activation is of an array [..., columns]", describe(x), "pass one with an axis, x[None]")
    if np.dtype(x.dtype).name not in FLOATS:
        raise rule_error(f"activation takes {', '.join(FLOATS)}", f"x of {describe(x)}", "convert x with .astype(...)")
    for name in ("up", "d_out"):
        given = call[name] if name in call.op.operands else None
        if given is not None and (given.shape, given.dtype) != (x.shape, x.dtype):
            what = "The gate and the up have one shape and one type" if name == "up" else "d_out is as x"
            raise rule_error(what, f"{describe(x)} and {describe(given)}", "broadcast or convert one to the other's")
    if not _is_number(rate) or not 0 <= cast(float, rate) < 1:
        raise rule_error("The dropout rate is a number from 0 to below 1", repr(rate), "pass e.g. dropout_rate=0.1")
    seed, offsets = call["seed"], call["offsets"]
    if cast(float, rate) > 0 and seed is None:
        raise rule_error("Dropout draws from a key", f"dropout_rate={rate} and no key", "pass key=jax.random.key(...)")
    if seed is not None and (seed.dtype != jnp.uint32 or seed.shape not in {(2,), (x.shape[0], 2)}):
        raise rule_error("The seed is two words, u32[2]", describe(seed), "pass key to activation()")
    if seed is not None and len(seed.shape) == 2 and len(x.shape) < 2:
        raise rule_error("A seed for each row needs rows", call.signature, "pass one seed, u32[2]")
    if offsets is not None and (offsets.shape != (2,) or offsets.dtype != jnp.int32):
        raise rule_error("The offsets are a row and a column, i32[2]", describe(offsets), "leave them out")
    strides = cast(Any, call.params["strides"])
    if strides is not None and len(strides) != len(x.shape) - 1:
        raise rule_error("There is a stride for each leading axis", f"{strides} for {describe(x)}", "leave them out")
    if "d_out" in call.op.operands and call["d_out"] is None:
        raise rule_error("activation_grad takes the cotangent of the output", "no d_out", "pass it")


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


# The reference's operations a number: forward, backward, and backward with an `up`. As XLA counts them, an exponential,
# tanh or erf is none of them. Dropout draws, compares and scales.
OPERATIONS = {
    "gelu": (4, 13, 16),
    "gelu_tanh": (8, 21, 24),
    "silu": (4, 9, 12),
    "relu": (1, 2, 5),
    "sigmoid": (3, 6, 8),
    "tanh": (0, 4, 6),
    "identity": (0, 0, 2),
}
DROPOUT_OPERATIONS = 16


def _cost(call: Call, each: int, moved: int) -> Cost:
    each += DROPOUT_OPERATIONS if call.params["rate"] else 0
    flops = float(max(each * math.prod(call.need("x").shape), 1))
    return Cost(vector_flops=flops, bytes=float(moved), dtype="float32")


def cost(call: Call) -> Cost:
    """Each operand read once and each output written once."""
    moved = sum(map(nbytes, call.args)) + nbytes(call["x"])
    return _cost(call, OPERATIONS[str(call.params["kind"])][0] + (call["up"] is not None), moved)


def cost_grad(call: Call) -> Cost:
    moved = sum(map(nbytes, call.args)) + nbytes(call["x"]) + nbytes(call["up"])
    return _cost(call, OPERATIONS[str(call.params["kind"])][1 if call["up"] is None else 2], moved)


def tolerance(call: Call) -> float:
    """One rounding of the result to x's type, the float32 roundings before it, and for 16 bits the error of shorter
    formulas: gelu's polynomial, and for bfloat16 an instruction for tanh."""
    dtype, kind = call.need("x").dtype, call.params["kind"]
    short = 2 * SHORT_TAIL_ERROR if dtype.itemsize == 2 and kind == "gelu" else 0.0
    if dtype == jnp.bfloat16 and kind not in ("relu", "identity"):
        short = TANH_ERROR
    return unit_roundoff(dtype) + ROUNDINGS * unit_roundoff(jnp.promote_types(jnp.float32, dtype)) + short


def tolerance_grad(call: Call) -> float:
    """The slope has products of the value's parts: twice its error."""
    return 2 * tolerance(call)
