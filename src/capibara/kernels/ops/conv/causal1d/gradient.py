"""How causal_conv1d is differentiated, batched and split over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.conv.causal1d.reference import finished, wide_type
from capibara.kernels.ops.conv.causal1d.xla import summed

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The outputs; the operands are all that is kept."""
    return run(op, arrays, params, prefer=prefer), arrays


def backward(op: Op, arrays: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of the operands, by XLA; what the activation was given is computed again by the op."""
    flow, *rest = cotangent if isinstance(cotangent, tuple) else (cotangent,)
    wide = wide_type(arrays[0])
    flow = flow.astype(wide)
    if params["activation"] is not None:
        before = run(op, arrays, {"activation": None, "return_final_state": False}, prefer=prefer).astype(wide)
        _, through = jax.vjp(lambda z: finished(z, None, params["activation"]), before)
        (flow,) = through(flow)
    present = [i for i, x in enumerate(arrays) if x is not None]

    def of_present(*given: Any) -> Any:
        full = list(arrays)
        for i, x in zip(present, given, strict=True):
            full[i] = x
        total, state = summed(*full)
        return (total, state) if rest else total

    _, pull = jax.vjp(of_present, *(arrays[i] for i in present))
    made = dict(zip(present, pull((flow, *rest) if rest else flow), strict=True))
    return tuple(made.get(i) for i in range(len(arrays)))


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


def rule(call: Call) -> str:
    """Batch and channels are split freely; time and taps are whole on every device."""
    terms = {"x": "b t c", "w": "k c", "bias": "c", "initial_state": "b s c"}
    given = [terms[name] for name, x in zip(call.op.operands, call.args, strict=True) if x is not None]
    made = ["b t c", "b s c"] if call.params["return_final_state"] else ["b t c"]
    return f"{', '.join(given)} -> {', '.join(made)}"


PARTITION = Partition(rule, replicated=lambda call: ("t", "k", "s"), logical={"b": "batch", "c": "mlp"})
