"""The specification of gemm: activation(a @ b + bias) + residual, in plain JAX at full precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda z: jax.nn.gelu(z, approximate=True),
    "silu": jax.nn.silu,
}


def reference(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    """Multiply, add the bias, apply the activation, add the residual; every step in float32 or wider.

    `precision` has no effect here: the specification is always exact to its working type.
    """
    out = jnp.dtype(out_dtype) if out_dtype else jnp.result_type(a, b)
    wide = jnp.promote_types(jnp.float32, jnp.result_type(a, b))
    left = (a.mT if transpose_a else a).astype(wide)
    right = (b.mT if transpose_b else b).astype(wide)
    z = jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
    return epilogue(z, bias, residual, activation).astype(out)


def epilogue(z: jax.Array, bias: jax.Array | None, residual: jax.Array | None, activation: str | None) -> jax.Array:
    """activation(z + bias) + residual, in z's own type."""
    if bias is not None:
        z = z + row_vector(bias, z.ndim).astype(z.dtype)
    if activation is not None:
        z = ACTIVATIONS[activation](z)
    if residual is not None:
        z = z + residual.astype(z.dtype)
    return z


def row_vector(bias: Any, rank: int) -> Any:
    """A bias [N], or one for each batch [B, N], shaped to add to [..., M, N]."""
    return bias[:, None, :] if bias.ndim == 2 and rank == 3 else bias
