"""Products of one input and several weights of heads, whose gradients are two products in place of two each.

The input's gradient is then one sum along all heads. As a sum of each weight's own it is written once for each, and
added up in a pass of its own; here what comes back to the outputs is put side by side, by the passes that make it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

__all__ = ["products_of_heads"]


@jax.custom_vjp
def products_of_heads(x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
    """x [..., inputs] times each of weights [inputs, heads, width]: [..., heads, width]."""
    return [jnp.tensordot(x, weight, 1) for weight in weights]


def _forward(
    x: jax.Array, weights: Sequence[jax.Array]
) -> tuple[list[jax.Array], tuple[jax.Array, Sequence[jax.Array]]]:
    weights = jax.lax.optimization_barrier(list(weights))
    return products_of_heads(x, weights), (x, weights)


def _backward(
    kept: tuple[jax.Array, Sequence[jax.Array]], flows: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    x, weights = kept
    # Along the heads, not as rows of numbers: XLA makes one pass of this join and of what turns queries and keys back.
    flow, weight = jnp.concatenate(flows, -2), jnp.concatenate(weights, -2)
    rows = tuple(range(x.ndim - 1))
    d_weights = jnp.tensordot(x, flow, (rows, rows))
    ends = list(itertools.accumulate(each.shape[-2] for each in weights))
    return jnp.tensordot(flow, weight, ((-2, -1), (-2, -1))), jnp.split(d_weights, ends[:-1], axis=-2)


products_of_heads.defvjp(_forward, _backward)
