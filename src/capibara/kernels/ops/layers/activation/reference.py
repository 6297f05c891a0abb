"""Activations with dropout in plain JAX: the specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.layers.activation import masking

FUNCTIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "identity": lambda x: x,
}


def wide_type(x: Any) -> Any:
    """What is computed in: float32, or wider where x is."""
    return jnp.promote_types(jnp.float32, x.dtype)


def reference(
    x: jax.Array,
    up: jax.Array | None = None,
    seed: jax.Array | None = None,
    offsets: jax.Array | None = None,
    *,
    kind: str = "gelu",
    rate: float = 0.0,
    strides: masking.Strides | None = None,
) -> jax.Array:
    """activation(x) · up, of which dropout keeps each element with probability 1 - rate and scales it by 1/(1 - rate).

    The rate is rounded to a multiple of 1/65536. Computed in float32 and rounded once, to x's type. `seed` is two words
    (or two for each element of x's first axis); `offsets` and `strides` say how an element's row and column are
    counted: see the module `masking`.
    """
    wide = wide_type(x)
    y = FUNCTIONS[kind](x.astype(wide))
    if up is not None:
        y = y * up.astype(wide)
    if rate:
        assert seed is not None
        keys = masking.row_keys(x.shape[:-1], seed, offsets, strides)
        y = jnp.where(masking.kept(keys, x.shape[-1], offsets, rate), y * masking.scale(rate), 0)
    return y.astype(x.dtype)


def reference_grad(
    x: jax.Array,
    up: jax.Array | None,
    seed: jax.Array | None,
    offsets: jax.Array | None,
    d_out: jax.Array,
    *,
    kind: str = "gelu",
    rate: float = 0.0,
    strides: masking.Strides | None = None,
) -> tuple[Any, Any]:
    """(d_x, d_up) by differentiating the reference; d_up is None without an up. The mask is drawn again."""

    def forward(x: Any, up: Any) -> Any:
        return reference(x, up, seed, offsets, kind=kind, rate=rate, strides=strides)

    made, pull = jax.vjp(forward, x, up)
    return pull(d_out.astype(made.dtype))
