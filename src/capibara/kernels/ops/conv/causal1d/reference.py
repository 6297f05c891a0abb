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
