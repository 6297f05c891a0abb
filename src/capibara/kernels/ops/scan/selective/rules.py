"""What a call of the selective scan must be, what it costs, and how exact its result is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.scan.selective.reference import wide_type


def check_floats(what: str, given: Mapping[str, Any]) -> None:
    """Refuse an operand that is not of FLOATS, by its name; an absent one is None."""
    for name, x in given.items():
        if x is not None and np.dtype(x.dtype).name not in FLOATS:
            raise rule_error(
                f"{what} takes {', '.join(FLOATS)}", f"{name} of {describe(x)}", f"convert {name} with .astype(...)"
            )


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one.

    >>> flag("dt_softplus", np.False_)
    False
    """
    if not isinstance(value, bool | np.bool_):
        raise rule_error(f"{name} is True or False", repr(value), "pass one of the two")
    return bool(value)


class Sizes(NamedTuple):
    batch: int
    time: int
    channels: int
    states: int  # of a channel: N


def sizes_of(call: Call) -> Sizes:
    batch, time, channels = call.need("x").shape
    return Sizes(batch, time, channels, call.need("A").shape[-1])


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    check_floats("A selective scan", dict(zip(call.op.operands, call.args, strict=True)))
    x, decay = call["x"], call["A"]
    if x is None or len(x.shape) != 3:
        raise rule_error("x is [batch, time, channels]", describe(x), "give it these three axes")
    batch, time, channels = x.shape
    if decay is None or len(decay.shape) != 2 or decay.shape[0] != channels or 0 in decay.shape:
        raise rule_error(
            f"A is [channels, N], here ({channels}, N) with both 1 or more",
            describe(decay),
            "check its axes",
        )
    states = decay.shape[1]
    shapes = {
        "dt": (batch, time, channels),
        "B": (batch, time, states),
        "C": (batch, time, states),
        "D": (channels,),
        "z": (batch, time, channels),
        "dt_bias": (channels,),
        "initial_state": (batch, channels, states),
        "d_out": (batch, time, channels),
        "d_final": (batch, channels, states),
    }
    for name, shape in shapes.items():
        if name not in call.op.operands:
            continue
        given = call[name]
        if given is None and name not in ("dt", "B", "C", "d_out"):
            continue
        if given is None or given.shape != shape:
            raise rule_error(f"{name} is {shape}, by x and A", describe(given), "check its axes")


def cost(call: Call) -> Cost:
    """Each operand read once and the results written once; six operations for each number of each state."""
    n = sizes_of(call)
    moved = sum(map(nbytes, call.args)) + nbytes(call.need("x"))
    if call.params["return_final_state"]:
        moved += 4 * n.batch * n.channels * n.states
    flops = 6.0 * max(n.batch * n.time, 1) * n.channels * n.states
    return Cost(vector_flops=flops, bytes=float(moved), dtype="float32")


def cost_grad(call: Call) -> Cost:
    """The states once more, and about twice as many operations for their cotangents; a gradient for each operand."""
    n = sizes_of(call)
    moved = sum(map(nbytes, call.args)) + sum(nbytes(call[name]) for name in call.op.operands[:9])
    flops = 19.0 * max(n.batch * n.time, 1) * n.channels * n.states
    return Cost(vector_flops=flops, bytes=float(moved), dtype="float32")


def _growth(call: Call) -> float:
    """Roundings of a recurrence in units of the wide type.

    A state is a sum over the steps before it, with weights of at most 1 where A is negative: errors of the terms add
    as the square root of their number, four for an unlucky draw. Sixteen more for the exponentials, the products and
    the gate, and the sum over a channel's states.
    """
    n = sizes_of(call)
    return 16 + 4 * n.time**0.5 + 4 * n.states**0.5


def tolerance(call: Call) -> float:
    """One rounding to x's type, and what the recurrence adds in the wide type."""
    x = call.need("x")
    return unit_roundoff(x.dtype) + unit_roundoff(wide_type(x)) * _growth(call)


def tolerance_grad(call: Call) -> float:
    """Each gradient is rounded to its operand's type. Two recurrences feed it, and some are sums over the batch, the
    time or the channels besides."""
    n = sizes_of(call)
    coarsest = max(unit_roundoff(v.dtype) for v in call.args if v is not None)
    summed = 4 * (n.batch * max(n.time, 1)) ** 0.5 + 4 * n.channels**0.5
    return 2 * coarsest + unit_roundoff(wide_type(call.need("x"))) * (2 * _growth(call) + summed)
