"""What a call of round_fp8 may be, its cost, and how far from exact it may come."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import FLOATS, Call, Cost, Partition, Prefer, describe, nbytes, unit_roundoff
from capibara.precision import FP8_LARGEST


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x, factor = call.args
    if x is None or len(x.shape) != 2 or np.dtype(x.dtype).name not in FLOATS:
        raise rule_error(f"round_fp8 takes a matrix of {', '.join(FLOATS)}", call.signature, "reshape or convert it")
    if factor is None or factor.shape != (1,) or np.dtype(factor.dtype).name != "float32":
        given = "none" if factor is None else describe(factor)
        raise rule_error("The factor is one float32, of shape (1,)", given, "use jnp.reshape(1 / scale, 1)")
    if call.params["dtype"] not in FP8_LARGEST:
        raise unknown_name("dtype of round_fp8", str(call.params["dtype"]), tuple(FP8_LARGEST))


def cost(call: Call) -> Cost:
    """Every number is read once, multiplied, held between two others, and its magnitude compared with the largest one;
    it is written twice, in a byte each."""
    x = call.need("x")
    count = math.prod(x.shape)
    return Cost(vector_flops=6.0 * count, bytes=float(nbytes(x) + 2 * count), dtype=np.dtype(x.dtype).name)


def tolerance(call: Call) -> float:
    """One rounding to fp8, and another where the product with the factor was rounded to x's type and met a tie."""
    return 2 * unit_roundoff(np.dtype(str(call.params["dtype"])))


def local(op: Op, arrays: tuple[Any, ...], params: dict[str, Any], axes: dict[str, Any], prefer: Prefer) -> Any:
    """One device's part; the largest magnitude is that of all."""
    *made, largest = run(op, arrays, params, prefer=prefer, local=True)
    over = tuple(name for names in axes.values() for name in names)
    return *made, lax.pmax(largest, over) if over else largest


PARTITION = Partition(lambda call: "m n, o -> m n, n m, o", replicated=lambda call: ("o",), local=local)
