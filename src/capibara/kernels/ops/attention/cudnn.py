"""Attention by cuDNN, through JAX, forward and backward as two implementations.

`jax.nn.dot_product_attention` reaches the same kernels, with a backward pass that is always cuDNN's own. Here each
pass is chosen by itself: the log-sum-exp that ours and cuDNN's forward return is one and the same.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.spec import Call, Implementation

HOPPER = ("NVIDIA H", "NVIDIA GH")
HOPPER_AND_LATER = (*HOPPER, "NVIDIA B", "NVIDIA GB")
BEFORE_AMPERE = ("Tesla", "V100", "T4", "P100", "K80")


def refuses(call: Call) -> str | None:
    q, k, v = call.need("q"), call.need("k"), call.need("v")
    kind = call.target.device_kind
    if not kind.startswith("NVIDIA") or any(old in kind for old in BEFORE_AMPERE):
        return f"cuDNN's flash attention needs an NVIDIA GPU from Ampere on; this is {kind}"
    most = 256 if kind.startswith(HOPPER_AND_LATER) else 128
    if np.dtype(q.dtype).name not in ("bfloat16", "float16") or not q.dtype == k.dtype == v.dtype:
        return f"cuDNN's flash attention takes bfloat16 or float16 alike for q, k and v, not {q.dtype} and {k.dtype}"
    extra = [n for n in ("bias", "mask", "q_segments", "block_mask") if call[n] is not None]
    if extra:
        return f"{', '.join(extra)} is not passed on to cuDNN here"
    for name in ("q_offset", "softcap", "dropout_rate"):
        if call.params[name]:
            return f"cuDNN has no {name} that JAX passes on"
    head_dim = q.shape[-1]
    if head_dim % 8 or head_dim > most:
        return f"head_dim is a multiple of 8 up to {most} on this chip, not {head_dim}"
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    window: Any = call.params["window"]
    if window is not None:
        left, right = window
        looks_back = left is not None and (right == 0 or (right is None and call.params["causal"]))
        if not looks_back or q.shape[2] > k.shape[2]:
            return f"cuDNN's window looks back over keys that exist, not {window} with {q.shape[2]} queries"
    return None


def refuses_grad(call: Call) -> str | None:
    if call["d_lse"] is not None:
        return "cuDNN takes no gradient of the log-sum-exp"
    q, k = call.need("q"), call.need("k")
    # Both as cuDNN's own frontend checks them, in the node of the backward pass.
    if q.shape[2] == k.shape[2] == 1:
        return "cuDNN has no backward pass of one query over one key"
    if q.shape[-1] > 128 and not call.target.device_kind.startswith(HOPPER):
        return f"cuDNN's backward pass takes a head_dim up to 128 on this chip, not {q.shape[-1]}"
    return refuses(call)


def _options(
    q: jax.Array, causal: bool, window: tuple[int | None, int | None] | None, scale: float | None, physical: str
) -> dict[str, Any]:
    """What JAX's primitives are bound with. They are bound as they are, since JAX's functions around them ask for an
    installed cuDNN even where a call is only traced; what those check, `refuses` checks."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    layout = fused.AttentionLayout.BTNH if physical == "bthd" else fused.AttentionLayout.BNTH
    mask = fused.MaskType.CAUSAL if causal or window is not None else fused.MaskType.NO_MASK
    # JAX 0.12 has one parameter more.
    later = "score_mod" in inspect.signature(fused._dot_product_attention_bwd_rule).parameters
    return {
        "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        "mask_type": mask,
        "sliding_window_length": None if window is None or window[0] is None else window[0] + 1,
        "layout": layout.value,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # neither a bias nor its gradient
        **({"score_mod": None} if later else {}),
    }


def _absent(q: jax.Array) -> list[jax.Array]:
    """The bias, two lengths, two offsets, two page tables."""
    return [jnp.zeros(0, q.dtype)] * 7


def _stored(physical: str, *arrays: jax.Array) -> list[jax.Array]:
    """Arrays in the order that they have in memory; the exchange of axes cancels with the caller's."""
    return [x.swapaxes(1, 2) if physical == "bthd" else x for x in arrays]


def cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: None = None, mask: None = None, q_segments: None = None,
    kv_segments: None = None, block_mask: None = None, dropout_seed: None = None, *, causal: bool = False,
    q_offset: int = 0, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
    softcap: None = None, dropout_rate: float = 0.0, block_size: None = None, return_lse: bool = False,
    physical: str = "bhtd",
) -> Any:  # fmt: skip
    """cuDNN's flash attention, and its log-sum-exp where that is asked for.

    A program whose result is what this returns, as it is, fills an array of its size first: on an H200 2.4 us, and as
    long as its bytes take at 4.4 TB/s. In a program that goes on with the result nothing is filled.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    outputs = fused._dot_product_attention_fwd_p_wrapper.bind(
        *_stored(physical, q, k, v),
        *_absent(q),
        is_training=return_lse,
        **_options(q, causal, window, scale, physical),
    )
    (out,) = _stored(physical, outputs[0])
    return (out, outputs[1]) if return_lse else out


def cudnn_grad(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: None, mask: None, q_segments: None, kv_segments: None,
    block_mask: None, dropout_seed: None, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: None = None, *,
    causal: bool = False, q_offset: int = 0, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: None = None, dropout_rate: float = 0.0, block_size: None = None,
    physical: str = "bhtd",
) -> tuple[Any, Any, Any, None]:  # fmt: skip
    """cuDNN's backward pass, from any forward pass that kept its log-sum-exp."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    options, absent = _options(q, causal, window, scale, physical), _absent(q)
    q, k, v, out, d_out = _stored(physical, q, k, v, out, d_out.astype(q.dtype))
    gradients = fused._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *absent, lse.astype(jnp.float32), out, d_out, **options
    )
    dq, dk, dv = _stored(physical, *gradients[:3])
    return dq, dk, dv, None


IMPLEMENTATION = Implementation(
    "cudnn",
    cudnn,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=("xla",),
    own_gradient=True,
    hints=("physical",),
)
GRAD_IMPLEMENTATION = Implementation(
    "cudnn",
    cudnn_grad,
    platforms=("gpu",),
    refuses=refuses_grad,
    ahead_of=("xla",),
    own_gradient=True,
    same_bits=False,  # seen on an H200 at 16x16x1024x128: its sums are in the order in which programs arrive
    hints=("physical",),
)
