"""A short causal convolution in plain JAX: shifted copies, scaled and added, which XLA makes one pass of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.conv.causal1d.reference import finished, history, wide_type


def summed(x: jax.Array, w: jax.Array, bias: Any = None, initial_state: Any = None) -> tuple[jax.Array, jax.Array]:
    """(the sum of the shifted inputs, tap by tap, and the bias, in float32; the last inputs)."""
    width, time = w.shape[0], x.shape[1]
    seen = history(x, width, initial_state)
    wide = wide_type(x)
    # Made wide before it is cut, so that the gradient of x is added up in float32 and rounded once, and that XLA does
    # not read the present input apart from the others: on an H200 that took a tenth longer.
    shifted, taps = seen.astype(wide), w.astype(wide)
    total = shifted[:, :time] * taps[0]
    for k in range(1, width):
        total = total + shifted[:, k : k + time] * taps[k]
    return finished(total, bias, None), seen[:, time:]


def xla(
    x: jax.Array, w: jax.Array, bias: jax.Array | None = None, initial_state: jax.Array | None = None,
    *, activation: str | None, return_final_state: bool,
) -> Any:  # fmt: skip
    """The forward pass."""
    total, state = summed(x, w, bias, initial_state)
    y = finished(total, None, activation).astype(x.dtype)
    return (y, state) if return_final_state else y


def xla_grad(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, initial_state: jax.Array | None, d_out: jax.Array,
    d_state: jax.Array | None = None, *, activation: str | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The backward pass; what the activation was given is computed again."""
    operands = (x, w, bias, initial_state)
    present = [i for i, operand in enumerate(operands) if operand is not None]

    def of_present(*given: Any) -> Any:
        full = dict(zip(present, given, strict=True))
        return summed(*(full.get(i) for i in range(len(operands))))  # type: ignore[arg-type]

    (total, state), pull = jax.vjp(of_present, *(operands[i] for i in present))
    flow = d_out.astype(total.dtype)
    if activation is not None:
        _, through = jax.vjp(lambda z: finished(z, None, activation), total)
        (flow,) = through(flow)
    into_state = jnp.zeros_like(state) if d_state is None else d_state
    made = dict(zip(present, pull((flow, into_state)), strict=True))
    return tuple(made.get(i) for i in range(len(operands)))


# JAX's own derivative would keep float32 intermediates as large as x; the op's keeps x and computes them again.
IMPLEMENTATION = Implementation("xla", xla, own_gradient=True)
GRAD_IMPLEMENTATION = Implementation("xla", xla_grad)
