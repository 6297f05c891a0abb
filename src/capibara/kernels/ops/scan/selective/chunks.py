"""Time cut into chunks that are scanned side by side, and the states that each of them starts from.

An array over time becomes [steps, batch, chunks, ...]. One pass over the steps from a state of zero gives what each
chunk adds; a short recurrence over the chunks then gives the state that each really starts from. All that is kept for
later is one state a chunk: no array has an axis for time and one for N.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SHORT = 32  # up to so many steps are one chunk: a second pass would cost more than it saves
FEWEST_STEPS = 16  # of a chunk otherwise
REVERSED_STEPS = 256  # of all chunks whose states the backward pass holds at a time


class Cut(NamedTuple):
    """How time is cut: `chunks` of `steps`, of which the backward pass takes `together` at a time."""

    time: int
    steps: int
    chunks: int
    together: int


def cut_time(time: int) -> Cut:
    """About as many chunks as steps: few of either one after another, and few states to keep."""
    if time <= SHORT:
        return Cut(time, time, 1, 1)
    steps = max(FEWEST_STEPS, 1 << math.ceil(math.log2(time) / 2))
    chunks = math.ceil(time / steps)
    together = max(1, min(chunks, REVERSED_STEPS // steps))
    return Cut(time, steps, math.ceil(chunks / together) * together, together)


def split(x: jax.Array, cut: Cut) -> jax.Array:
    """[batch, time, k] as [steps, batch, chunks, k]; zeros past the end, which leave a state as it is."""
    padded = jnp.pad(x, ((0, 0), (0, cut.steps * cut.chunks - cut.time), (0, 0)))
    return jnp.moveaxis(padded.reshape(x.shape[0], cut.chunks, cut.steps, x.shape[-1]), 2, 0)


def joined(x: jax.Array, cut: Cut) -> jax.Array:
    """The inverse of `split`."""
    _, batch, _, width = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(batch, cut.steps * cut.chunks, width)[:, : cut.time]


def step_state(h: Any, x: Any, delta: Any, A: Any, B: Any) -> Any:
    """The next state. States are [..., N, channels], A [N, channels]: channels fill the lanes of a vector unit."""
    return jnp.exp(delta[..., None, :] * A) * h + (delta * x)[..., None, :] * B[..., :, None]


def chunk_decays(delta: jax.Array, A: jax.Array) -> jax.Array:
    """What a whole chunk multiplies its first state by: [batch, chunks, N, channels]."""
    return jnp.exp(delta.sum(0)[..., None, :] * A)


def over_chunks(added: jax.Array, decays: jax.Array, first: jax.Array, *, reverse: bool = False) -> tuple[Any, Any]:
    """The state before each chunk (after, in reverse) and the one at the far end: a recurrence over the chunks."""

    def pass_on(h: Any, now: Any) -> tuple[Any, Any]:
        add, decay = now
        return decay * h + add, h

    moved = (jnp.moveaxis(added, 1, 0), jnp.moveaxis(decays, 1, 0))
    last, met = lax.scan(pass_on, first, moved, reverse=reverse)
    return jnp.moveaxis(met, 0, 1), last


def chunk_starts(x: Any, delta: Any, A: Any, B: Any, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state that each chunk starts from, [batch, chunks, N, channels], and the state after the last."""
    zero = jnp.zeros_like(first)[:, None] * jnp.ones((x.shape[2], 1, 1), first.dtype)

    def step(h: Any, now: Any) -> tuple[Any, None]:
        return step_state(h, now[0], now[1], A, now[2]), None

    ends, _ = lax.scan(step, zero, (x, delta, B))
    return over_chunks(ends, chunk_decays(delta, A), first)
