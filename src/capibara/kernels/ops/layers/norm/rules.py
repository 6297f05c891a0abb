"""What a call of norm must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff

KINDS = ("layer", "rms")
MOST_COLUMNS = 65536  # that the kernels take


class Sizes(NamedTuple):
    """Groups of rows that share a scale (one, but under vmap), the rows of each, and the columns."""

    groups: int
    rows: int
    columns: int


def sizes(x: Any, scale: Any, bias: Any) -> Sizes:
    """Of arrays, or of their shapes."""
    *lead, columns = x.shape
    grouped = any(v is not None and len(v.shape) == 2 for v in (scale, bias))
    groups = lead[0] if grouped else 1
    return Sizes(groups, math.prod(lead) // groups if groups else 0, columns)


def sizes_of(call: Call) -> Sizes:
    return sizes(call.need("x"), call["scale"], call["bias"])


def writes_sum(call: Call) -> bool:
    """Whether the sum of x and the residual is written; where there is no residual it is x, which is there."""
    return bool(call.params["return_residual"]) and call["residual"] is not None


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    x = _check_rows_and_vectors(call)
    residual = call["residual"]
    if residual is not None and residual.shape != x.shape:
        raise rule_error(
            f"The residual has x's shape {x.shape}", describe(residual), "broadcast it, or check which of the two it is"
        )


def check_grad(call: Call) -> None:
    """The forward's rules, and shapes of what came out of it."""
    x = _check_rows_and_vectors(call)
    for name in ("d_out", "d_sum"):
        given = call[name]
        if (given is not None or name == "d_out") and (given is None or given.shape != x.shape):
            raise rule_error(f"{name} has x's shape {x.shape}", describe(given), "pass the cotangent of the output")
    wanted = ("mean", "rstd") if call.params["kind"] == "layer" else ("rstd",)
    for name in ("mean", "rstd"):
        given = call[name]
        if name not in wanted:
            if given is not None:
                raise rule_error("RMS norm has no mean", describe(given), "pass None")
        elif given is None or given.shape != x.shape[:-1]:
            raise rule_error(
                f"{name} is one number a row, {x.shape[:-1]}", describe(given), "call norm with return_stats=True"
            )


def _check_rows_and_vectors(call: Call) -> Any:
    x, kind = call["x"], call.params["kind"]
    if kind not in KINDS:
        raise unknown_name("kind of norm", kind, KINDS)
    if x is None or len(x.shape) == 0 or x.shape[-1] == 0:
        raise rule_error(
            "norm is over the last axis of x, of length 1 or more", describe(x), "pass an array [..., columns]"
        )
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and np.dtype(given.dtype).name not in FLOATS:
            raise rule_error(
                f"norm takes {', '.join(FLOATS)}", f"{name} of {describe(given)}", f"convert {name} with .astype(...)"
            )
    columns = x.shape[-1]
    vectors = [(name, call[name]) for name in ("scale", "bias") if call[name] is not None]
    for name, vector in vectors:
        allowed = {(columns,)} | ({(x.shape[0], columns)} if len(x.shape) > 1 else set())
        if vector is None or vector.shape not in allowed:
            raise rule_error(
                f"The {name} is one number a column, ({columns},)",
                describe(vector),
                "check x's last axis, or reshape it",
            )
    if len({len(cast(Any, vector).shape) for _, vector in vectors}) > 1:
        raise rule_error("The scale and the bias have one shape", call.signature, "broadcast one to the other's")
    if kind == "rms" and call["bias"] is not None:
        raise rule_error("RMS norm has no bias", describe(call["bias"]), "add it afterwards, or use layer norm")
    eps, offset = call.params["eps"], call.params["offset"]
    if not (_is_number(eps) and 0 < cast(float, eps) < math.inf):
        raise rule_error("eps is a finite number above 0", repr(eps), "pass a small positive float, e.g. 1e-6")
    if not (_is_number(offset) and math.isfinite(cast(float, offset))):
        raise rule_error("The offset is a finite number", repr(offset), "pass a float; 1.0 for Gemma's weights")
    if offset and call["scale"] is None:
        raise rule_error("The offset is added to the scale", f"offset={offset} and no scale", "pass the scale")
    return x


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def cost(call: Call) -> Cost:
    """Each operand read once, y (and the sum, and the statistics) written once; the reference's operations."""
    x = call.need("x")
    written = nbytes(x) * (2 if writes_sum(call) else 1)
    if call.params["return_stats"]:
        written += 4 * math.prod(x.shape[:-1]) * (2 if call.params["kind"] == "layer" else 1)
    moved = sum(map(nbytes, call.args)) + written
    each = (9.0 if call.params["kind"] == "layer" else 7.0) + sum(other is not None for other in call.args[1:])
    return Cost(vector_flops=each * max(math.prod(x.shape), 1), bytes=float(moved), dtype="float32")


def cost_grad(call: Call) -> Cost:
    """Each operand read once, a gradient written for x and for each vector; the reference's operations."""
    x = call.need("x")
    moved = sum(map(nbytes, call.args)) + sum(nbytes(call[name]) for name in ("x", "scale", "bias"))
    each = 18.0 if call.params["kind"] == "layer" else 13.0
    each += 4.0 * (call["scale"] is not None) + (call["bias"] is not None) + (call["d_sum"] is not None)
    return Cost(vector_flops=each * max(math.prod(x.shape), 1), bytes=float(moved), dtype="float32")


def tolerance(call: Call) -> float:
    """The relative error that a right result stays under.

    One unit roundoff of x's type for rounding y. With a residual two more: the sum is rounded before it is
    normalised, which moves each number by up to one unit of itself, and y by as much times rms/std of the row (1 for
    RMS norm, near 1 for a mean near 0). In float32: sums over a row grow with the square root of its length, four of
    them for an unlucky draw, and eight roundings for the root, the products and the bias.
    """
    x = call.need("x")
    units = 1 if call["residual"] is None else 3
    wide = unit_roundoff(jnp.promote_types(jnp.float32, x.dtype))
    return units * unit_roundoff(x.dtype) + wide * (8 + 4 * x.shape[-1] ** 0.5)


def tolerance_grad(call: Call) -> float:
    """Rounding dx, or dscale and dbias to their own types: two units of the coarsest. In float32: the statistics and
    two sums a row (twice the forward's), and sums over the rows, which grow with the root of their number."""
    _, rows, columns = sizes_of(call)
    x = call.need("x")
    coarsest = max(unit_roundoff(v.dtype) for v in (x, call["scale"], call["bias"]) if v is not None)
    wide = unit_roundoff(jnp.promote_types(jnp.float32, x.dtype))
    return 2 * coarsest + wide * (16 + 8 * columns**0.5 + 4 * rows**0.5)
