"""The specification of gated_products and of its gradient, at full precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.layers.activation.reference import FUNCTIONS, wide_type
from capibara.kernels.ops.layers.gated_mlp.pairs import paired, unpaired

_HIGHEST = jax.lax.Precision.HIGHEST


def reference(x: jax.Array, pairs: jax.Array, *, kind: str = "silu", keep: bool = True) -> Any:
    """x [rows, K] times pairs [K, 2 · columns]: (activation(gate) · up [rows, columns], the products themselves).

    Every step in float32 or wider, each result rounded once; with keep=False the first alone.
    """
    wide = wide_type(x)
    products = jnp.matmul(x.astype(wide), pairs.astype(wide), precision=_HIGHEST)
    gate, up = unpaired(products)
    inner = (FUNCTIONS[kind](gate) * up).astype(x.dtype)
    return (inner, products.astype(x.dtype)) if keep else inner


def reference_grad(d_out: jax.Array, down: jax.Array, products: jax.Array, *, kind: str = "silu") -> jax.Array:
    """The gradient of the products, where their activation times down [columns, outputs] has the gradient d_out."""
    wide = wide_type(d_out)
    d_inner = jnp.matmul(d_out.astype(wide), down.astype(wide).T, precision=_HIGHEST)
    _, pull = jax.vjp(lambda gate, up: FUNCTIONS[kind](gate) * up, *unpaired(products.astype(wide)))
    return paired(*pull(d_inner)).astype(products.dtype)
