"""Attention by cuDNN, through JAX. JAX differentiates it with cuDNN's own backward pass.

`jax.nn.dot_product_attention` reaches the same kernels but only for [batch, seq, heads, head_dim]; the function behind
it takes our layout as it is, which saves four transposes of the operands.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from capibara.kernels.op import Call, Implementation

MOST_HEAD_DIM = 256  # on Hopper; 128 before it


def refuses(call: Call) -> str | None:
    q, k, v = call.need("q"), call.need("k"), call.need("v")
    if np.dtype(q.dtype).name not in ("bfloat16", "float16") or not q.dtype == k.dtype == v.dtype:
        return f"cuDNN's flash attention takes bfloat16 or float16 alike for q, k and v, not {q.dtype} and {k.dtype}"
    given = [n for n in ("bias", "mask", "q_segments", "block_mask") if call[n] is not None]
    if given:
        return f"{', '.join(given)} is not passed on to cuDNN here"
    for name in ("q_offset", "softcap", "dropout_rate", "return_lse"):
        if call.params[name]:
            return f"cuDNN has no {name} that JAX passes on"
    head_dim = q.shape[-1]
    if head_dim % 8 or head_dim > MOST_HEAD_DIM:
        return f"head_dim is a multiple of 8 up to {MOST_HEAD_DIM}, not {head_dim}"
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    window: Any = call.params["window"]
    if window is not None:
        left, right = window
        looks_back = left is not None and (right == 0 or (right is None and call.params["causal"]))
        if not looks_back or q.shape[2] > k.shape[2]:
            return f"cuDNN's window looks back over keys that exist, not {window} with {q.shape[2]} queries"
    return None


def cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: None = None, mask: None = None, q_segments: None = None,
    kv_segments: None = None, block_mask: None = None, dropout_seed: None = None, *, causal: bool = False,
    q_offset: int = 0, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
    softcap: None = None, dropout_rate: float = 0.0, block_size: None = None, return_lse: bool = False,
) -> jax.Array:  # fmt: skip
    """cuDNN's flash attention on [batch, heads, seq, head_dim]."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    looks_back = causal or window is not None
    made: Any = dot_product_attention(
        q,
        k,
        v,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        mask_type=MaskType.CAUSAL if looks_back else MaskType.NO_MASK,
        qkv_layout="BNTH",
        sliding_window_length=None if window is None or window[0] is None else window[0] + 1,
    )
    return made[0] if isinstance(made, (tuple, list)) else made


IMPLEMENTATION = Implementation("cudnn", cudnn, platforms=("gpu",), refuses=refuses, rank=lambda call: 30)
