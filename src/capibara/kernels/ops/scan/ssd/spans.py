"""The gradient of log decays, from what each chunk sums.

A step's decay is in every path that spans it: from an earlier step of its chunk to a later one, from the state that the
chunk starts from to a later step, from an earlier step to the state that the chunk leaves, and from the one state to
the other. Each kind is summed by itself. The usual shorter form, a running sum of y·dy - x·dx, is a difference of large
numbers where little passes a step, and has no digits left there; here a step that forgets everything gets exactly 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def over_spans(pairs: jax.Array, onward: jax.Array, outward: jax.Array, through: jax.Array) -> jax.Array:
    """[..., steps]: of the pairs around each step, of what reaches each step from the chunk's start, of what each step
    gives to the chunk's end; `through` [...] is one number a chunk, from its start to its end.

    >>> one, two = jnp.array([0.0, 1.0, 2.0]), jnp.array([10.0, 20.0, 40.0])
    >>> over_spans(jnp.zeros(3), one, two, jnp.array(100.0)).tolist()
    [103.0, 113.0, 132.0]
    """
    later = jnp.flip(jnp.cumsum(jnp.flip(onward, -1), -1), -1)
    earlier = jnp.cumsum(outward, -1)[..., :-1]
    earlier = jnp.concatenate([jnp.zeros_like(outward[..., :1]), earlier], -1)
    return pairs + later + earlier + through[..., None]
