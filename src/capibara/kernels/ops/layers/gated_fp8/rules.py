"""What a call of gated_fp8 or of its gradient may be, its cost, and how far from exact it may come."""

from __future__ import annotations

import math

import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, Partition, nbytes, unit_roundoff
from capibara.kernels.ops.layers.activation.formulas import KINDS
from capibara.kernels.ops.linalg.round_fp8.rules import local
from capibara.precision import FP8_LARGEST


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    *arrays, factors = call.args
    name, results = call.op.name, _results(call)
    first = arrays[0]
    same = all(a is not None and first is not None and (a.shape, a.dtype) == (first.shape, first.dtype) for a in arrays)
    if not same or first is None or len(first.shape) != 2 or np.dtype(first.dtype).name not in FLOATS:
        raise rule_error(
            f"{name} takes {', '.join(call.op.operands[:-1])} as matrices of one shape and type of {', '.join(FLOATS)}",
            call.signature,
            "reshape or convert them",
        )
    if factors is None or factors.shape != (results,) or np.dtype(factors.dtype).name != "float32":
        raise rule_error(f"{name} has {results} float32 to multiply by", call.signature, f"pass them as [{results}]")
    if call.params["kind"] not in KINDS:
        raise unknown_name(f"kind of {name}", str(call.params["kind"]), KINDS)
    if call.params["dtype"] not in FP8_LARGEST:
        raise unknown_name(f"dtype of {name}", str(call.params["dtype"]), tuple(FP8_LARGEST))


def _results(call: Call) -> int:
    return 2 if call.op.name.endswith("grad") else 1


def cost(call: Call) -> Cost:
    """Every operand read once; each result written twice, in a byte a number. Operations are those of silu and of
    rounding, as XLA counts them."""
    x, results = call.need("gate"), _results(call)
    count = math.prod(x.shape)
    read = sum(nbytes(a) for a in call.args[:-1] if a is not None)
    return Cost(
        vector_flops=(11.0 if results == 1 else 24.0) * count,
        bytes=float(read + 2 * results * count),
        dtype=np.dtype(x.dtype).name,
    )


def tolerance(call: Call) -> float:
    """As of a rounding to fp8, and another where what is rounded lies on the other side of a tie: it is itself rounded
    to the operands' type, an eighth of fp8's unit away at the most."""
    return 2.5 * unit_roundoff(np.dtype(str(call.params["dtype"])))


def _partition(operands: str, results: str) -> Partition:
    return Partition(lambda call: f"{operands}, o -> {results}, o", replicated=lambda call: ("o",), local=local)


PARTITION = _partition("m n, m n", "m n, n m")
PARTITION_GRAD = _partition("m n, m n, m n", "m n, n m, m n, n m")
