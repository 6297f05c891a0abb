"""The selective scan in plain JAX: chunks of time side by side, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.scan.selective.chunks import (
    Cut,
    chunk_decays,
    chunk_starts,
    cut_time,
    joined,
    over_chunks,
    split,
    step_state,
)
from capibara.kernels.ops.scan.selective.reference import first_state, gated, step_sizes, wide_type


def _scanned(x: Any, delta: Any, A: Any, B: Any, C: Any, first: Any, cut: Cut) -> tuple[Any, Any]:
    """y [batch, time, channels] and the last state, from operands that `split` has cut."""
    starts, last = (first[:, None], None) if cut.chunks == 1 else chunk_starts(x, delta, A, B, first)

    def step(h: Any, now: Any) -> tuple[Any, Any]:
        x_t, delta_t, b, c = now
        h = step_state(h, x_t, delta_t, A, b)
        return h, (h * c[..., :, None]).sum(-2)

    ends, y = lax.scan(step, starts, (x, delta, B, C))
    return joined(y, cut), ends[:, 0] if last is None else last


def xla(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None = None,
    z: jax.Array | None = None, dt_bias: jax.Array | None = None, initial_state: jax.Array | None = None, *,
    dt_softplus: bool, return_final_state: bool,
) -> Any:  # fmt: skip
    """The forward pass: every chunk's own sum, the states between chunks, and then the outputs."""
    wide = wide_type(x)
    delta = step_sizes(dt, dt_bias, dt_softplus, wide)
    first = first_state(x, A, initial_state)
    if x.shape[1] == 0:
        return (x, first) if return_final_state else x
    cut = cut_time(x.shape[1])
    cuts = [split(v.astype(wide), cut) for v in (x, delta, B, C)]
    y, last = _scanned(cuts[0], cuts[1], A.astype(wide).T, cuts[2], cuts[3], first.mT, cut)
    out = gated(y, x, D, z).astype(x.dtype)
    return (out, last.mT) if return_final_state else out


def xla_grad(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None, z: jax.Array | None,
    dt_bias: jax.Array | None, initial_state: jax.Array | None, d_out: jax.Array, d_final: jax.Array | None = None, *,
    dt_softplus: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The backward pass: states from one state a chunk, cotangents of the states the same way from the far end."""
    wide = wide_type(x)
    delta, pull_delta = jax.vjp(lambda dt, bias: step_sizes(dt, bias, dt_softplus, wide), dt, dt_bias)
    first = first_state(x, A, initial_state)
    flow = d_out.astype(wide)
    gate = None if z is None else jax.nn.silu(z.astype(wide))
    dy = flow if gate is None else flow * gate
    d_last = jnp.zeros_like(first) if d_final is None else d_final.astype(wide)
    if x.shape[1] == 0:
        d_first, made = d_last, None
        y = dx = d_delta = flow
        dA, dB, dC = jnp.zeros_like(A), jnp.zeros_like(B), jnp.zeros_like(C)
    else:
        cut = cut_time(x.shape[1])
        cuts = tuple(split(v.astype(wide), cut) for v in (x, delta, B, C, dy))
        made, d_first = _reversed(cuts, A.astype(wide).T, first.mT, d_last.mT, cut)
        y, dx, d_delta, dB, dC = (joined(v, cut) for v in made[:5])
        dA, d_first = made[5].T, d_first.mT
    d_dt, d_bias = pull_delta(d_delta)
    dD = dz = None
    values = x.astype(wide)
    if D is not None:
        dx = dx + dy * D.astype(wide)
        dD = (dy * values).sum((0, 1)).astype(D.dtype)
        y = y + values * D.astype(wide)
    if z is not None:
        (dz,) = jax.vjp(jax.nn.silu, z.astype(wide))[1](flow * y)
        dz = dz.astype(z.dtype)
    return (
        dx.astype(x.dtype), d_dt, dA.astype(A.dtype), dB.astype(B.dtype), dC.astype(C.dtype), dD, dz, d_bias,
        None if initial_state is None else d_first.astype(initial_state.dtype),
    )  # fmt: skip


def _reversed(cuts: tuple[Any, ...], A: Any, first: Any, d_last: Any, cut: Cut) -> tuple[Any, Any]:
    """(y, dx, d_delta, dB, dC, dA) of the recurrence, each over time as `split` cuts it, and the first state's own."""
    x, delta, B, C, dy = cuts
    starts, _ = chunk_starts(x, delta, A, B, first)

    def back(flow: Any, now: Any) -> tuple[Any, None]:
        delta_t, c, dy_t = now
        return jnp.exp(delta_t[..., None, :] * A) * (flow + dy_t[..., None, :] * c[..., :, None]), None

    added, _ = lax.scan(back, jnp.zeros_like(starts), (delta, C, dy), reverse=True)
    flows, d_first = over_chunks(added, chunk_decays(delta, A), d_last, reverse=True)

    groups = cut.chunks // cut.together

    def grouped(v: Any, axis: int) -> Any:
        """The chunks in groups, which come first; each is independent of the others now."""
        shape = (*v.shape[:axis], groups, cut.together, *v.shape[axis + 1 :])
        return jnp.moveaxis(v.reshape(shape), axis, 0)

    def group(dA: Any, now: Any) -> tuple[Any, Any]:
        over_time, start, flow = now

        def forth(h: Any, given: Any) -> tuple[Any, Any]:
            return step_state(h, given[0], given[1], A, given[2]), h

        _, before = lax.scan(forth, start, over_time[:3])

        def back(carry: Any, given: Any) -> tuple[Any, Any]:
            flow, dA = carry
            (x_t, delta_t, b, c, dy_t), h = given
            decay = jnp.exp(delta_t[..., None, :] * A)
            decayed = decay * h
            h = decayed + (delta_t * x_t)[..., None, :] * b[..., :, None]
            dh = flow + dy_t[..., None, :] * c[..., :, None]
            into_decay = dh * decayed
            into_input = (dh * b[..., :, None]).sum(-2)
            made = (
                (h * c[..., :, None]).sum(-2),
                into_input * delta_t,
                (into_decay * A).sum(-2) + into_input * x_t,
                (dh * (delta_t * x_t)[..., None, :]).sum(-1),
                (h * dy_t[..., None, :]).sum(-1),
            )
            return (decay * dh, dA + (into_decay * delta_t[..., None, :]).sum((0, 1))), made

        (_, dA), made = lax.scan(back, (flow, dA), (over_time, before), reverse=True)
        return dA, made

    given = (tuple(grouped(v, 2) for v in cuts), grouped(starts, 1), grouped(flows, 1))
    dA, made = lax.scan(group, jnp.zeros_like(A), given)

    def ungrouped(v: Any) -> Any:
        joint = jnp.moveaxis(v, 0, 2)  # [steps, batch, groups, together, k]
        return joint.reshape(*joint.shape[:2], cut.chunks, joint.shape[-1])

    return (*map(ungrouped, made), dA), d_first


# JAX's own derivative would keep every state, so the op's gradient stands in.
IMPLEMENTATION = Implementation("xla", xla, own_gradient=True, needs_local_types=True)
GRAD_IMPLEMENTATION = Implementation("xla", xla_grad, own_gradient=True, needs_local_types=True)
