"""The documented operations by family. Each is a function of a room under the name the documents give it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from capibara.kernels.linalg.chunked import gemm_chunked, wait

__all__ = ["TpuV4LinalgOps"]

_PLANNED = (
    "TpuV4AttentionOps",
    "TpuV4CollectiveOps",
    "TpuV4ConvOps",
    "TpuV4FFTOps",
    "TpuV4LayerOps",
    "TpuV4ScanOps",
    "TpuV4VQOps",
)


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


def __getattr__(name: str) -> Any:
    if name in _PLANNED:
        raise AttributeError(f"{__name__}.{name} is not in this version; it has {', '.join(__all__)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
