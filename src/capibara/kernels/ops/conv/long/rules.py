"""What a call of long_conv must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff

PRECISIONS = ("float32", "bfloat16")


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, h = call.args
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and np.dtype(given.dtype).name not in FLOATS:
            raise rule_error(f"long_conv takes {', '.join(FLOATS)}", f"{name} of {describe(given)}", "use .astype(...)")
    if x is None or len(x.shape) != 3:
        raise rule_error("x has three axes: batch, time, channels", describe(x), "reshape x")
    if h is None or len(h.shape) != 2 or h.shape[1] != x.shape[2] or h.shape[0] < 1:
        raise rule_error(
            f"The filters are [taps, channels], here (taps, {x.shape[2]}) with a tap or more", describe(h),
            "give each channel one filter",
        )  # fmt: skip
    if call.params["precision"] not in (None, *PRECISIONS):
        raise unknown_name("precision of long_conv", call.params["precision"], PRECISIONS)


def cost(call: Call) -> Cost:
    """Three real transforms of twice the time, at 2.5 n log2 n each, and the product of two of them; every operand read
    once, the result written."""
    x, h = call.need("x"), call.need("h")
    batch, time, channels = x.shape
    points = max(time + min(h.shape[0], time) - 1, 2)
    flops = 2.5 * points * math.log2(points) * channels * (2 * batch + 1) + 3.0 * points * channels * batch
    moved = sum(map(nbytes, (x, x, h)))
    return Cost(vector_flops=max(flops, 1.0), bytes=float(moved), dtype="float32")


def tolerance(call: Call) -> float:
    """Rounding y (or a gradient) to its type: two units. Transforms in float32 lose a few units in each of their
    log2 n levels, three transforms after each other; a direct sum loses the root of its length, which is more.

    In "bfloat16" the operands of the products (of the signals, or of each transform) are rounded to bfloat16: eight
    units of it for the roundings of the three transforms.
    """
    x, h = call.need("x"), call.need("h")
    wide = unit_roundoff(jnp.promote_types(jnp.float32, x.dtype))
    taps = min(h.shape[0], max(x.shape[1], 1))
    points = max(x.shape[1] + taps, 2)
    narrow = max(unit_roundoff(x.dtype), unit_roundoff(h.dtype))
    rounded = 8 * 2.0**-8 if call.params["precision"] == "bfloat16" else 0.0
    return 2 * narrow + wide * (12 * math.log2(points) + 4 * taps**0.5) + rounded
