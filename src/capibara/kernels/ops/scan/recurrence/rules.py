"""What a call of the linear recurrence must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Cost, describe, nbytes, unit_roundoff

REALS = ("bfloat16", "float16", "float32", "float64")
COMPLEXES = ("complex64", "complex128")


class Sizes(NamedTuple):
    batch: int
    steps: int
    channels: int


def sizes_of(call: Call) -> Sizes:
    return Sizes(*call.need("a").shape)


def is_complex(x: Any) -> bool:
    return np.dtype(x.dtype).name in COMPLEXES


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    _check_operands(call, whole=("b",), one_step=("initial",))
    _check_flags(call, "reverse", "return_final")


def check_grad(call: Call) -> None:
    """The forward's rules, and shapes of what came out of it."""
    _check_operands(call, whole=("h", "d_h"), one_step=("initial", "d_final"))
    _check_flags(call, "reverse")


def _check_operands(call: Call, whole: tuple[str, ...], one_step: tuple[str, ...]) -> None:
    a = call["a"]
    if a is None or len(a.shape) != 3:
        raise rule_error(
            "The recurrence runs along the middle axis of [batch, time, channels]",
            f"a of {describe(a)}",
            "reshape it, or call capibara.kernels.linear_recurrence, which does",
        )
    for name in whole:
        given = call[name]
        if given is None or given.shape != a.shape:
            raise rule_error(f"{name} has a's shape {a.shape}", describe(given), "broadcast one to the other's shape")
    for name in one_step:
        given, wanted = call[name], (a.shape[0], a.shape[2])
        if given is not None and given.shape != wanted:
            raise rule_error(
                f"{name} is one number a channel of each batch, {wanted}", describe(given), "broadcast it, or check it"
            )
    present = [(name, x) for name, x in zip(call.op.operands, call.args, strict=True) if x is not None]
    for name, x in present:
        if np.dtype(x.dtype).name not in REALS + COMPLEXES:
            raise rule_error(
                f"linear_recurrence takes {', '.join(REALS + COMPLEXES)}",
                f"{name} of {describe(x)}",
                f"convert {name} with .astype(...)",
            )
    if len({is_complex(x) for _, x in present}) > 1:
        raise rule_error(
            "The operands are all real or all complex", call.signature, "convert the real ones with .astype(...)"
        )


def _check_flags(call: Call, *names: str) -> None:
    for name in names:
        if not isinstance(call.params[name], bool):
            raise rule_error(f"{name} is True or False", repr(call.params[name]), "pass a bool")


def cost(call: Call) -> Cost:
    """a and b read once and h written once, with the states at both ends; a product and a sum a number."""
    b = call.need("b")
    moved = sum(map(nbytes, call.args)) + nbytes(b)
    if call.params["return_final"]:
        moved += b.shape[0] * b.shape[2] * np.dtype(jnp.promote_types(jnp.float32, b.dtype)).itemsize
    flops = (8.0 if is_complex(b) else 2.0) * max(math.prod(b.shape), 1)
    return Cost(vector_flops=flops, bytes=float(moved), dtype="float32")


def cost_grad(call: Call) -> Cost:
    """a, h and the cotangent read once, da and db written once; two products and a sum a number."""
    a = call.need("a")
    moved = sum(map(nbytes, call.args)) + nbytes(a) + nbytes(call["h"]) + nbytes(call["initial"])
    flops = (14.0 if is_complex(a) else 3.0) * max(math.prod(a.shape), 1)
    return Cost(vector_flops=flops, bytes=float(moved), dtype="float32")


def tolerance(call: Call) -> float:
    """The relative error that a right result stays under, for decays of size up to 1.

    One unit roundoff of b's type for rounding h. In float32 every step rounds a product and a sum (up to four times
    that for complex numbers), and what is rounded at one step is carried on by the decays after it: at worst undamped
    over all steps, as the products of decays that a parallel scan forms are. Roundings are independent, so their sum
    grows with the square root of the steps, times four for an unlucky draw; where decays are below 1 it stops growing
    after 1 / (1 - a) steps, so this is an upper end.
    """
    b = call.need("b")
    return unit_roundoff(b.dtype) + drift(jnp.promote_types(jnp.float32, b.dtype), sizes_of(call).steps)


def drift(dtype: Any, steps: int) -> float:
    """How far two ways of summing may be apart after so many steps in a state's type; see `tolerance`."""
    each = 4 if np.dtype(dtype).name in COMPLEXES else 2
    return unit_roundoff(dtype) * (8 + 4 * each * steps**0.5)


def tolerance_grad(call: Call) -> float:
    """As the forward's, of the recurrence that runs the other way, and a product more; rounded to a's type and h's."""
    a, h = call.need("a"), call.need("h")
    wide = unit_roundoff(jnp.promote_types(jnp.float32, h.dtype))
    each = 4 if is_complex(h) else 2
    coarsest = max(unit_roundoff(x.dtype) for x in (a, h))
    return coarsest + wide * (12 + 4 * each * sizes_of(call).steps ** 0.5)
