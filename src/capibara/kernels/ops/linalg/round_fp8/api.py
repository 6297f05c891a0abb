"""round_fp8: the op behind the operands of `fp8_products`, and the function that runs it."""

from __future__ import annotations

import jax

from capibara.kernels.core.dispatch import run, takes_kernel
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.linalg.round_fp8 import hopper, rules
from capibara.kernels.ops.linalg.round_fp8.cases import CASES
from capibara.kernels.ops.linalg.round_fp8.reference import reference
from capibara.kernels.ops.linalg.round_fp8.xla import xla

ROUND_FP8 = Op(
    "round_fp8",
    family="linalg",
    reference=reference,
    operands=("x", "factor"),
    params={"dtype": "float8_e4m3fn"},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    partition=rules.PARTITION,
    cases=CASES,
)
ROUND_FP8.implement(Implementation("xla", xla), hopper.IMPLEMENTATION, Implementation("reference", reference))


def both_ways(x: jax.Array, factor: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """(x [rows, columns] times the factor in fp8, its transpose, its largest magnitude), read once; None where no
    kernel would take it, and XLA finds out by itself what it needs."""
    operands = (x, factor.reshape(1))
    if not takes_kernel(call_of(ROUND_FP8, operands, {"dtype": dtype})):
        return None
    values, turned, largest = run(ROUND_FP8, operands, {"dtype": dtype})
    return values, turned, largest[0]


register(ROUND_FP8)
