"""The linear recurrence in plain JAX, one step after another: the specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.varying import vary_like


def state_type(x: Any) -> Any:
    """What the state is kept in: float32, or wider where x is."""
    return jnp.promote_types(jnp.float32, x.dtype)


def start_of(initial: jax.Array | None, like: jax.Array, wide: Any) -> jax.Array:
    """The state before the first step, [batch, channels]: zero where none is given."""
    batch, _, channels = like.shape
    start = jnp.zeros((batch, channels), wide) if initial is None else initial.astype(wide)
    return vary_like(start, like)


def shifted(x: jax.Array, edge: jax.Array, reverse: bool) -> jax.Array:
    """x [batch, time, channels] as one step before saw it; `edge` [batch, channels] stands before the first."""
    edge = edge.astype(x.dtype)[:, None]
    return jnp.concatenate([x[:, 1:], edge] if reverse else [edge, x[:, :-1]], axis=1)


def reference(
    a: jax.Array,
    b: jax.Array,
    initial: jax.Array | None = None,
    *,
    reverse: bool = False,
    return_final: bool = False,
) -> Any:
    """h_t = a_t · h_{t-1} + b_t along the middle axis of [batch, time, channels], rounded to b's type.

    `initial` [batch, channels] is the state before the first step, zero where it is absent. With `reverse` time runs
    backwards, h_t = a_t · h_{t+1} + b_t. The state is in float32 (complex64 for complex operands), and so is the last
    one, which `return_final` returns beside h.
    """
    wide = state_type(b)

    def step(state: jax.Array, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        decay, added = operands
        state = decay.astype(wide) * state + added.astype(wide)
        return state, state.astype(b.dtype)

    by_time = (jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0))
    final, h = lax.scan(step, start_of(initial, b, wide), by_time, reverse=reverse)
    h = jnp.moveaxis(h, 0, 1)
    return (h, final) if return_final else h


def reference_grad(
    a: jax.Array,
    h: jax.Array,
    initial: jax.Array | None,
    d_h: jax.Array,
    d_final: jax.Array | None = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any, Any]:
    """(da, db, d_initial) of a recurrence that made `h`; d_initial is None where there was no initial state.

    The gradient is a recurrence that runs the other way: G_t = d_h_t + a_{t+1} · G_{t+1}, from `d_final` after the last
    step. db = G, da_t = G_t · h_{t-1}, and d_initial = a_0 · G_0.
    """
    wide = state_type(h)

    def step(carried: jax.Array, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        decay, flow = operands
        total = flow.astype(wide) + carried
        return decay.astype(wide) * total, total

    by_time = (jnp.moveaxis(a, 1, 0), jnp.moveaxis(d_h, 1, 0))
    carried, total = lax.scan(step, start_of(d_final, h, wide), by_time, reverse=not reverse)
    total = jnp.moveaxis(total, 0, 1)
    if h.shape[1]:
        before = shifted(h.astype(wide), start_of(initial, h, wide), reverse)
    else:
        before = h.astype(wide)
    da = (total * before).astype(a.dtype)
    return da, total.astype(h.dtype), None if initial is None else carried.astype(initial.dtype)
