"""The batching rule and the mesh rule of the selective scan.

vmap is a larger batch, unless what all of a batch share differs from element to element. On a mesh the batch and the
channels are split; time and N are whole on every device. Forward nothing is exchanged; backward the gradients of what
devices share are summed over them: A, D and dt_bias over the batch's, B and C over the channels'.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.scan.selective.reference import wide_type

SHARED = ("A", "D", "dt_bias")
TERMS = {
    "x": "b t d", "dt": "b t d", "A": "d n", "B": "b t n", "C": "b t n", "D": "d", "z": "b t d", "dt_bias": "d",
    "initial_state": "b d n",
}  # fmt: skip


def batch(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    """vmap: `size` batches as one; one after another where A, D or dt_bias is mapped over."""
    names = op.operands
    if any(is_batched for name, is_batched in zip(names, batched, strict=True) if name in SHARED):
        return one_by_one(op, batched, arrays, params, prefer)

    def folded(name: str, x: Any, is_batched: bool) -> Any:
        if x is None or name in SHARED:
            return x
        whole = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    given = tuple(folded(n, x, b) for n, x, b in zip(names, arrays, batched, strict=True))
    each = arrays[0].shape[int(batched[0])]
    return jax.tree.map(lambda x: x.reshape(size, each, *x.shape[1:]), run(op, given, params, prefer=prefer))


def batch_grad(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    """vmap: one after another, since the gradient of A is a sum over a batch."""
    return one_by_one(op, batched, arrays, params, prefer)


def rule(call: Call) -> str:
    given = ", ".join(TERMS[n] for n, x in zip(call.op.operands, call.args, strict=True) if x is not None)
    return f"{given} -> b t d" + (", b d n" if call.params["return_final_state"] else "")


def rule_grad(call: Call) -> str:
    terms = {**TERMS, "d_out": TERMS["x"], "d_final": TERMS["initial_state"]}
    present = [n for n, x in zip(call.op.operands, call.args, strict=True) if x is not None]
    made = (TERMS[n] for n in present if n in TERMS)
    return f"{', '.join(terms[n] for n in present)} -> {', '.join(made)}"


def local_grad(
    op: Op, arrays: tuple[Any, ...], params: dict[str, Any], axes: dict[str, tuple[str, ...]], prefer: Prefer
) -> tuple[Any, ...]:
    """One device's batch and channels, and the sums over those of others, in float32 or wider."""
    made = run(op, arrays, params, prefer=prefer, local=True)

    def summed(name: str, x: Any) -> Any:
        absent = {"b", "d"} - set(TERMS[name].split())
        over = tuple(a for factor in sorted(absent) for a in axes.get(factor, ()))
        if x is None or not over:
            return x
        return jax.lax.psum(x.astype(wide_type(x)), over).astype(x.dtype)

    return tuple(summed(name, x) for name, x in zip(TERMS, made, strict=True))


_LOGICAL = {"b": "batch", "d": "mlp"}
PARTITION = Partition(rule, replicated=lambda call: ("t", "n"), logical=_LOGICAL)
PARTITION_GRAD = Partition(rule_grad, replicated=lambda call: ("t", "n"), local=local_grad, logical=_LOGICAL)
