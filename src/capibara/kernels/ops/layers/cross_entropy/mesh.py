"""The batching rule and the mesh rule of cross_entropy and of its gradient.

On a mesh the tokens and the vocabulary are split freely, the depth is whole on every device. Where the vocabulary is
split, each device sums over its own columns, and what is combined is a few numbers a token. The gradient of the hidden
states is summed over the vocabulary's devices, that of the weights over the tokens'.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.layers.cross_entropy.explicit_mesh import on_one_device
from capibara.kernels.ops.layers.cross_entropy.reference import vocabulary_axis

Params = dict[str, Any]
Axes = dict[str, tuple[str, ...]]


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: more tokens where the weights are shared and theirs is no gradient to be told apart; else one by one."""
    named = dict(zip(op.operands, zip(arrays, batched, strict=True), strict=True))
    if named["weights"][1] or "d_lse" in op.operands:
        return one_by_one(op, batched, arrays, params, prefer)

    def stacked(name: str) -> Any:
        x, is_batched = named[name]
        return x if is_batched or name == "weights" else jnp.broadcast_to(x, (size, *x.shape))

    return run(op, tuple(map(stacked, op.operands)), params, prefer=prefer)


def _terms(call: Call) -> dict[str, str]:
    """An einsum-like term for each operand: r0, r1, ... are the axes of the tokens, d the depth, v the vocabulary."""
    tokens = " ".join(f"r{axis}" for axis in range(len(call.need("hidden").shape) - 1))
    terms = dict.fromkeys(call.op.operands, tokens)
    terms |= {"hidden": f"{tokens} d".strip(), "weights": "v d" if call.params["transpose_weights"] else "d v"}
    terms["logits"] = _logits_term(call)
    return {name: terms[name] for name, x in zip(call.op.operands, call.args, strict=True) if x is not None}


def _logits_term(call: Call) -> str:
    tokens = " ".join(f"r{axis}" for axis in range(len(call.need("hidden").shape) - 1))
    return f"{tokens} v".strip()


def rule(call: Call) -> str:
    terms = _terms(call)
    made = [terms["labels"]] * (3 if call.params["return_sum"] else 2)
    made += [_logits_term(call)] if call.params["return_logits"] else []
    return f"{', '.join(terms.values())} -> {', '.join(made)}"


def rule_grad(call: Call) -> str:
    terms = _terms(call)
    return f"{', '.join(terms.values())} -> {terms['hidden']}, {terms['weights']}"


def own_labels(arrays: tuple[Any, ...], params: Params, axes: Axes) -> tuple[Any, ...]:
    """The operands with labels counted from this device's first column; those of other devices are then no index."""
    hidden, weights, labels, *rest = arrays
    names = axes.get("v", ())
    if names:
        columns = weights.shape[vocabulary_axis(params["transpose_weights"])]
        labels = labels - (jax.lax.axis_index(names) * columns).astype(labels.dtype)
    return hidden, weights, labels, *rest


@on_one_device
def local(op: Op, arrays: tuple[Any, ...], params: Params, axes: Axes, prefer: Prefer) -> Any:
    """One device's tokens against its columns; then the sums are those of all columns."""
    lse, *sums = run(op, own_labels(arrays, params, axes), params, prefer=prefer, local=True)
    names = axes.get("v", ())
    if not names:
        return lse, *sums
    own = [sums.pop()] if params["return_logits"] else []  # each device has its columns' logits
    highest = jax.lax.pmax(lse, names)
    total = jax.lax.psum(jnp.exp(lse - highest), names)
    return highest + jnp.log(total), *(jax.lax.psum(x, names) for x in sums), *own


@on_one_device
def local_grad(op: Op, arrays: tuple[Any, ...], params: Params, axes: Axes, prefer: Prefer) -> Any:
    d_hidden, d_weights = run(op, own_labels(arrays, params, axes), params, prefer=prefer, local=True)

    def summed(x: Any, names: tuple[str, ...]) -> Any:
        wide = jnp.promote_types(jnp.float32, x.dtype)
        return jax.lax.psum(x.astype(wide), names).astype(x.dtype) if names else x

    rows = tuple(name for factor, names in axes.items() if factor.startswith("r") for name in names)
    return summed(d_hidden, axes.get("v", ())), summed(d_weights, rows)


LOGICAL = {"r0": "batch", "r1": "sequence", "v": "vocab"}
PARTITION = Partition(rule, reduced=("v",), replicated=lambda call: ("d",), local=local, logical=LOGICAL)
PARTITION_GRAD = Partition(rule_grad, replicated=lambda call: ("d",), local=local_grad, logical=LOGICAL)
