"""gated_products by XLA: the product, and the activation in a pass of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.ops.layers.activation.api import ACTIVATION_GRAD, gated_activation
from capibara.kernels.ops.layers.gated_mlp.pairs import paired, unpaired


def xla(x: jax.Array, pairs: jax.Array, *, kind: str, keep: bool) -> Any:
    products = jnp.matmul(x, pairs)
    inner = gated_activation(*unpaired(products), kind=kind)
    return (inner, products) if keep else inner


def xla_grad(d_out: jax.Array, down: jax.Array, products: jax.Array, *, kind: str) -> jax.Array:
    d_inner = jnp.tensordot(d_out, down, ((1,), (1,)))
    gate, up = unpaired(products)
    return paired(*run(ACTIVATION_GRAD, (gate, up, None, None, d_inner), {"kind": kind}))
