"""The recurrence of state space duality step by step: its specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.scan.selective.reference import wide_type


def per_head(v: jax.Array, heads: int) -> jax.Array:
    """[..., groups, N] as [..., heads, N]: the heads of a group follow each other and share its rows."""
    *batch, groups, states = v.shape
    # Not jnp.repeat, which does not know how its result lies on mesh axes of type Explicit.
    spread = jnp.broadcast_to(v[..., None, :], (*batch, groups, heads // groups, states))
    return spread.reshape(*batch, heads, states)


def advance(h: Any, x: Any, log_decay: Any, B: Any, C: Any, dt: Any) -> tuple[Any, Any]:
    """One step in one type: h [..., heads, N, P] to its next value and y [..., heads, P]."""
    given = x if dt is None else dt[..., None] * x
    h = jnp.exp(log_decay)[..., None, None] * h + B[..., :, None] * given[..., None, :]
    return h, (C[..., :, None] * h).sum(-2)


def first_state(x: jax.Array, B: jax.Array, initial_state: jax.Array | None) -> jax.Array:
    """[batch, heads, N, P]"""
    wide = wide_type(x)
    if initial_state is None:
        batch, _, heads, width = x.shape
        return vary_like(jnp.zeros((batch, heads, B.shape[-1], width), wide), x)
    return initial_state.astype(wide)


def with_input(y: jax.Array, x: jax.Array, D: jax.Array | None) -> jax.Array:
    """y + D·x, in y's type."""
    return y if D is None else y + D.astype(y.dtype)[..., None] * x.astype(y.dtype)


def reference(
    x: jax.Array,
    log_decay: jax.Array,
    B: jax.Array,
    C: jax.Array,
    dt: jax.Array | None = None,
    D: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    return_final_state: bool = False,
) -> Any:
    """h = exp(log_decay)·h + dt·B·xᵀ, y = Cᵀ·h + D·x for each head, one step of time after another; y has x's type.

    Without dt it is 1. The state is float32 (wider for wider operands), [batch, heads, N, P]; `return_final_state`
    returns the last one too.
    """
    wide, heads = wide_type(x), x.shape[2]
    over_time = [x, log_decay, per_head(B, heads), per_head(C, heads)] + ([] if dt is None else [dt])

    def step(h: Any, now: Any) -> tuple[Any, Any]:
        return advance(h, *now, *([None] if dt is None else []))

    moved = tuple(jnp.moveaxis(v.astype(wide), 1, 0) for v in over_time)
    last, y = lax.scan(step, first_state(x, B, initial_state), moved)
    out = with_input(jnp.moveaxis(y, 0, 1), x, D).astype(x.dtype)
    return (out, last) if return_final_state else out


def reference_grad(
    x: jax.Array,
    log_decay: jax.Array,
    B: jax.Array,
    C: jax.Array,
    dt: jax.Array | None,
    D: jax.Array | None,
    initial_state: jax.Array | None,
    d_out: jax.Array,
    d_final: jax.Array | None = None,
) -> tuple[Any, ...]:
    """The cotangents of the seven operands, by differentiating the reference; None for an absent one."""

    def forward(*operands: Any) -> Any:
        return reference(*operands, return_final_state=True)

    (y, last), pull = jax.vjp(forward, x, log_decay, B, C, dt, D, initial_state)
    flow = jnp.zeros_like(last) if d_final is None else d_final.astype(last.dtype)
    return pull((d_out.astype(y.dtype), flow))
