"""The documented operations by family. Each is a function of a room under the name the documents give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from capibara.kernels.attention import flash
from capibara.kernels.attention.multihead import init_multihead_attention, self_attention
from capibara.kernels.draws import Draws
from capibara.kernels.linalg.chunked import gemm_chunked, wait

__all__ = ["TpuV4AttentionOps", "TpuV4LinalgOps", "init_multihead_attention"]

_PLANNED = (
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


class TpuV4AttentionOps:
    """Attention.

    Args:
      seed: what the keys of `fused_multihead_attention` come from where it needs one and is given none.
    """

    def __init__(self, seed: int = 0) -> None:
        self.draws = Draws(seed)

    def flash_attention(
        self,
        query: Float[Array, "B H T D"],
        key: Float[Array, "B Hkv S D"],
        value: Float[Array, "B Hkv S D"],
        block_size: int | tuple[int, int] | None = None,
        use_causal_mask: bool = False,
        precision: str | None = "bfloat16",
        **extra: Any,
    ) -> Any:
        """softmax(q kᵀ / sqrt(head_dim)) v in memory linear in the length, by the fastest implementation.

        Args:
          query, key, value: [batch, heads, length, head_dim]. The query's heads are a multiple of the key's, and
            lengths are arbitrary.
          block_size: queries and keys of one tile. The XLA form uses it as it is; TPU and Hopper kernels the nearest
            tile they have, cuDNN and the reference have none: each says so once. It is for the forward pass, where a
            gradient is taken too; the backward pass chooses its own. With block_mask or mask_fn it is the size of
            their blocks. None takes the tuned tile.
          use_causal_mask: a query sees keys up to its own position.
          precision: "bfloat16", "float32", "mixed" or "fp8": what the operands are rounded to and the result's
            type. None keeps the operands' own.
          extra: attention's other arguments: mask, bias, segment_ids, key_segment_ids, rope, window, block_mask,
            mask_fn, scale, softcap, dropout_rate with dropout_rng, query_offset, return_lse, layout, implementation,
            config.

        >>> import jax.numpy as jnp
        >>> q = jnp.ones((1, 8, 100, 64)); kv = jnp.ones((1, 2, 100, 64))
        >>> TpuV4AttentionOps().flash_attention(q, kv, kv, block_size=128, use_causal_mask=True).shape
        (1, 8, 100, 64)
        """
        return flash.flash_attention(
            query, key, value, block_size=block_size, causal=use_causal_mask, precision=precision, **extra
        )

    def fused_multihead_attention(
        self,
        x: Float[Array, "B T width"],
        num_heads: int,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        params: Mapping[str, Any] | None = None,
        rng: Any = None,
        training: bool = False,
        **extra: Any,
    ) -> Float[Array, "B T width"]:
        """Self-attention of x: one product for queries, keys and values, attention, and one product back.

        Args:
          x: [batch, length, width].
          use_bias: add a bias inside both products.
          dropout_rate: of the attention's probabilities, and only with `training`.
          params: from `init_multihead_attention`. None makes new ones from `rng`, the same at every call with the
            same key, and says so once.
          rng: a JAX key, for dropout and for params that are None; by default from the object's seed: a new one for
            each dropout, one and the same for params.
          training: whether dropout is on.
          extra: num_kv_heads, head_dim, precision, and attention's other arguments: causal, window, mask and so on.

        >>> import jax
        >>> params = init_multihead_attention(jax.random.key(0), 96, 12)
        >>> x = jax.numpy.ones((2, 10, 96))
        >>> TpuV4AttentionOps().fused_multihead_attention(x, num_heads=12, params=params, causal=True).shape
        (2, 10, 96)
        """
        return self_attention(
            self.draws,
            x,
            num_heads,
            use_bias=use_bias,
            dropout_rate=dropout_rate,
            params=params,
            rng=rng,
            training=training,
            **extra,
        )


def __getattr__(name: str) -> Any:
    if name in _PLANNED:
        raise AttributeError(f"{__name__}.{name} is not in this version; it has {', '.join(__all__)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
