"""What a call of the grouped products must be, what it costs, and how exact its result is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.layers.grouped.reference import ACTIVATIONS


class Sizes(NamedTuple):
    """Rows, K, N and groups: lhs is [rows, K], a weight [groups, K, N]."""

    rows: int
    inner: int
    columns: int
    groups: int


def sizes(call: Call) -> Sizes:
    rows, inner = call.need("lhs").shape
    (groups,) = call.need("group_sizes").shape
    if "d_out" in call.op.operands:
        return Sizes(rows, inner, call.need("d_out").shape[1], groups)
    if "gate" in call.op.operands:
        return Sizes(rows, inner, call.need("gate").shape[2], groups)
    return Sizes(rows, inner, call.need("rhs").shape[1 if call.params["transpose_rhs"] else 2], groups)


def floats(call: Call) -> list[Any]:
    """The operands but for the group sizes."""
    return [x for x in call.args[:-1] if x is not None]


def check(call: Call) -> None:
    """grouped_gemm: refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    lhs, rhs, _ = _check_operands(call, ranks=(2, 3))
    flipped = call.params["transpose_rhs"]
    wanted, found = lhs.shape[1], rhs.shape[2 if flipped else 1]
    if wanted != found:
        raise rule_error(
            f"rhs is [groups, {'N, K' if flipped else 'K, N'}] with K the columns of lhs",
            f"K = {wanted} in lhs and {found} in rhs ({call.signature})",
            "check the shapes, or set transpose_rhs",
        )
    _check_groups(call, "rhs")


def check_weights(call: Call) -> None:
    lhs, d_out, _ = _check_operands(call, ranks=(2, 2))
    if lhs.shape[0] != d_out.shape[0]:
        raise rule_error(
            "lhs [M, K] and d_out [M, N] have the same rows",
            f"{lhs.shape[0]} and {d_out.shape[0]}",
            "pass the cotangent of the product of this lhs",
        )


def check_gated(call: Call) -> None:
    lhs, gate, up, _ = _check_operands(call, ranks=(2, 3, 3))
    if gate.shape != up.shape or gate.shape[1] != lhs.shape[1]:
        raise rule_error(
            f"gate and up are both [groups, K, F] with K = {lhs.shape[1]}, the columns of lhs",
            f"gate of {describe(gate)} and up of {describe(up)}",
            "check the shapes",
        )
    _check_groups(call, "gate")
    if call.params["activation"] not in ACTIVATIONS:
        raise unknown_name(f"activation of {call.op.name}", call.params["activation"], ACTIVATIONS)


def _check_operands(call: Call, ranks: tuple[int, ...]) -> tuple[Any, ...]:
    """Presence, types and axes; `ranks` are those of the operands before the group sizes."""
    name = call.op.name
    for operand, x, rank in zip(call.op.operands, call.args, (*ranks, 1), strict=True):
        if x is None:
            raise rule_error(f"{name} takes {', '.join(call.op.operands)}", f"no {operand}", f"pass {operand}")
        if len(x.shape) != rank:
            raise rule_error(
                f"{name} takes {operand} with {rank} {'axis' if rank == 1 else 'axes'}", describe(x), "reshape it"
            )
        if operand == "group_sizes":
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise rule_error("group_sizes are whole numbers", describe(x), "convert them with .astype(jnp.int32)")
            if x.shape[0] == 0:
                raise rule_error("There is one group or more", describe(x), "pass at least one size")
        elif np.dtype(x.dtype).name not in FLOATS:
            raise rule_error(
                f"{name} takes {', '.join(FLOATS)}",
                f"{operand} of {describe(x)}",
                f"convert {operand} with .astype(...)",
            )
    out = call.params.get("out_dtype")
    if out is not None and str(out) not in FLOATS:
        raise unknown_name(f"out_dtype of {name}", out, FLOATS)
    return call.args


def _check_groups(call: Call, operand: str) -> None:
    held, counted = call.need(operand).shape[0], call.need("group_sizes").shape[0]
    if held != counted:
        raise rule_error(
            f"{operand} has one weight for each group size",
            f"{held} weights and {counted} sizes",
            "pass as many sizes as weights, 0 for an empty group",
        )


def out_dtype_of(call: Call) -> Any:
    chosen = call.params.get("out_dtype")
    return jnp.dtype(str(chosen)) if chosen else jnp.result_type(*floats(call))


def cost(call: Call) -> Cost:
    """2·M·K·N operations a weight; every operand read once and every result written once."""
    rows, inner, columns, groups = sizes(call)
    moved = sum(map(nbytes, call.args))
    written = groups * inner * columns if "d_out" in call.op.operands else rows * columns
    products = 2 if "gate" in call.op.operands else 1
    results = 3 if call.params.get("return_products") else 1
    moved += results * written * out_dtype_of(call).itemsize
    flops = 2.0 * products * max(rows * inner * columns, 1)
    return Cost(matrix_flops=flops, bytes=float(moved), dtype=np.dtype(jnp.result_type(*floats(call))).name)


def _product_error(call: Call, length: int) -> float:
    """The relative error of a sum of `length` products before its result is rounded.

    Sums in float32 grow as sqrt(length) units of float32 (four of them leave room for an unlucky draw), and a float32
    product at default precision may be computed from inputs rounded to the matrix unit's own type (TF32 on a GPU,
    bfloat16 on a TPU): two roundings a product.
    """
    inputs = jnp.result_type(*floats(call))
    unit = 0.0
    asked = matmul_precision()
    if inputs == jnp.float32 and asked not in ("highest", "float32"):
        unit = {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(call.target.platform, 0.0)
        if asked in ("bfloat16", "BF16_BF16_F32"):
            unit = 2.0**-8
    return 4 * unit_roundoff(jnp.promote_types(jnp.float32, inputs)) * max(length, 1) ** 0.5 + 2 * unit


def tolerance(call: Call) -> float:
    """Rounding the output once, and the error of a sum of K products."""
    return unit_roundoff(out_dtype_of(call)) + _product_error(call, sizes(call).inner)


def tolerance_weights(call: Call) -> float:
    """Rounding the output once, and the error of a sum of up to M products."""
    return unit_roundoff(out_dtype_of(call)) + _product_error(call, sizes(call).rows)


def tolerance_gated(call: Call) -> float:
    """Rounding the output once, eight roundings in float32 for the activation, and the errors of both products.

    The gate's error passes through the activation. It grows by the slope, 1.13 at most, where the activation is about
    as large as its argument; the sigmoid is 1 at most, and moves by a quarter of the error of a gate that is about
    sqrt(K) for operands of size one.
    """
    inner = sizes(call).inner
    product = _product_error(call, inner)
    passed = max(1.0, inner**0.5 / 4) if call.params["activation"] == "sigmoid" else 1.13
    wide = unit_roundoff(jnp.promote_types(jnp.float32, out_dtype_of(call)))
    return unit_roundoff(out_dtype_of(call)) + 8 * wide + (1 + passed) * product
