"""gemm by XLA: cuBLAS on a GPU, the TPU compiler's own matrix product, Eigen or oneDNN on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from capibara.kernels.core.context import current_target
from capibara.kernels.ops.linalg.gemm.reference import epilogue
from capibara.kernels.ops.linalg.gemm.rules import leaves_bias_to_xla, leaves_residual_to_xla

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


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
    """One dot_general, then the epilogue in float32 for XLA to fuse; on a GPU cuBLAS adds a lone bias or residual."""
    operands = jnp.result_type(a, b)
    out = jnp.dtype(out_dtype) if out_dtype else operands
    bare = bias is None and residual is None and activation is None
    wide = jnp.promote_types(jnp.float32, operands)
    platform = current_target().platform
    apart = operands == jnp.bfloat16 and platform == "cpu"
    if apart:  # the left side as the product's own gradient has it, which is then turned beyond the barrier
        a, b = _apart(jnp.swapaxes(a, -1, -2) if transpose_a else a), _apart(b)
        transpose_a = False
    batch = ((0,), (0,)) if a.ndim == b.ndim == 3 else ((), ())
    contract_a = a.ndim - 2 if transpose_a else a.ndim - 1
    contract_b = b.ndim - 1 if transpose_b else b.ndim - 2
    dims = (((contract_a,), (contract_b,)), batch)
    alone = activation is None and (bias is None) != (residual is None)
    if bias is not None and alone and leaves_bias_to_xla(a, b, bias, out, platform):
        z = jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)
        # Spread out in float32, which XLA drops again: the gradient of the bias is then summed in it, not in 16 bits.
        return z + jnp.broadcast_to(bias.astype(wide), z.shape).astype(out)
    if residual is not None and alone and leaves_residual_to_xla(residual, operands, out, platform):
        z = jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out)
        return (jnp.moveaxis(z, 1, 0) if a.ndim == 2 and b.ndim == 3 else z) + residual
    if bare or operands == wide:
        # A bare product is left in the output type: the matrix units round once, and there is nothing to fuse.
        z = jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out if bare else wide)
    else:
        z = _wide_product(a, b, dims, precision, wide)
    if a.ndim == 2 and b.ndim == 3:  # dot_general puts the free axes of `a` first: [M, B, N]
        z = jnp.moveaxis(z, 1, 0)
    if bare:
        return _apart(z) if apart else z
    return epilogue(z, bias, residual, activation).astype(out)


def _apart(x: jax.Array) -> jax.Array:
    """Keeps a transposition, the caller's or a gradient's, out of the product beside it.

    XLA of JAX 0.12 sums a product of bfloat16 in bfloat16 on a CPU where its result is wanted transposed.
    """
    return jax.lax.optimization_barrier(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _wide_product(a: jax.Array, b: jax.Array, dims: Dims, precision: Any, wide: Any) -> jax.Array:
    """The product as it was accumulated, for an epilogue to go on with; its derivative is in the operands' type.

    JAX's own derivative would multiply a float32 cotangent by the operands: float32 products, which take several
    times as long as those of 16 bits, on copies of the operands in float32.
    """
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=wide)


@functools.partial(_wide_product.defjvp, symbolic_zeros=True)
def _wide_product_jvp(dims: Dims, precision: Any, wide: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    a, b = primals
    narrow = jnp.result_type(a, b)

    def part(x: Any, y: Any) -> Any:
        # Linear in each of them, and so is a conversion: what comes back through it is rounded to the operands' type.
        return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=narrow).astype(wide)

    a_dot, b_dot = tangents
    parts = [part(a_dot, b)] if not isinstance(a_dot, SymbolicZero) else []
    parts += [part(a, b_dot)] if not isinstance(b_dot, SymbolicZero) else []
    z = _wide_product(a, b, dims, precision, wide)
    return z, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(z)
