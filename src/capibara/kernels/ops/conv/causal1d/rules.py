"""What a call of causal_conv1d must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff

ACTIVATIONS = ("silu",)


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, w, bias, state = call.args[:4]
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and np.dtype(given.dtype).name not in FLOATS:
            raise rule_error(
                f"causal_conv1d takes {', '.join(FLOATS)}", f"{name} of {describe(given)}", "use .astype(...)"
            )
    if x is None or len(x.shape) != 3:
        raise rule_error("x has three axes: batch, time, channels", describe(x), "reshape x")
    batch, _, channels = x.shape
    if w is None or len(w.shape) != 2 or w.shape[0] < 1 or w.shape[1] != channels:
        raise rule_error(
            f"The filters are [width, channels], here (width, {channels}) with a width of 1 or more", describe(w),
            "check the layout: one row for each tap, the last one for the present input",
        )  # fmt: skip
    if bias is not None and bias.shape != (channels,):
        raise rule_error(f"The bias is one number a channel, ({channels},)", describe(bias), "reshape it")
    wanted = (batch, w.shape[0] - 1, channels)
    if state is not None and state.shape != wanted:
        raise rule_error(f"The initial state is the last inputs, {wanted}", describe(state), "pass the last width - 1")
    activation = call.params["activation"]
    if activation is not None and activation not in ACTIVATIONS:
        raise unknown_name("activation of causal_conv1d", activation, ACTIVATIONS)


def check_grad(call: Call) -> None:
    check(call)
    x, d_out, d_state = call.need("x"), call["d_out"], call["d_state"]
    if d_out is None or d_out.shape != x.shape:
        raise rule_error(f"The result's cotangent has x's shape, {x.shape}", describe(d_out), "pass the gradient of y")
    wanted = (x.shape[0], call.need("w").shape[0] - 1, x.shape[2])
    if d_state is not None and d_state.shape != wanted:
        raise rule_error(f"The last inputs' cotangent is {wanted}", describe(d_state), "pass the gradient of the state")


def cost(call: Call) -> Cost:
    """Each operand read once, y (and the state) written once; two operations a tap."""
    x, w = call.need("x"), call.need("w")
    numbers = math.prod(x.shape)
    moved = sum(map(nbytes, call.args)) + nbytes(x)
    if call.params["return_final_state"]:
        moved += x.shape[0] * (w.shape[0] - 1) * x.shape[2] * x.dtype.itemsize
    return Cost(vector_flops=max(2.0 * w.shape[0] * numbers, 1.0), bytes=float(moved), dtype="float32")


def cost_grad(call: Call) -> Cost:
    """Each operand read once and its gradient written once; two operations a tap for the inputs and for the filters."""
    x, w = call.need("x"), call.need("w")
    moved = sum(map(nbytes, call.args)) + sum(map(nbytes, call.args[:4]))
    return Cost(
        vector_flops=max(4.0 * w.shape[0] * math.prod(x.shape), 1.0), bytes=float(moved), dtype="float32"
    )  # fmt: skip


def tolerance(call: Call) -> float:
    """Rounding y: a unit of x's type. The initial state, where it is wider than x, is rounded to x's type: one more,
    by which a kernel that begins without one may take a short formula for the activation (2^-11, in bfloat16).
    In float32: a sum of a few taps, four units for an unlucky draw of each, and the activation's eight roundings.

    The filters' gradient sums over batch and time, and grows with the root of their number.
    """
    x, w = call.need("x"), call.need("w")
    wide = unit_roundoff(jnp.promote_types(jnp.float32, x.dtype))
    # y is rounded to x's type, each gradient to its own operand's.
    narrow = max(unit_roundoff(v.dtype) for v in call.args if v is not None)
    return 2 * narrow + wide * (8 + 4 * w.shape[0] + (x.shape[0] * x.shape[1]) ** 0.5)
