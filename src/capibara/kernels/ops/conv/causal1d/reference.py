"""A short causal convolution of each channel with its own filter, in plain JAX: the specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide_type(x: Any) -> Any:
    """What is summed in: float32, or wider where x is."""
    return jnp.promote_types(jnp.float32, x.dtype)


def history(x: jax.Array, width: int, initial_state: jax.Array | None) -> jax.Array:
    """x behind the width - 1 inputs before it: [batch, width - 1 + time, channels]."""
    if initial_state is None:
        return jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return jnp.concatenate([initial_state.astype(x.dtype), x], 1)


def last_inputs(x: jax.Array, width: int) -> jax.Array:
    """The last width - 1 of x, behind zeros where it has fewer."""
    short = max(0, width - 1 - x.shape[1])
    return jnp.pad(x[:, max(0, x.shape[1] - (width - 1)) :], ((0, 0), (short, 0), (0, 0)))


def finished(total: jax.Array, bias: jax.Array | None, activation: str | None) -> jax.Array:
    """activation(total + bias), in total's type."""
    if bias is not None:
        total = total + bias.astype(total.dtype)
    return jax.nn.silu(total) if activation == "silu" else total


def reference(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    activation: str | None = None,
    return_final_state: bool = False,
) -> Any:
    """y[b, t, c] = activation(Σ over k of w[k, c] · x[b, t - (width - 1) + k, c] + bias[c]), rounded to x's type.

    w[width - 1] meets the present input. Inputs before the first are `initial_state` [batch, width - 1, channels], or
    0. `return_final_state` returns the last width - 1 inputs too, which is the next call's initial state.
    """
    width, time = w.shape[0], x.shape[1]
    seen = history(x, width, initial_state)
    wide = wide_type(x)
    taps = jnp.stack([seen[:, k : k + time].astype(wide) for k in range(width)])
    y = finished(jnp.einsum("kbtc,kc->btc", taps, w.astype(wide), precision="highest"), bias, activation)
    y = y.astype(x.dtype)
    return (y, seen[:, time:]) if return_final_state else y


def reference_grad(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    initial_state: jax.Array | None,
    d_out: jax.Array,
    d_state: jax.Array | None = None,
    *,
    activation: str | None = None,
) -> tuple[Any, Any, Any, Any]:
    """The cotangents of (x, w, bias, initial_state) by those of y and of the last inputs, where these were returned;
    each rounded once, to its operand's type, and None for an absent operand."""
    wide = wide_type(x)
    operands = (x, w, bias, initial_state)

    def outputs(*given: Any) -> Any:
        return reference(*given, activation=activation, return_final_state=d_state is not None)

    # The initial state is rounded to x's type, whatever its own is.
    rounded = None if initial_state is None else initial_state.astype(x.dtype)
    widened = [None if v is None else v.astype(wide) for v in (x, w, bias, rounded)]
    _, pull = jax.vjp(outputs, *widened)
    flow = d_out.astype(wide)
    made = pull(flow if d_state is None else (flow, d_state.astype(wide)))
    return tuple(None if like is None else d.astype(like.dtype) for d, like in zip(made, operands, strict=True))  # type: ignore[return-value]
