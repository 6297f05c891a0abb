"""The activations and their slopes by way of one tanh, which Hopper has an instruction for: good for bfloat16.

The instruction is within TANH_ERROR of tanh, relative to it, so a probability made of it within half of that. Near the
end of a tail, where the probability itself is no larger, its digits are lost: absolute errors are what is kept small.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from capibara.kernels.pallas.hopper import LOG2E

TANH_ERROR = 2.0**-11
# The normal distribution is (1 + tanh(x · P(x²))) / 2. P was fitted for the least absolute error, which is 1.9e-5; past
# the square's limit, where the distribution is within 1e-14 of 0 or 1, it is held, since its last term would turn it.
_NORMAL = (0.7977178329, 0.03679825740, -0.0003158073132)
_SQUARE_LIMIT = 60.0
_DENSITY = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def _share(kind: str, x: Any) -> Any:
    """What of x is kept: the probability or the sigmoid that gelu, gelu_tanh and silu multiply it by."""
    if kind == "gelu":
        square = jnp.minimum(x * x, _SQUARE_LIMIT)
        inner = x * ((square * _NORMAL[2] + _NORMAL[1]) * square + _NORMAL[0])
    elif kind == "gelu_tanh":
        inner = x * (x * x * (_TANH_SCALE * _TANH_CUBIC) + _TANH_SCALE)
    else:
        inner = 0.5 * x
    return 0.5 * jnp.tanh(inner) + 0.5


def value(kind: str, x: Any) -> Any:
    """The activation of x, which is float32."""
    match kind:
        case "gelu" | "gelu_tanh" | "silu":
            return x * _share(kind, x)
        case "sigmoid":
            return _share(kind, x)
        case "tanh":
            return jnp.tanh(x)
        case "relu":
            return jnp.maximum(x, 0.0)
        case _:
            return x


def value_and_slope(kind: str, x: Any) -> tuple[Any, Any]:
    """The activation of x and its derivative."""
    match kind:
        case "gelu":
            share = _share(kind, x)
            return x * share, share + x * (_DENSITY * jnp.exp2(x * x * (-0.5 * LOG2E)))
        case "gelu_tanh":
            share = _share(kind, x)
            # Held where share · (1 - share) has long been 0, since infinity times that is not a number.
            inner = jnp.minimum(x * x, _SQUARE_LIMIT) * (6 * _TANH_SCALE * _TANH_CUBIC) + 2 * _TANH_SCALE
            return x * share, share + x * share * (1.0 - share) * inner
        case "silu":
            share = _share(kind, x)
            return x * share, share + x * share * (1.0 - share)
        case "sigmoid":
            share = _share(kind, x)
            return share, share * (1.0 - share)
        case "tanh":
            result = jnp.tanh(x)
            return result, 1.0 - result * result
        case "relu":
            return jnp.maximum(x, 0.0), jnp.where(x > 0, 1.0, 0.0)
        case _:
            return x, None
