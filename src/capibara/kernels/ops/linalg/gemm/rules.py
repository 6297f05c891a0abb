"""What a call of gemm may be, its sizes, its cost, and how far from exact it may come."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.hardware.facts import Chip
from capibara.hardware.products import fill
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import Call, CallEfficiency, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.linalg.gemm.reference import ACTIVATIONS

LAX_PRECISIONS = ("default", "high", "highest")
MANY_NUMBERS = 1_000_000
DTYPES = ("bfloat16", "float16", "float32", "float64")


def sizes(call: Call) -> tuple[int, int, int, int]:
    """(batch, M, N, K); batch is 1 when no operand has one."""
    a, b = call.need("a").shape, call.need("b").shape
    m, k = (a[-1], a[-2]) if call.params["transpose_a"] else (a[-2], a[-1])
    n = b[-2] if call.params["transpose_b"] else b[-1]
    return (a[0] if len(a) == 3 else b[0] if len(b) == 3 else 1), m, n, k


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    a, b, bias, residual = call.args
    arrived = call.signature
    if a is None or b is None:
        raise rule_error("gemm multiplies two arrays", arrived, "pass both a and b")
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and np.dtype(x.dtype).name not in DTYPES:
            raise rule_error(
                f"gemm takes {', '.join(DTYPES)}", f"{name} of {describe(x)}", f"convert {name} with .astype(...)"
            )
    for name, x in (("a", a), ("b", b)):
        if len(x.shape) not in (2, 3):
            raise rule_error(
                "gemm's operands are matrices, or batches of matrices [B, rows, columns]",
                f"{name} of {describe(x)}",
                f"give {name} two or three axes",
            )
    if len(a.shape) == len(b.shape) == 3 and a.shape[0] != b.shape[0]:
        raise rule_error("The batch axes of a and b are equal", f"{a.shape[0]} and {b.shape[0]}", "broadcast one")
    k_a = a.shape[-2 if call.params["transpose_a"] else -1]
    k_b = b.shape[-1 if call.params["transpose_b"] else -2]
    if k_a != k_b:
        raise rule_error(
            "The contracted axes of a (its columns) and b (its rows) are equal",
            f"{k_a} and {k_b} ({arrived})",
            "check the shapes, or set transpose_a or transpose_b",
        )
    activation = call.params["activation"]
    if activation is not None and activation not in ACTIVATIONS:
        raise unknown_name("activation of gemm", activation, ACTIVATIONS)
    if call.params["precision"] not in (None, *LAX_PRECISIONS):
        raise unknown_name("matrix precision", call.params["precision"], LAX_PRECISIONS)
    count, m, n, _ = sizes(call)
    batched = len(a.shape) == 3 or len(b.shape) == 3
    if bias is not None and bias.shape not in {(n,), (count, n) if batched else (n,)}:
        raise rule_error(f"The bias is a row of N = {n} numbers", describe(bias), f"reshape it to ({n},)")
    expected = (count, m, n) if batched else (m, n)
    if residual is not None and residual.shape != expected:
        raise rule_error(f"The residual has the output's shape {expected}", describe(residual), "broadcast it first")


def out_dtype_of(call: Call) -> Any:
    chosen = call.params["out_dtype"]
    return jnp.dtype(str(chosen)) if chosen else jnp.result_type(call.need("a"), call.need("b"))


def cost(call: Call) -> Cost:
    """2·B·M·N·K operations; every operand read once and the output written once."""
    count, m, n, k = sizes(call)
    moved = sum(map(nbytes, call.args))
    moved += count * m * n * out_dtype_of(call).itemsize
    dtype = np.dtype(jnp.result_type(call.need("a"), call.need("b"))).name
    return Cost(matrix_flops=2.0 * count * m * n * k, bytes=float(moved), dtype=dtype)


def efficiency(call: Call, chip: Chip) -> CallEfficiency:
    return CallEfficiency(filled=fill(chip, sizes(call)), source="predicted: tiles of the chip's matrix units")


def leaves_residual_to_xla(residual: Any, operands: Any, out: Any, platform: str) -> bool:
    """Whether XLA's form asks for the product in the residual's own 16-bit type, and adds it then: XLA hands cuBLAS the
    sum with it.

    cuBLAS adds to its float32 sums and rounds once; of a float32 product XLA makes three passes: on an H200 452 us for
    406 at 30720x4096x1024, 213 for 193 at 4096x4096x3584, 48 for 35 at 9330x1536x768, and at some shapes as long. From
    1 to 7 million numbers it was 1.09 to 1.51 times as fast, too, at nine shapes; of fewer, level or slower. Where the
    compiler takes a kernel of its own instead of cuBLAS (seen at 392x2048), that rounds the product first, as it does
    in `a @ b + residual`.
    """
    large = residual.size >= MANY_NUMBERS
    return large and operands == out == residual.dtype and out.itemsize == 2 and platform == "gpu"


def leaves_bias_to_xla(a: Any, b: Any, bias: Any, out: Any, platform: str) -> bool:
    """Whether XLA's form asks for the product in the bias's own 16-bit type, and adds it then: XLA hands cuBLAS the row
    with it.

    cuBLAS adds it to its float32 sums and rounds once, where a float32 product is written and read again by a pass that
    adds. A bias for each batch element is no row to it, and neither is one below a product that comes out transposed
    (`a` shared by the batch): the first XLA adds in a pass of its own, for the second it writes the whole matrix out.
    Where the compiler takes a kernel of its own instead of cuBLAS, that rounds the product first, as it does in
    `a @ b + bias`.
    """
    is_row = len(bias.shape) == 1 and len(a.shape) >= len(b.shape)
    return is_row and a.dtype == b.dtype == out == bias.dtype and out.itemsize == 2 and platform == "gpu"


def tolerance(call: Call) -> float:
    """The relative error, in norm and at the worst element against the largest, that a right result stays under.

    The inputs are exact, so rounding the output once costs one unit roundoff of its type. Products accumulated in
    float32 grow as sqrt(K) units of float32 (four of them leave room for an unlucky draw), and a float32 product
    at default precision may be computed from inputs rounded to the matrix unit's own type (TF32 on a GPU,
    bfloat16 on a TPU): two roundings a product. Where XLA is left to add a bias or a residual it may round the product
    first: one unit more.
    """
    _, _, _, k = sizes(call)
    a, b, bias, residual = call.need("a"), call.need("b"), call["bias"], call["residual"]
    inputs = jnp.result_type(a, b)
    accumulated = unit_roundoff(jnp.promote_types(jnp.float32, inputs)) * max(k, 1) ** 0.5
    unit = 0.0
    asked = call.params["precision"] or matmul_precision()
    if inputs == jnp.float32 and asked not in ("highest", "float32"):
        unit = {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(call.target.platform, 0.0)
        if asked in ("bfloat16", "BF16_BF16_F32"):
            unit = 2.0**-8
    out, left = out_dtype_of(call), False
    alone = call.params["activation"] is None and (bias is None) != (residual is None)
    if bias is not None and alone:
        left = leaves_bias_to_xla(a, b, bias, out, call.target.platform)
    if residual is not None and alone:
        left = leaves_residual_to_xla(residual, inputs, out, call.target.platform)
    return (2 if left else 1) * unit_roundoff(out) + 4 * accumulated + 2 * unit
