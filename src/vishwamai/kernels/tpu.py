"""The documented TPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from capibara.dropin import decorate
from capibara.kernels.core.user_ops import register_tpu_op, unregister
from capibara.kernels.lab.timing import Timing, measure
from capibara.kernels.ops.attention.rope import rope as room_rope
from capibara.kernels.ops.attention.rope import rope_tables
from capibara.mesh.context import tpu_v4_optimization_context
from capibara.mesh.validate import validate_sharding
from capibara.precision import PrecisionConfig
from capibara.surface import patterns
from capibara.surface.chunked_products import gemm_tiled
from capibara.surface.tiling import tile_layout, untile_layout
from vishwamai.kernels.layers import expert_layer, geglu, glu, init_expert_layer, layer_norm, swiglu

__all__ = [
    "PrecisionConfig",
    "benchmark_kernel",
    "block_sparse_attention",
    "expert_layer",
    "flash_attention",
    "geglu",
    "gemm",
    "glu",
    "init_expert_layer",
    "layer_norm",
    "register_tpu_op",
    "rope",
    "rope_tables",
    "sliding_window_attention",
    "swiglu",
    "tile_layout",
    "tpu_kernel",
    "unregister",
    "untile_layout",
    "validate_sharding",
]


def flash_attention(
    query: Float[Array, "B H T D"],
    key: Float[Array, "B Hkv S D"],
    value: Float[Array, "B Hkv S D"],
    mask: Any = None,
    block_size: int | None = 128,
    use_flash: bool = True,
    **extra: Any,
) -> Any:
    """softmax(q kᵀ / sqrt(head_dim)) v in memory linear in the length; the result has the operands' type.

    Args:
      query, key, value: [batch, heads, length, head_dim]; the query's heads are a multiple of the key's.
      mask: [batch, keys] for padding, [queries, keys], [batch, queries, keys], or four axes of which the first three
        may be 1. True, or an integer that is not 0, lets a query see a key; floats are added to the scores.
      block_size: queries and keys of one tile of the forward pass, as near as the implementation has it, which says
        where it is not exact; None takes the tuned tile.
      use_flash: False runs the reference, every pair of query and key at once. It has no tiles, and says so once.
      extra: causal, window, segment_ids, bias, dropout_rate with rng, precision, and attention's others.
    """
    return patterns.masked(query, key, value, mask, block_size, use_flash, **extra)


def sliding_window_attention(
    query: Float[Array, "B H T D"],
    key: Float[Array, "B Hkv S D"],
    value: Float[Array, "B Hkv S D"],
    window_size: int | tuple[int | None, int | None],
    mask: Any = None,
    block_size: int | None = 128,
    **extra: Any,
) -> Any:
    """Attention to near keys alone; blocks outside of the window are not computed.

    Args:
      window_size: w, for a query's own key and the w - 1 before it, or (left, right): so many before and after its
        own, None for no limit.
      mask, block_size, extra: as for flash_attention.
    """
    return patterns.masked(query, key, value, mask, block_size, True, window=window_size, **extra)


def block_sparse_attention(
    query: Float[Array, "B H T D"],
    key: Float[Array, "B Hkv S D"],
    value: Float[Array, "B Hkv S D"],
    block_mask: Any,
    block_size: int | tuple[int, int] = 128,
    mask: Any = None,
    **extra: Any,
) -> Any:
    """Attention in some blocks of queries and keys; the others are not computed.

    Args:
      block_mask: booleans, one for each block of block_size = (queries, keys): [blocks, blocks], or four axes of
        which the first two, batch and heads, may be 1. Or a function of query positions [n, 1] and key positions
        [1, m], called with numpy arrays, that says which pairs there are; blocks it empties are skipped.
      mask, extra: as for flash_attention.
    """
    return patterns.block_sparse(query, key, value, block_mask, block_size, mask, **extra)


def rope(
    x: Float[Array, "B H T D"],
    positions: Any = None,
    *,
    layout: str = "bhtd",
    **extra: Any,
) -> Float[Array, "B H T D"]:
    """Queries or keys [batch, heads, length, head_dim] turned by their positions, 0, 1, 2, … by default.

    Args:
      positions: [length] or [batch, length].
      extra: base, style, scaling, rotary_dim, and tables from `rope_tables`: see `capibara.kernels.rope`.
    """
    return room_rope(x, positions, layout=layout, **extra)


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
      use_efficient_attention: whether `capibara.jax.nn.dot_product_attention` inside the function goes through
        kernel dispatch, or is jax's own. The attention functions of this module always dispatch.
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
