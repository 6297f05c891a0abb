"""few_rows by XLA: a product, and what follows it as passes of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.layers.activation.api import gated_activation
from capibara.kernels.ops.layers.norm.api import rms_norm


def xla(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    gate: str | None,
    eps: float,
) -> Any:
    """The product is rounded to x's type before anything is done with it, as where each step is called by itself."""
    y = jnp.tensordot(x, weight, ((1,), (1,)))
    if gate is not None:
        y = gated_activation(*jnp.split(y, 2, axis=-1), kind=gate)
    if residual is None:
        return y
    total = residual + y
    return total, rms_norm(total, scale, eps=eps)
