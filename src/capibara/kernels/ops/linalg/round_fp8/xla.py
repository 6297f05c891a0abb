"""round_fp8 by XLA, which makes one pass of it: read once, written twice, at half of the memory's speed on an H200."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.precision import FP8_LARGEST


def xla(x: jax.Array, factor: jax.Array, *, dtype: str) -> tuple[jax.Array, ...]:
    # In x's own type, where a power of two is exact: as float32 it would be written to memory as such.
    scaled = x * factor.astype(x.dtype)
    top = jnp.asarray(FP8_LARGEST[dtype], x.dtype)
    values = jnp.maximum(jnp.minimum(scaled, top), -top).astype(dtype)
    return values, values.T, jnp.max(jnp.abs(x), initial=0).astype(jnp.float32).reshape(1)
