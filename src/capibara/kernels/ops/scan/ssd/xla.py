"""State space duality in plain JAX: chunks of time as matrix products, the states passed from chunk to chunk.

Within a chunk y = (C·Bᵀ ∘ decays) · x; what came before it reaches y through the state that the chunk starts from. A
decay is the exponential of a difference of running sums of log_decay, never positive where log_decay is not. Several
chunks are computed side by side, as many as make no large array of scores; between such segments only the state stays.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.scan.selective.reference import wide_type
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.reference import first_state, with_input

CHUNK = 64
SCORES = 1 << 26  # numbers, of a segment: 256 MiB in float32


def products(spec: str, *operands: jax.Array, wide: Any) -> jax.Array:
    """An einsum summed in the wide type; operands of that type are multiplied exactly, not by faster passes."""
    exact = operands[0].dtype == wide
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=wide)


def _segment(state: jax.Array, given: tuple[Any, ...], work: Any) -> tuple[jax.Array, jax.Array]:
    """(the state after, y) of some chunks: [batch, chunks, steps, groups, heads of a group, ...]."""
    x, log_decay, B, C, dt = given
    wide, steps = state.dtype, x.shape[2]
    wholes, parts = (jnp.moveaxis(v, 2, -1) for v in running_sums(log_decay, 2))  # [b, k, g, r, steps]
    sums = wholes + parts
    sizes = jnp.ones_like(sums) if dt is None else jnp.moveaxis(dt, 2, -1)
    past = jnp.tril(jnp.ones((steps, steps), bool))
    # Masked before the exponential: past the diagonal it would overflow, and its derivative be a NaN.
    between = (wholes[..., :, None] - wholes[..., None, :]) + (parts[..., :, None] - parts[..., None, :])
    decays = jnp.exp(jnp.where(past, between, -jnp.inf))
    scores = products("bkign,bkjgn->bkgij", C, B, wide=wide)
    weights = decays * scores[:, :, :, None] * sizes[..., None, :]
    y = products("bkgrij,bkjgrp->bkigrp", weights.astype(work), x, wide=wide)

    after = (wholes[..., -1:] - wholes) + (parts[..., -1:] - parts)
    to_end = jnp.moveaxis(jnp.exp(after) * sizes, -1, 2)[..., None]
    added = products("bkjgn,bkjgrp->bkgrnp", B, (x.astype(wide) * to_end).astype(work), wide=wide)

    def pass_on(h: Any, now: Any) -> tuple[Any, Any]:
        add, decay = now
        return decay[..., None, None] * h + add, h

    last, starts = lax.scan(pass_on, state, (jnp.moveaxis(added, 1, 0), jnp.moveaxis(jnp.exp(sums[..., -1]), 1, 0)))
    carried = products("bkign,kbgrnp->bkigrp", C, starts.astype(work), wide=wide)
    return last, y + carried * jnp.moveaxis(jnp.exp(sums), -1, 2)[..., None]


def xla(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None = None,
    D: jax.Array | None = None, initial_state: jax.Array | None = None, *, return_final_state: bool,
    chunk: int | None = None,
) -> Any:  # fmt: skip
    """The forward pass; each segment's inside is computed again where it is differentiated."""
    wide, work = wide_type(x), jnp.result_type(x, B, C)
    batch, time, heads, width = x.shape
    groups, states = B.shape[2:]
    first = first_state(x, B, initial_state)
    if time == 0 or batch == 0:
        return (x, first) if return_final_state else x
    steps = min(chunk or CHUNK, time)
    chunks = math.ceil(time / steps)
    together = max(1, min(chunks, SCORES // (batch * heads * steps * steps)))
    segments = math.ceil(chunks / together)

    def cut(v: jax.Array, *tail: int) -> jax.Array:
        """[segments, batch, chunks, steps, ...]; zeros past the end, which leave a state as it is."""
        pad = segments * together * steps - time
        padded = jnp.pad(v, ((0, 0), (0, pad), *((0, 0),) * (v.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, segments, together, steps, *tail), 1, 0)

    of_head = (groups, heads // groups)
    given = (
        cut(x.astype(work), *of_head, width),
        cut(log_decay.astype(wide), *of_head),
        cut(B.astype(work), groups, states),
        cut(C.astype(work), groups, states),
        None if dt is None else cut(dt.astype(wide), *of_head),
    )
    segment = jax.checkpoint(lambda state, now: _segment(state, now, work))
    last, y = lax.scan(segment, first.reshape(batch, *of_head, states, width), given)
    y = jnp.moveaxis(y, 0, 1).reshape(batch, segments * together * steps, heads, width)[:, :time]
    out = with_input(y, x, D).astype(x.dtype)
    return (out, last.reshape(first.shape)) if return_final_state else out


def xla_grad(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None, D: jax.Array | None,
    initial_state: jax.Array | None, d_out: jax.Array, d_final: jax.Array | None = None, *, chunk: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The backward pass: the chunked form differentiated, one state kept a segment."""

    def forward(*operands: Any) -> Any:
        return xla(*operands, return_final_state=True, chunk=chunk)

    (y, last), pull = jax.vjp(forward, x, log_decay, B, C, dt, D, initial_state)
    flow = jnp.zeros_like(last) if d_final is None else d_final.astype(last.dtype)
    return pull((d_out.astype(y.dtype), flow))


# The backward pass is an op of its own, which kernels share.
IMPLEMENTATION = Implementation("xla", xla, own_gradient=True, needs_local_types=True, hints=("chunk",))
GRAD_IMPLEMENTATION = Implementation("xla", xla_grad, own_gradient=True, needs_local_types=True, hints=("chunk",))
