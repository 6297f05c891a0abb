"""Attention by its documented name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from capibara.surface import flash
from capibara.surface.draws import Draws
from capibara.surface.multihead import init_multihead_attention, self_attention

__all__ = ["TpuV4AttentionOps", "init_multihead_attention"]


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
          use_causal_mask: a query sees keys up to its own position; `causal=True` says the same.
          precision: "bfloat16", "float32", "mixed" or "fp8": what the operands are rounded to and the result's
            type. None keeps the operands' own.
          extra: attention's other arguments: mask, bias, segment_ids, key_segment_ids, rope, window, block_mask,
            mask_fn, scale, softcap, dropout_rate with rng, query_offset, return_lse, layout, implementation,
            config.

        >>> import jax.numpy as jnp
        >>> q = jnp.ones((1, 8, 100, 64)); kv = jnp.ones((1, 2, 100, 64))
        >>> TpuV4AttentionOps().flash_attention(q, kv, kv, block_size=128, use_causal_mask=True).shape
        (1, 8, 100, 64)
        """
        return flash.flash_attention(
            query, key, value, block_size=block_size, use_causal_mask=use_causal_mask, precision=precision, **extra
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
