"""Vector quantization by its documented name."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from capibara.kernels.ops import vq
from capibara.surface.in_precision import in_precision


class TpuV4VQOps:
    """Vector quantization.

    `precision`, as in the other objects, is what rows and codes are rounded to before the search, and the type of
    quantized rows. It is None here by default, which keeps the operands' own: which code is nearest hangs on the last
    bits.
    """

    def nearest_code(
        self,
        x: Float[Array, "*rows D"],
        codebook: Float[Array, "K D"],
        precision: str | None = None,
        **extra: Any,
    ) -> Any:
        """The index of the code nearest to each row, int32; distances and statistics too, where asked for.

        `extra`: return_distances, return_stats, implementation, config: see `capibara.kernels.nearest_code`.
        """
        return in_precision(vq.nearest_code, precision, (x, codebook), rounds=(0, 1), results="none", **extra)

    def quantize(
        self,
        x: Float[Array, "*rows D"],
        codebook: Float[Array, "K D"],
        precision: str | None = None,
        **extra: Any,
    ) -> Any:
        """Each row replaced by its nearest code; the gradient passes to x unchanged.

        `extra`: return_indices, implementation, config: see `capibara.kernels.quantize`.

        >>> import jax.numpy as jnp
        >>> TpuV4VQOps().quantize(jnp.array([0.2, 0.9]), jnp.array([[0.0, 0.0], [0.0, 1.0]])).tolist()
        [0.0, 1.0]
        """
        return in_precision(vq.quantize, precision, (x, codebook), rounds=(0, 1), **extra)

    def residual_vq(
        self,
        x: Float[Array, "*rows D"],
        codebooks: Float[Array, "L K D"],
        precision: str | None = None,
        **extra: Any,
    ) -> tuple[Float[Array, "*rows D"], Int[Array, "*rows L"]]:
        """(quantized, indices): x by the first codebook, what is left by the next, L times. `extra`: implementation."""
        return in_precision(vq.residual_vq, precision, (x, codebooks), rounds=(0, 1), **extra)

    def product_vq(
        self,
        x: Float[Array, "*rows D"],
        codebooks: Float[Array, "P K part"],
        precision: str | None = None,
        **extra: Any,
    ) -> tuple[Float[Array, "*rows D"], Int[Array, "*rows P"]]:
        """(quantized, indices): each of P parts of a row by a codebook of its own. `extra`: implementation."""
        return in_precision(vq.product_vq, precision, (x, codebooks), rounds=(0, 1), **extra)
