"""Attention as the documented names ask for it: by a precision policy, and with one block size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from capibara import precision as precisions
from capibara.errors import rule_error
from capibara.kernels.core.held import held_at
from capibara.kernels.ops.attention import inputs, tiling
from capibara.kernels.ops.attention.api import attention
from capibara.kernels.ops.linalg.gemm.rules import LAX_PRECISIONS

# The arguments of attention() that are arrays and are not differentiated.
_GIVEN = ("mask", "block_mask", "segment_ids", "key_segment_ids", "rope", "dropout_key")


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    precision: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    bias: Any = None,
    layout: str = "bhtd",
    use_causal_mask: bool = False,
    rng: Any = None,
    attend: Callable[..., Any] = attention,
    **options: Any,
) -> Any:
    """`attention(...)` with a precision and a tile.

    Args:
      precision: "bfloat16", "float32", "mixed" or "fp8": what queries, keys and values are rounded to and the
        result's type ("mixed" gives the bfloat16 result as float32). "float32" also multiplies in full precision,
        forward and backward. "default", "high" and "highest" are jax's, for float32 operands. None changes nothing.
      block_size: the side of a tile of queries and keys in the forward pass, see `tiling`; the backward pass chooses
        for itself. With `block_mask` or `mask_fn` it is the size of their blocks instead, and the kernel's tiles
        follow from it.
      layout: the documented names' own, [batch, heads, length, head_dim], by default.
      use_causal_mask: the documents' word for `causal`, which is taken too; True and causal=False are an error.
      rng: the documents' word for `dropout_key`.
      attend: another function of attention's arguments, or of those among them that are passed here.
      bias, options: attention's other arguments.
    """
    if use_causal_mask:
        refused = [name for name in ("causal", "is_causal") if options.get(name) not in (None, True)]
        if refused:
            raise rule_error(
                "use_causal_mask and causal are one rule, in the documents' word and in attention's",
                f"use_causal_mask=True and {refused[0]}={options[refused[0]]!r}", "pass one of them",
            )  # fmt: skip
        options["causal"] = True
    tile = None
    if options.get("block_mask") is not None or options.get("mask_fn") is not None:
        options["block_size"] = block_size
    elif block_size is not None:
        tile = tiling.checked_block(block_size)
        if options.get("config") is not None:
            raise rule_error("A tile is chosen by block_size or by config", "both", "pass one of them")
    arrays = [inputs.array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    passes, out_dtype = None, None
    if precision in LAX_PRECISIONS:
        passes = precision
    elif precision is not None:
        policy = precisions.policy(precision)
        arrays, passes, out_dtype = policy.cast_to_compute(arrays), policy.matmul_precision, policy.output_dtype
    if rng is not None:
        options["dropout_key"] = rng
    given = {name: options.pop(name) for name in _GIVEN if options.get(name) is not None}

    def run(differentiated: Any, given: dict[str, Any]) -> Any:
        q, k, v, bias = differentiated
        asked = {"layout": layout, **options, **given}
        if bias is not None:
            asked["bias"] = bias
        if tile is not None:
            asked["config"] = tiling.config_for(tile, (q, k, v), asked)
        return attend(q, k, v, **asked)

    if passes is not None and any(x.dtype == jnp.float32 for x in arrays):
        run = held_at(passes, run)
    made = run((*arrays, inputs.array("bias", bias)), given)
    if out_dtype is None:
        return made
    # The log-sum-exp that may come with the result stays float32.
    return (made[0].astype(out_dtype), made[1]) if isinstance(made, tuple) else made.astype(out_dtype)
