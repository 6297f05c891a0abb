"""What encode_int8 and decode_int8 take, what they cost, and how they are batched and split over a mesh."""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Cost, Partition, Prefer, describe, unit_roundoff

FLOATS = ("bfloat16", "float16", "float32")
# Float32 arithmetic around a code, as a share of a step: the reciprocal of the scale and the product with it are each
# off by 2^-24 of up to 127 steps, and so is the product that decodes.
ROUNDING = 2.0**-15


def block_of(call: Call) -> int:
    return cast("int", call.params["block"])


def check_block(block: Any) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise rule_error("block_size is a positive whole number of values that share a scale", repr(block), "use 256")


def check_sum(op: str) -> None:
    if op not in ("sum", "mean"):
        raise rule_error(
            "A compressed all-reduce is a sum or a mean: rounded codes do not keep which value is the largest",
            f"op={op!r}",
            "use all_reduce or bucketed_all_reduce, which are exact",
        )


def check_compressible(leaf: Any) -> None:
    if leaf.dtype.name not in FLOATS:
        raise rule_error(
            f"Compression is for {', '.join(FLOATS)}", describe(leaf), "reduce such leaves with bucketed_all_reduce"
        )


def check_encode(call: Call) -> None:
    check_block(call.params["block"])
    x, seed = call.need("x"), call["seed"]
    if x.dtype.name not in FLOATS:
        raise rule_error(f"encode_int8 takes {', '.join(FLOATS)}", describe(x), "convert it with x.astype('float32')")
    if not x.shape:
        raise rule_error("encode_int8 cuts the last axis into blocks", describe(x), "pass x.reshape(1)")
    if seed is not None and (seed.shape != (2,) or seed.dtype.name not in ("uint32", "int32")):
        raise rule_error(
            "The seed is two 32-bit words",
            describe(seed),
            "pass jax.random.bits(key, (2,), 'uint32'), or key to encode_int8",
        )


def check_decode(call: Call) -> None:
    check_block(call.params["block"])
    codes, scales, block = call.need("codes"), call.need("scales"), block_of(call)
    if codes.dtype.name != "int8" or not codes.shape:
        raise rule_error("decode_int8 takes int8 codes with an axis", describe(codes), "pass encode_int8's codes")
    wanted = (*codes.shape[:-1], -(-codes.shape[-1] // block))
    if scales.shape != wanted or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise rule_error(
            f"Codes {describe(codes)} in blocks of {block} have float scales of shape {wanted}",
            describe(scales),
            "pass encode_int8's scales, and its block_size",
        )
    if str(call.params["out_dtype"]) not in (*FLOATS, "float64"):
        raise rule_error(f"out_dtype is one of {', '.join(FLOATS)}", call.params["out_dtype"], "use 'float32'")


def cost(call: Call) -> Cost:
    """Numbers and codes moved once, a float32 for each block; a handful of operations a number."""
    numbers = call.args[0]
    assert numbers is not None
    size = numbers.size
    lead = size // numbers.shape[-1] if size else 0
    scales = lead * -(-numbers.shape[-1] // block_of(call)) * 4
    if "seed" in call.op.operands:
        seed = call["seed"]
        work = (11 if seed is None else 28) * size
        moved = size * (numbers.dtype.itemsize + 1) + scales + (0 if seed is None else 8)
    else:
        work = 4 * size
        moved = size * (1 + jnp.dtype(str(call.params["out_dtype"])).itemsize) + scales
    return Cost(vector_flops=float(max(work, 1)), bytes=float(moved), dtype="float32")


def tolerance_encode(call: Call) -> float:
    """The share of codes that may differ, and the relative error of a scale.

    A number within `ROUNDING` of half a step may go either way, on each side of the half; a scale is one rounded
    product.
    """
    return 2 * ROUNDING + 2 * unit_roundoff(jnp.float32)


def tolerance_decode(call: Call) -> float:
    """One product in float32, rounded to the type that was asked for."""
    return 2 * unit_roundoff(jnp.float32) + unit_roundoff(jnp.dtype(str(call.params["out_dtype"])))


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Any, prefer: Prefer) -> Any:
    """vmap is one more leading axis; with a seed, whose draws count the blocks, one element after another."""
    if "seed" in op.operands and arrays[1] is not None:
        return one_by_one(op, batched, arrays, params, prefer)
    full = (
        x if is_batched or x is None else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(arrays, batched, strict=True)
    )
    return run(op, tuple(full), params, prefer=prefer)


def _lead(call: Call) -> str:
    operand = call.args[0]
    assert operand is not None
    return " ".join(f"r{axis}" for axis in range(len(operand.shape) - 1))


def rule_encode(call: Call) -> str:
    rows = _lead(call)
    seed = "" if call["seed"] is None else ", s"
    return f"{rows} c{seed} -> {rows} c, {rows} k"


def rule_decode(call: Call) -> str:
    rows = _lead(call)
    return f"{rows} c, {rows} k -> {rows} c"


def whole_encode(call: Call) -> tuple[str, ...]:
    """Blocks stay whole; with a seed so does all, for a block's draws hang on its place."""
    return ("c", "k", "s", *_lead(call).split()) if call["seed"] is not None else ("c", "k")


PARTITION_ENCODE = Partition(rule_encode, replicated=whole_encode)
PARTITION_DECODE = Partition(rule_decode, replicated=lambda call: ("c", "k"))
