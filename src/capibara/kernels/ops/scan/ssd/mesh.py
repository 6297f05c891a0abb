"""The batching rule and the mesh rule of state space duality.

vmap is a larger batch, unless D differs from element to element. On a mesh the batch is split, and the heads:
with their groups, or freely where one group serves them all. Time, N and P are whole on every device. The gradient is
split in the same way.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer


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


def _terms(call: Call) -> dict[str, str]:
    """Heads are h where one group serves them all, g where each has its own, and (g r) between: r heads a group."""
    heads, groups = call.need("x").shape[2], call.need("B").shape[2]
    head = "h" if groups == 1 else "g" if groups == heads else "(g r)"
    return {
        "x": f"b t {head} p", "log_decay": f"b t {head}", "B": "b t g n", "C": "b t g n", "dt": f"b t {head}",
        "D": head, "initial_state": f"b {head} n p", "d_out": f"b t {head} p", "d_final": f"b {head} n p",
    }  # fmt: skip


def _present(call: Call) -> list[str]:
    return [name for name, x in zip(call.op.operands, call.args, strict=True) if x is not None]


def rule(call: Call) -> str:
    terms = _terms(call)
    made = ("x", "initial_state") if call.params["return_final_state"] else ("x",)
    return " -> ".join(", ".join(terms[name] for name in names) for names in (_present(call), made))


def rule_grad(call: Call) -> str:
    terms, given = _terms(call), _present(call)
    made = (name for name in given if name not in ("d_out", "d_final"))
    return " -> ".join(", ".join(terms[name] for name in names) for names in (given, made))


def sizes(call: Call) -> dict[str, int]:
    heads, groups = call.need("x").shape[2], call.need("B").shape[2]
    return {} if groups in (1, heads) else {"r": heads // groups}


def replicated(call: Call) -> tuple[str, ...]:
    """The one group of all heads is whole everywhere."""
    return ("t", "n", "p", "r", "g") if call.need("B").shape[2] == 1 else ("t", "n", "p", "r")


def local_grad(
    op: Op, arrays: tuple[Any, ...], params: dict[str, Any], axes: dict[str, tuple[str, ...]], prefer: Prefer
) -> tuple[Any, ...]:
    """One device's part; the gradients of what several devices share are summed over them, in float32: of the one
    group's B and C over the heads, of D over the batch."""
    found = list(run(op, arrays, params, prefer=prefer, local=True))

    def summed(name: str, factor: str) -> None:
        at, over = op.operands.index(name), axes.get(factor)
        if found[at] is not None and over:
            wide = jnp.promote_types(jnp.float32, found[at].dtype)
            found[at] = jax.lax.psum(found[at].astype(wide), over).astype(found[at].dtype)

    for name, factor in (("B", "h"), ("C", "h"), ("D", "b")):
        summed(name, factor)
    return tuple(found)


_LOGICAL = {"b": "batch", "h": "heads", "g": "heads"}
PARTITION = Partition(rule, replicated=replicated, sizes=sizes, logical=_LOGICAL)
PARTITION_GRAD = Partition(rule_grad, replicated=replicated, sizes=sizes, local=local_grad, logical=_LOGICAL)
