"""What a call of state space duality must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.scan.selective.reference import wide_type
from capibara.kernels.ops.scan.selective.rules import check_floats

COUNTED_CHUNK = 64  # the chunk whose products the cost counts; longer ones do more of them


class Sizes(NamedTuple):
    batch: int
    time: int
    heads: int
    width: int  # of a head: P
    groups: int
    states: int  # N


def sizes_of(call: Call) -> Sizes:
    batch, time, heads, width = call.need("x").shape
    return Sizes(batch, time, heads, width, *call.need("B").shape[2:])


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    check_floats("State space duality", dict(zip(call.op.operands, call.args, strict=True)))
    x, b = call["x"], call["B"]
    if x is None or len(x.shape) != 4 or 0 in x.shape[2:]:
        raise rule_error("x is [batch, time, heads, P]", describe(x), "give it these four axes")
    batch, time, heads, width = x.shape
    if b is None or len(b.shape) != 4 or b.shape[:2] != (batch, time) or 0 in b.shape[2:] or heads % b.shape[2]:
        raise rule_error(
            f"B is [batch, time, groups, N], ({batch}, {time}, groups, N), its groups dividing the {heads} heads",
            describe(b),
            "check its axes",
        )
    states = b.shape[3]
    shapes = {
        "log_decay": (batch, time, heads),
        "C": b.shape,
        "dt": (batch, time, heads),
        "D": (heads,),
        "initial_state": (batch, heads, states, width),
        "d_out": x.shape,
        "d_final": (batch, heads, states, width),
    }
    for name, shape in shapes.items():
        if name not in call.op.operands:
            continue
        given = call[name]
        if given is None and name not in ("log_decay", "C", "d_out"):
            continue
        if given is None or given.shape != shape:
            raise rule_error(f"{name} is {shape}, by x and B", describe(given), "check its axes")
    chunk = call.params.get("chunk")
    if chunk is not None and not (isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0):
        raise rule_error("block_size is a positive whole number, or None", repr(chunk), "use block_size=64")


def _products(call: Call) -> float:
    """The chunked form's: a group's scores within a chunk; their product with x, the state's part, the next state."""
    n = sizes_of(call)
    each = 2 * COUNTED_CHUNK * (n.groups * n.states + n.heads * n.width) + 4 * n.heads * n.states * n.width
    return float(max(n.batch * n.time, 1) * each)


def cost(call: Call) -> Cost:
    """Each operand read once and the results written once; the products of chunks of 64."""
    n, x = sizes_of(call), call.need("x")
    moved = sum(map(nbytes, call.args)) + nbytes(x)
    if call.params["return_final_state"]:
        moved += 4 * n.batch * n.heads * n.states * n.width
    return Cost(matrix_flops=_products(call), bytes=float(moved), dtype=np.dtype(x.dtype).name)


def cost_grad(call: Call) -> Cost:
    """Two products for each of the forward pass, of which nothing is kept: all of its own again, but that of the scores
    with x. A gradient for each operand."""
    moved = sum(map(nbytes, call.args)) + sum(nbytes(call[name]) for name in call.op.operands[:7])
    x = call.need("x")
    flops = 3 * _products(call) - 2.0 * COUNTED_CHUNK * math.prod(x.shape)
    return Cost(matrix_flops=flops, bytes=float(moved), dtype=np.dtype(x.dtype).name)


def _rounding(call: Call) -> float:
    """Of the products' operands: x's, B's and C's types promoted together."""
    return unit_roundoff(jnp.result_type(*(call.need(name).dtype for name in ("x", "B", "C"))))


def _growth(call: Call) -> float:
    """Of sums over time and over N: as the square root of their lengths, four for an unlucky draw; sixteen for the
    exponentials and products."""
    n = sizes_of(call)
    return 16 + 4 * n.time**0.5 + 4 * n.states**0.5


def tolerance(call: Call) -> float:
    """Four roundings: of the result, and of what the matrix units are given: scores, weighted inputs, states. In the
    wide type, what the sums and the recurrence add."""
    x = call.need("x")
    narrow = max(unit_roundoff(x.dtype), _rounding(call))
    return 4 * narrow + unit_roundoff(wide_type(x)) * _growth(call)


def tolerance_grad(call: Call) -> float:
    """Twice the forward's, whose roundings it meets again on the way back, and the sums over batch and time."""
    n = sizes_of(call)
    coarsest = max(unit_roundoff(v.dtype) for v in call.args if v is not None)
    wide = unit_roundoff(wide_type(call.need("x")))
    return 8 * max(coarsest, _rounding(call)) + wide * (2 * _growth(call) + 4 * (n.batch * max(n.time, 1)) ** 0.5)
