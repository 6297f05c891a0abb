"""Linear algebra by its documented name."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from capibara.kernels.ops.linalg.svd.api import fast_svd
from capibara.surface.chunked_products import gemm_chunked, wait


class TpuV4LinalgOps:
    """Linear algebra."""

    def optimized_gemm(
        self,
        a: Float[Array, "*B M K"],
        b: Float[Array, "*B K N"],
        precision: str | None = "bfloat16",
        use_async: bool = True,
        chunk_size: int | None = None,
        **extra: Any,
    ) -> Float[Array, "*B M N"]:
        """`a @ b` by the fastest implementation that takes it; leading axes are batches and broadcast.

        Args:
          precision: "bfloat16", "float32", "mixed" or "fp8": what the operands are rounded to and the
            result's type; sums are float32. None keeps the operands' own type.
          use_async: return at once, while the product is computed; False waits for it. Inside a function
            that jax traces there is no result yet to wait for, and it changes nothing.
          chunk_size: the most of the contraction that is multiplied at a time. On a TPU it is the kernel's
            block, in multiples of 128; elsewhere the product becomes a loop that adds up in float32.
          extra: gemm's other arguments: bias, residual, activation, transpose_a, transpose_b, out_dtype,
            implementation.

        >>> import jax.numpy as jnp
        >>> x = jnp.ones((2, 8, 300)); w = jnp.ones((300, 16))
        >>> TpuV4LinalgOps().optimized_gemm(x, w, precision="mixed", chunk_size=128).shape
        (2, 8, 16)
        """
        return wait(gemm_chunked(a, b, chunk_size, precision=precision, **extra), use_async)

    def fast_svd(
        self,
        matrix: Float[Array, "*B M N"],
        compute_uv: bool = True,
        use_randomized: bool = True,
        rank: int | None = None,
        **extra: Any,
    ) -> Any:
        """(u, s, vh) of each matrix, or s alone: by a random sketch where few triplets are wanted, else exactly.

        Args:
          compute_uv: False returns the singular values alone.
          use_randomized: take a sketch where `rank` is given and much smaller than the matrix's smaller side; without
            a rank, or with one near that side, the result is exact. False is always exact.
          rank: how many of the leading triplets; None for all.
          extra: fast_svd's other arguments: oversampling, power_iterations, key, core, axis_name.

        >>> import jax.numpy as jnp
        >>> u, s, vh = TpuV4LinalgOps().fast_svd(jnp.ones((100, 50)), rank=4)
        >>> u.shape, s.shape, vh.shape
        ((100, 4), (4,), (4, 50))
        """
        method = "auto" if use_randomized else "exact"
        return fast_svd(matrix, rank=rank, compute_uv=compute_uv, method=method, **extra)
