"""The batching rule and the mesh rule of route: tokens are independent, a token's experts stay together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer

Params = dict[str, Any]


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: one more leading axis of tokens; where each element has a bias of its own, one element after another."""
    logits, bias = arrays
    if not batched[0]:
        logits = jnp.broadcast_to(logits, (size, *logits.shape))
    if not batched[1]:
        return run(op, (logits, bias), params, prefer=prefer)
    return jax.lax.map(lambda pair: run(op, pair, params, prefer=prefer), (logits, bias))


def rule(call: Call) -> str:
    rows = " ".join(f"r{axis}" for axis in range(len(call.need("logits").shape) - 1))
    given = [f"{rows} e".strip()] + (["e"] if call["bias"] is not None else [])
    made = f"{rows} k".strip()
    return f"{', '.join(given)} -> {made}, {made}"


PARTITION = Partition(rule, replicated=lambda call: ("e", "k"))
