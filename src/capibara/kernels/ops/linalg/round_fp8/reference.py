"""The specification of round_fp8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.precision import FP8_LARGEST


def reference(x: jax.Array, factor: jax.Array, *, dtype: str = "float8_e4m3fn") -> tuple[jax.Array, ...]:
    """(x · factor rounded to `dtype`, its transpose, the largest magnitude of x [1] in float32).

    What is larger than the type's largest number is cut off; NaN stays, and is the largest.
    """
    wide = jnp.promote_types(jnp.float32, x.dtype)
    scaled = x.astype(wide) * factor.astype(wide)
    values = jnp.clip(scaled, -FP8_LARGEST[dtype], FP8_LARGEST[dtype]).astype(dtype)
    return values, values.T, jnp.max(jnp.abs(x), initial=0).astype(jnp.float32).reshape(1)
