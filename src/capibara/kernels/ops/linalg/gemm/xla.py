"""gemm by XLA: cuBLAS on a GPU, the TPU compiler's own matrix product, Eigen or oneDNN on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.ops.linalg.gemm.reference import epilogue


def xla(
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
    """One dot_general, then the epilogue in float32 for XLA to fuse."""
    out = jnp.dtype(out_dtype) if out_dtype else jnp.result_type(a, b)
    bare = bias is None and residual is None and activation is None
    wide = jnp.promote_types(jnp.float32, jnp.result_type(a, b))
    batch = ((0,), (0,)) if a.ndim == b.ndim == 3 else ((), ())
    contract_a = a.ndim - 2 if transpose_a else a.ndim - 1
    contract_b = b.ndim - 1 if transpose_b else b.ndim - 2
    z = jax.lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), batch),
        precision=precision,
        # A bare product is left in the output type: the matrix units round once, and there is nothing to fuse.
        preferred_element_type=out if bare else wide,
    )
    if a.ndim == 2 and b.ndim == 3:  # dot_general puts the free axes of `a` first: [M, B, N]
        z = jnp.moveaxis(z, 1, 0)
    return z if bare else epilogue(z, bias, residual, activation).astype(out)
