"""The batching rule and the mesh rule of state space duality.

vmap is a larger batch, unless D differs from element to element. On a mesh the batch is split, and the heads:
with their groups, or freely where one group serves them all. Time, N and P are whole on every device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.batching import one_by_one
from capibara.kernels.dispatch import run
from capibara.kernels.op import Call, Op, Partition, Prefer


def batch(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    """vmap: `size` batches as one; one after another where D is mapped over, or summed into as in the gradient."""
    shared = op.operands.index("D")
    if batched[shared] or ("d_out" in op.operands and arrays[shared] is not None):
        return one_by_one(op, batched, arrays, params, prefer)

    def folded(index: int, x: Any, is_batched: bool) -> Any:
        if x is None or index == shared:
            return x
        whole = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    given = tuple(folded(i, x, b) for i, (x, b) in enumerate(zip(arrays, batched, strict=True)))
    each = arrays[0].shape[int(batched[0])]
    return jax.tree.map(lambda x: x.reshape(size, each, *x.shape[1:]), run(op, given, params, prefer=prefer))


def rule(call: Call) -> str:
    """Heads are h where one group serves them all, g where each has its own, and (g r) between: r heads a group."""
    heads, groups = call.need("x").shape[2], call.need("B").shape[2]
    head = "h" if groups == 1 else "g" if groups == heads else "(g r)"
    terms = {
        "x": f"b t {head} p", "log_decay": f"b t {head}", "B": "b t g n", "C": "b t g n", "dt": f"b t {head}",
        "D": head, "initial_state": f"b {head} n p",
    }  # fmt: skip
    given = ", ".join(terms[n] for n, x in zip(call.op.operands, call.args, strict=True) if x is not None)
    return f"{given} -> {terms['x']}" + (f", {terms['initial_state']}" if call.params["return_final_state"] else "")


def sizes(call: Call) -> dict[str, int]:
    heads, groups = call.need("x").shape[2], call.need("B").shape[2]
    return {} if groups in (1, heads) else {"r": heads // groups}


def replicated(call: Call) -> tuple[str, ...]:
    """The one group of all heads is whole everywhere."""
    return ("t", "n", "p", "r", "g") if call.need("B").shape[2] == 1 else ("t", "n", "p", "r")


PARTITION = Partition(rule, replicated=replicated, sizes=sizes, logical={"b": "batch", "h": "heads", "g": "heads"})
