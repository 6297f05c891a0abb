"""How causal_conv1d is differentiated, batched and split over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.conv.causal1d.reference import wide_type

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The outputs; the operands are all that is kept."""
    return run(op, arrays, params, prefer=prefer), arrays


def backward(grad_op: Op, arrays: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of the operands: one call of causal_conv1d_grad."""
    d_out, d_state = cotangent if params["return_final_state"] else (cotangent, None)
    return run(grad_op, (*arrays, d_out, d_state), {"activation": params["activation"]}, prefer=prefer)


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: with one set of filters it is a larger batch, else one element after another."""
    if batched[1] or batched[2]:
        return one_by_one(op, batched, arrays, params, prefer)

    def fold(x: Any, is_batched: bool) -> Any:
        if x is None:
            return None
        x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        return x.reshape(size * x.shape[1], *x.shape[2:])

    x, w, bias, state = arrays
    count = x.shape[1] if batched[0] else x.shape[0]
    made = run(op, (fold(x, batched[0]), w, bias, fold(state, batched[3])), params, prefer=prefer)
    return jax.tree.map(lambda y: y.reshape(size, count, *y.shape[1:]), made)


def batch_grad(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer
) -> Any:
    """vmap: one element after another, since each has a gradient of the filters to itself."""
    return one_by_one(op, batched, arrays, params, prefer)


TERMS = {"x": "b t c", "w": "k c", "bias": "c", "initial_state": "b s c", "d_out": "b t c", "d_state": "b s c"}


def _given(call: Call) -> list[str]:
    return [name for name, x in zip(call.op.operands, call.args, strict=True) if x is not None]


def rule(call: Call) -> str:
    """Batch and channels are split freely; time and taps are whole on every device."""
    made = ["b t c", "b s c"] if call.params["return_final_state"] else ["b t c"]
    return f"{', '.join(TERMS[name] for name in _given(call))} -> {', '.join(made)}"


def rule_grad(call: Call) -> str:
    """A gradient lies as its operand does."""
    given = _given(call)
    made = [name for name in given if name in ("x", "w", "bias", "initial_state")]
    return f"{', '.join(TERMS[name] for name in given)} -> {', '.join(TERMS[name] for name in made)}"


def local_grad(
    op: Op, arrays: tuple[Any, ...], params: Params, axes: dict[str, tuple[str, ...]], prefer: Prefer
) -> tuple[Any, ...]:
    """One device's sequences and channels; the filters' gradients are then summed over the sequences of others."""
    dx, dw, dbias, d_initial = run(op, arrays, params, prefer=prefer, local=True)

    def summed(x: Any) -> Any:
        over = axes.get("b", ())
        return x if x is None or not over else jax.lax.psum(x.astype(wide_type(x)), over).astype(x.dtype)

    return dx, summed(dw), summed(dbias), d_initial


WHOLE, LOGICAL = ("t", "k", "s"), {"b": "batch", "c": "mlp"}
PARTITION = Partition(rule, replicated=lambda call: WHOLE, logical=LOGICAL)
PARTITION_GRAD = Partition(rule_grad, replicated=lambda call: WHOLE, local=local_grad, logical=LOGICAL)
