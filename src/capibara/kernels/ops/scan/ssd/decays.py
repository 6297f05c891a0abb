"""Log decays in a form whose running sums can be subtracted from each other.

A pair's decay is the exponential of a difference of running sums, and a sum that a strong decay has made large has few
digits left for the weak ones after it. So the strongest are bounded where nothing is left of a state anyway, and the
whole numbers are summed apart from the rest: their sums and differences are exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

NOTHING = -104.0  # the exponential of it, and of all below, is 0 in float32; bfloat16 has the number itself


def bounded(log_decay: jax.Array) -> jax.Array:
    """No less than `NOTHING`, -inf too: a difference of two infinities would be a NaN.

    >>> bounded(jnp.array([-0.5, -1e9, -jnp.inf])).tolist()
    [-0.5, -104.0, -104.0]
    """
    return jnp.maximum(log_decay, NOTHING)


def running_sums(log_decay: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """(of the nearest whole numbers, of what is left): the first without a rounding, the second small.

    >>> [v.tolist() for v in running_sums(jnp.array([-0.25, -100.0, -0.5]), 0)]
    [[0.0, -100.0, -100.0], [-0.25, -0.25, -0.75]]
    """
    wholes = lax.stop_gradient(jnp.round(log_decay))
    return jnp.cumsum(wholes, axis), jnp.cumsum(log_decay - wholes, axis)
