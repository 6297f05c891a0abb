"""The selective scan step by step: its specification, and what its implementations share around the recurrence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.varying import vary_like


def wide_type(x: Any) -> Any:
    """What the state is kept and every sum is made in: float32, or x's own type where that is wider."""
    return jnp.promote_types(jnp.float32, x.dtype)


def step_sizes(dt: jax.Array, dt_bias: jax.Array | None, dt_softplus: bool, wide: Any) -> jax.Array:
    """dt as the recurrence uses it: with its bias, and through softplus where that is asked for."""
    made = dt.astype(wide)
    if dt_bias is not None:
        made = made + dt_bias.astype(wide)
    return jax.nn.softplus(made) if dt_softplus else made


def gated(y: jax.Array, x: jax.Array, D: jax.Array | None, z: jax.Array | None) -> jax.Array:
    """(y + D·x) · silu(z), in y's type."""
    if D is not None:
        y = y + D.astype(y.dtype) * x.astype(y.dtype)
    return y if z is None else y * jax.nn.silu(z.astype(y.dtype))


def advance(h: Any, x: Any, delta: Any, A: Any, B: Any, C: Any) -> tuple[Any, Any]:
    """One step in one type: h [..., channels, N] to its next value and y [..., channels]."""
    h = jnp.exp(delta[..., None] * A) * h + (delta * x)[..., None] * B[..., None, :]
    return h, (h * C[..., None, :]).sum(-1)


def first_state(x: jax.Array, A: jax.Array, initial_state: jax.Array | None) -> jax.Array:
    wide = wide_type(x)
    if initial_state is None:
        return vary_like(jnp.zeros((x.shape[0], x.shape[-1], A.shape[-1]), wide), x)
    return initial_state.astype(wide)


def reference(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    dt_softplus: bool = False,
    return_final_state: bool = False,
) -> Any:
    """h = exp(dt·A)·h + dt·x·Bᵀ, y = (h·C + D·x) · silu(z), one step of time after another; y has x's type.

    With a `dt_bias` it is added to dt, and with `dt_softplus` dt is softplus of that. The state is float32 (wider for
    wider operands), [batch, channels, N]; `return_final_state` returns the last one too.
    """
    wide = wide_type(x)
    delta = step_sizes(dt, dt_bias, dt_softplus, wide)
    first, decay = first_state(x, A, initial_state), A.astype(wide)

    def step(h: Any, now: Any) -> tuple[Any, Any]:
        x_t, delta_t, b, c = now
        return advance(h, x_t, delta_t, decay, b, c)

    over_time = tuple(jnp.moveaxis(v.astype(wide), 1, 0) for v in (x, delta, B, C))
    last, y = lax.scan(step, first, over_time)
    out = gated(jnp.moveaxis(y, 0, 1), x, D, z).astype(x.dtype)
    return (out, last) if return_final_state else out


def reference_grad(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    z: jax.Array | None,
    dt_bias: jax.Array | None,
    initial_state: jax.Array | None,
    d_out: jax.Array,
    d_final: jax.Array | None = None,
    *,
    dt_softplus: bool = False,
) -> tuple[Any, ...]:
    """The cotangents of the nine operands of the scan, by differentiating the reference; None for an absent one."""

    def forward(*operands: Any) -> Any:
        return reference(*operands, dt_softplus=dt_softplus, return_final_state=True)

    (y, last), pull = jax.vjp(forward, x, dt, A, B, C, D, z, dt_bias, initial_state)
    flow = jnp.zeros_like(last) if d_final is None else d_final.astype(last.dtype)
    return pull((d_out.astype(y.dtype), flow))
