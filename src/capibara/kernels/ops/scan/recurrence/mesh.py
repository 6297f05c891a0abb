"""The batching rule and the mesh rule of the recurrence and of its gradient.

vmap is more batch. On a mesh the batch and the channels are split freely and nothing is gathered; time is whole on
every device (`sequence_parallel_recurrence` splits it).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer

Params = dict[str, Any]


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: `size` calls as one of `size` times the batch. An operand that they share is repeated."""

    def fold(x: Any, is_batched: bool) -> Any:
        if x is None:
            return None
        x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        # A -1 has no value where an axis is empty.
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    made = run(op, tuple(map(fold, arrays, batched)), params, prefer=prefer)
    # Of the operands, as no call at all leaves nothing to divide.
    each = arrays[0].shape[1 if batched[0] else 0]
    return jax.tree.map(lambda x: x.reshape(size, each, *x.shape[1:]), made)


def _terms(call: Call) -> dict[str, str]:
    """An einsum-like term for each operand that is present."""
    present = [(name, x) for name, x in zip(call.op.operands, call.args, strict=True) if x is not None]
    return {name: "b t c" if len(x.shape) == 3 else "b c" for name, x in present}


def rule(call: Call) -> str:
    made = ["b t c", "b c"] if call.params["return_final"] else ["b t c"]
    return f"{', '.join(_terms(call).values())} -> {', '.join(made)}"


def rule_grad(call: Call) -> str:
    terms = _terms(call)
    made = ["b t c", "b t c", "b c"] if "initial" in terms else ["b t c", "b t c"]
    return f"{', '.join(terms.values())} -> {', '.join(made)}"


_LOGICAL = {"b": "batch", "c": "mlp"}
PARTITION = Partition(rule, replicated=lambda call: ("t",), logical=_LOGICAL)
PARTITION_GRAD = Partition(rule_grad, replicated=lambda call: ("t",), logical=_LOGICAL)
