"""Two arrays side by side as one: 64 columns of the gate, the 64 of up beside them, the next 64 of the gate, and so on.

A tile of a product then has both numbers that an activation needs, and one product takes the place of two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WIDTH = 64
"""Columns of one kind that lie together: 128 bytes of 16-bit numbers, a row of what Hopper's tensor cores read."""


def paired(gate: jax.Array, up: jax.Array) -> jax.Array:
    """[..., columns] twice as [..., 2 · columns]; columns are a multiple of `WIDTH`.

    >>> both = paired(jnp.zeros((1, 128)), jnp.ones((1, 128)))
    >>> both[0, [0, 63, 64, 127, 128, 192]].tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    """
    *lead, columns = gate.shape
    first, second = (a.reshape(*lead, columns // WIDTH, 1, WIDTH) for a in (gate, up))
    # A choice, and not jnp.stack: on an H200 XLA makes 56 us of it at 2048 x 8192, float32 to bfloat16, and 84 of that;
    # to cast both arrays takes 53.
    is_gate = jnp.arange(2)[:, None] == 0
    return jnp.where(is_gate, first, second).reshape(*lead, 2 * columns)


def unpaired(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gate's columns and up's, of what `paired` made.

    >>> gate, up = unpaired(paired(jnp.zeros((1, 128)), jnp.ones((1, 128))))
    >>> float(gate.max()), float(up.min())
    (0.0, 1.0)
    """
    *lead, columns = pairs.shape
    cut = pairs.reshape(*lead, columns // (2 * WIDTH), 2, WIDTH)
    return tuple(cut[..., number, :].reshape(*lead, columns // 2) for number in (0, 1))  # type: ignore[return-value]
