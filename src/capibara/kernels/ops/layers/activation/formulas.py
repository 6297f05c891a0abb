"""The activations and their slopes, in few operations: what the implementations compute.

The reference has JAX's own functions. Here the normal distribution of gelu is the one that is worked out anew: JAX's
`erfc` costs more operations than the memory of a chip leaves time for.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

KINDS = ("gelu", "gelu_tanh", "silu", "relu", "sigmoid", "tanh", "identity")

# The lower tail of the normal distribution is exp(-x²/2) · t · R(t) with t = 1 / (1 + p·|x|). R was fitted for the
# least relative error on |x| up to 15, where the tail leaves float32: (p, coefficients from the constant up).
_SHORT_TAIL = (0.3747665940, (0.1490183251, 0.1571743112, 0.08494953028, 0.1985011793, -0.08963257293))
_LONG_TAIL = (
    0.3464823228,
    (0.1382138947, 0.1385471813, 0.1181593832, 0.1093201329, -0.03177681689, 0.1766555595, -0.264630615, 0.1438975939,
     -0.02838631111),
)  # fmt: skip
SHORT_TAIL_ERROR = 4e-5  # relative; for results of 16 bits, whose own rounding is ten times that or more
_DENSITY = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def normal_cdf(x: jax.Array, short: bool) -> tuple[jax.Array, jax.Array]:
    """(the probability that a normal number is below x, exp(-x²/2)); the tail to a few units of its own size."""
    falling = jnp.exp(-0.5 * x * x)
    if x.dtype == jnp.float64:
        return 0.5 * lax.erfc(-x * math.sqrt(0.5)), falling
    step, coefficients = _SHORT_TAIL if short else _LONG_TAIL
    t = 1 / (1 + step * jnp.abs(x))
    tail = jnp.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        tail = tail * t + coefficient
    tail = tail * t * falling
    return jnp.where(x < 0, tail, 1 - tail), falling


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def value(kind: str, x: jax.Array, short: bool) -> jax.Array:
    """The activation of x, which is float32 or wider. `short`: the result is for 16 bits."""
    return value_and_slope(kind, x, short)[0]


def value_and_slope(kind: str, x: jax.Array, short: bool) -> tuple[Any, Any]:
    """The activation of x and its derivative; what is not used costs nothing once compiled."""
    match kind:
        case "gelu":
            below, falling = normal_cdf(x, short)
            return x * below, below + x * falling * _DENSITY
        case "gelu_tanh":
            # tanh is written by way of the sigmoid: (1 + tanh(u)) / 2 = sigmoid(2u).
            square = x * x
            part = _sigmoid(2 * _TANH_SCALE * x * (1 + _TANH_CUBIC * square))
            inner = 2 * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * square)
            return x * part, part + x * part * (1 - part) * inner
        case "silu":
            part = _sigmoid(x)
            return x * part, part + x * part * (1 - part)
        case "relu":
            return jnp.maximum(x, 0), jnp.where(x > 0, 1.0, 0.0).astype(x.dtype)
        case "sigmoid":
            part = _sigmoid(x)
            return part, part * (1 - part)
        case "tanh":
            part = jnp.tanh(x)
            return part, 1 - part * part
        case _:
            return x, jnp.ones_like(x)
