"""The documented TPU kernels, as far as this version has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from capibara.kernels import decorate
from capibara.kernels.layout import tile_layout, untile_layout
from capibara.kernels.linalg.chunked import gemm_tiled
from capibara.kernels.timing import Timing, measure
from capibara.kernels.user_ops import register_tpu_op, unregister
from capibara.parallel.context import tpu_v4_optimization_context
from capibara.parallel.validate import validate_sharding
from capibara.precision import PrecisionConfig

__all__ = [
    "PrecisionConfig",
    "benchmark_kernel",
    "gemm",
    "register_tpu_op",
    "tile_layout",
    "tpu_kernel",
    "unregister",
    "untile_layout",
    "validate_sharding",
]

_PLANNED = (
    "block_sparse_attention",
    "flash_attention",
    "layer_norm",
    "rope",
    "sliding_window_attention",
)


def gemm(
    a: Float[Array, "*B M K"], b: Float[Array, "*B K N"], block_size: int = 128, use_bfloat16: bool = True
) -> Float[Array, "*B M N"]:
    """`a @ b` in blocks, summed in float32; the result has the type that the operands promote to.

    Args:
      block_size: rows, columns and contraction of one tile of the TPU kernel; where that kernel does not run,
        how much of the contraction is multiplied at a time. A multiple of 128.
      use_bfloat16: round the operands to bfloat16 first.
    """
    return gemm_tiled(a, b, block_size, use_bfloat16=use_bfloat16)


def tpu_kernel(
    fn: Callable[..., Any] | None = None,
    *,
    precision: PrecisionConfig | str = PrecisionConfig.DEFAULT,
    use_efficient_attention: bool = False,
    **jit_options: Any,
) -> Any:
    """`@tpu_kernel` or `@tpu_kernel(precision=PrecisionConfig.HIGH)`: jit, a name in profiles, and dispatch.

    Args:
      precision: the dtype policy, and jax's matrix precision for float32 operands.
      use_efficient_attention: means nothing in this version, which does not redirect jax's attention: the
        first call says so, and names what does dispatch.
      jit_options: for `jax.jit`.
    """
    return decorate.tpu_kernel(
        fn,
        context=tpu_v4_optimization_context,
        precision=precision,
        use_efficient_attention=use_efficient_attention,
        **jit_options,
    )


def benchmark_kernel(fn: Callable[..., Any], *args: Any, **options: Any) -> Timing:
    """The median time of `fn(*args)`, warmed up and waited for: `.seconds`, with its quartiles."""
    return measure(fn, *args, **options)


def __getattr__(name: str) -> Any:
    if name in _PLANNED:
        raise AttributeError(f"{__name__}.{name} is not in this version; it has {', '.join(__all__)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
