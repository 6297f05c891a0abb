"""What a call of route must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, unit_roundoff

GATES = ("softmax", "sigmoid", "softmax_topk")
MOST_EXPERTS, MOST_CHOSEN = 256, 16  # that the kernels take


def rows_of(x: Any) -> int:
    """Tokens of the logits, whatever axes they are on."""
    return math.prod(x.shape[:-1])


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    logits, bias = call["logits"], call["bias"]
    if logits is None or len(logits.shape) == 0 or logits.shape[-1] == 0:
        raise rule_error(
            "The logits are one number an expert, [tokens, experts]", describe(logits), "pass such an array"
        )
    for name, given in (("logits", logits), ("bias", bias)):
        if given is not None and np.dtype(given.dtype).name not in FLOATS:
            raise rule_error(
                f"route takes {', '.join(FLOATS)}", f"{name} of {describe(given)}", f"convert {name} with .astype(...)"
            )
    experts = logits.shape[-1]
    if bias is not None and bias.shape != (experts,):
        raise rule_error(
            f"The bias is one number an expert, ({experts},)", describe(bias), "check the logits' last axis"
        )
    check_options(experts, **call.params)


def check_options(experts: int, *, top_k: Any, gate: Any, normalize: Any, scale: Any) -> None:
    if gate not in GATES:
        raise unknown_name("gate", gate, GATES)
    if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or not 1 <= top_k <= experts:
        raise rule_error(
            f"top_k is a whole number from 1 to the number of experts, {experts}", repr(top_k), "choose within it"
        )
    if not isinstance(normalize, bool):
        raise rule_error("normalize is True or False", repr(normalize), "pass a bool")
    if gate == "softmax_topk" and not normalize:
        raise rule_error(
            'The weights of gate="softmax_topk" sum to one by themselves',
            "normalize=False",
            'leave normalize, or use gate="softmax" for weights that do not',
        )
    number = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not (number and math.isfinite(scale) and scale > 0):
        raise rule_error("The scale is a finite number above 0", repr(scale), "pass a positive float")


def top_k_of(call: Call) -> int:
    return cast("int", call.params["top_k"])


def cost(call: Call) -> Cost:
    """The logits read once, weights and indices written once. The choice itself is four operations an expert and
    choice; the reference's others are three an expert (with a bias eight: every score is made), and twelve a choice."""
    logits, bias = call.need("logits"), call["bias"]
    top_k = top_k_of(call)
    rows, experts = rows_of(logits), logits.shape[-1]
    wide = jnp.promote_types(jnp.float32, logits.dtype).itemsize
    moved = rows * experts * logits.dtype.itemsize + rows * top_k * (wide + 4)
    if bias is not None:
        moved += bias.shape[0] * bias.dtype.itemsize
    each = experts * ((3 if bias is None else 8) + 4 * top_k) + 12 * top_k
    flops = float(max(rows, 1) * each)
    return Cost(vector_flops=flops, bytes=float(moved), dtype="float32")


def tolerance(call: Call) -> float:
    """The relative error that right weights stay under, and the share of indices that may differ.

    Weights are float32: an exponential of a difference of logits is off by the difference's own rounding, about
    16 units for logits up to 16, by as much again where a kernel turns it into a power of two, and a sum over the
    experts and a quotient add a few. Indices follow the logits exactly; with a bias, scores are rounded before they
    are compared, and one pair in some hundred thousand is closer than that.
    """
    unit = unit_roundoff(jnp.promote_types(jnp.float32, call.need("logits").dtype))
    logits = call.need("logits")
    return unit * (40 + 4 * logits.shape[-1] ** 0.5) + (1e-5 if call["bias"] is not None else 0.0)


def refuses_sizes(call: Call) -> str | None:
    """What neither kernel takes."""
    experts, top_k = call.need("logits").shape[-1], top_k_of(call)
    if experts > MOST_EXPERTS or top_k > MOST_CHOSEN:
        return f"it takes up to {MOST_EXPERTS} experts and top_k up to {MOST_CHOSEN}; not {top_k} of {experts}"
    return None
