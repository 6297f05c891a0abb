"""What attention is held against besides its own implementations (cuDNN is one of those)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from capibara.kernels.core.spec import Case

# The parameters that the peers know.
_KNOWN = frozenset({"causal", "scale", "window"})


def jax_nn(case: Case) -> Callable[..., Any] | None:
    """jax.nn.dot_product_attention by XLA: every pair of query and key at once, in [batch, length, heads, head_dim]."""
    _, _, _, _, _, *rest = case.args()
    if set(case.params) - _KNOWN or any(x is not None for x in rest):
        return None
    causal, scale, window = (case.params.get(name) for name in ("causal", "scale", "window"))
    if isinstance(window, tuple) and None in window:
        return None

    options: dict[str, Any] = {"scale": scale, "is_causal": bool(causal), "local_window_size": window}

    @jax.jit
    def run(q: Any, k: Any, v: Any, bias: Any, mask: Any, *_: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        made: Any = jax.nn.dot_product_attention(q, k, v, bias, mask, implementation="xla", **options)
        return made.swapaxes(1, 2)

    return run


def stock_tpu(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """jax's Pallas flash attention for TPU at the block sizes that suit it best, on the plain calls that it takes."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    q, k, v, *rest = case.args()
    if q is None or k is None or v is None:
        return None
    if set(case.params) - {"causal"} or any(x is not None for x in rest) or q.shape[1] != k.shape[1]:
        return None
    rows, columns = q.shape[2], k.shape[2]
    if rows % 1024 or columns % 512:
        return None
    sizes = BlockSizes(block_q=1024, block_k_major=512, block_k=512, block_b=1)
    causal, scale = bool(case.params.get("causal")), float(q.shape[3]) ** -0.5

    def run(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, causal=causal, sm_scale=scale, block_sizes=sizes)

    return run, (q, k, v)
