"""The batching rule and the mesh rule of attention and of its gradient.

vmap folds its axis into the batch. On a mesh, the batch and the heads (in whole groups that share a key head) are
split with nothing gathered; lengths and head_dim are whole on every device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition

Params = dict[str, Any]
# Operands whose batch axis may be 1 for all; every other has its own row for each batch element.
_SHARED = ("bias", "mask", "block_mask")
_UNITS = tuple(f"u{i}" for i in range(16))  # a factor for each axis of length 1
_WHOLE = ("t", "s", "d", "g", "n", "m", "w", *_UNITS)


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: str) -> Any:
    """vmap: `size` calls as one with a batch `size` times as large."""
    if params["dropout_rate"] > 0:
        # The position in the batch decides what is dropped, so elements are taken one after another: each is
        # then what it would be alone.
        return one_by_one(op, batched, arrays, params, prefer)
    gradient = "d_out" in op.operands
    q = arrays[0]
    inner = q.shape[1] if batched[0] else q.shape[0]

    def fold(name: str, x: Any, is_batched: bool) -> Any:
        if x is None or name == "dropout_seed":
            return x[0] if name == "dropout_seed" and is_batched else x  # without dropout its value is nothing
        rows = x.shape[1] if is_batched else x.shape[0]
        shared = name in _SHARED and rows == 1 and not is_batched
        # A shared bias gets one gradient for each element, so it is repeated for them.
        if shared and not (gradient and name == "bias"):
            return x
        if not is_batched:
            x = jnp.broadcast_to(x, (size, *x.shape))
        if rows != inner:
            x = jnp.broadcast_to(x, (size, inner, *x.shape[2:]))
        return x.reshape(size * inner, *x.shape[2:])

    folded = tuple(fold(n, x, b) for n, x, b in zip(op.operands, arrays, batched, strict=True))
    made = run(op, folded, params, prefer=prefer)
    made = jax.tree.map(lambda x: x.reshape(size, inner, *x.shape[1:]), made)
    bias = arrays[3]
    if gradient and bias is not None and bias.shape[1 if batched[3] else 0] == 1:
        dq, dk, dv, dbias = made
        wide = jnp.promote_types(jnp.float32, dbias.dtype)
        return dq, dk, dv, dbias.astype(wide).sum(1, keepdims=True).astype(dbias.dtype)
    return made


def _head_factor(call: Call) -> str:
    """Query heads are key heads times groups; one key head for all leaves the groups free to be split."""
    heads, kv_heads = call.need("q").shape[1], call.need("k").shape[1]
    if heads == kv_heads:
        return "h"
    return "g" if kv_heads == 1 else "(h g)"


def _operand_factors(call: Call) -> list[str]:
    """One einsum-like term for each operand that is present."""
    heads = _head_factor(call)
    n_heads, kv_heads = call.need("q").shape[1], call.need("k").shape[1]
    n_batch, n_rows = call.need("q").shape[0], call.need("q").shape[2]
    units = iter(_UNITS)
    if kv_heads == 1 and n_heads > 1:
        keys = [f"b {next(units)} s d", f"b {next(units)} s d"]
    else:
        keys = ["b h s d"] * 2

    def shared(x: jax.ShapeDtypeStruct, rows: str, columns: str, n_rows: int) -> str:
        terms = ((n_batch, "b"), (n_heads, heads), (n_rows, rows))
        known = [name if n == length else next(units) for n, (length, name) in zip(x.shape, terms, strict=False)]
        return " ".join([*known, columns])

    terms = {
        "q": f"b {heads} t d",
        "k": keys[0],
        "v": keys[1],
        "q_segments": "b t",
        "kv_segments": "b s",
        "dropout_seed": "w",
        "out": f"b {heads} t d",
        "d_out": f"b {heads} t d",
        "lse": f"b {heads} t",
        "d_lse": f"b {heads} t",
    }
    made = []
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is None:
            continue
        if name in ("bias", "mask"):
            terms[name] = shared(x, "t", "s", n_rows)
        elif name == "block_mask":
            terms[name] = shared(x, "n", "m", x.shape[2])
        made.append(terms[name])
    return made


def rule(call: Call) -> str:
    heads = _head_factor(call)
    lse = f", b {heads} t" if call.params["return_lse"] else ""
    return f"{', '.join(_operand_factors(call))} -> b {heads} t d{lse}"


def rule_grad(call: Call) -> str:
    terms = _operand_factors(call)
    made = terms[: 4 if call["bias"] is not None else 3]
    return f"{', '.join(terms)} -> {', '.join(made)}"


def factor_sizes(call: Call) -> dict[str, int]:
    """The group's size, where it is part of a compound axis and so cannot be read off one."""
    heads, kv_heads = call.need("q").shape[1], call.need("k").shape[1]
    return {"g": heads // kv_heads} if _head_factor(call) == "(h g)" else {}


def whole(call: Call) -> tuple[str, ...]:
    """The factors that no device may hold a part of."""
    if call.params["dropout_rate"]:
        # What is dropped is decided by the position in the whole batch, which a shard does not know.
        return ("b", "h", *_WHOLE)
    return tuple(f for f in _WHOLE if f != "g") if _head_factor(call) == "g" else _WHOLE


def local_grad(
    op: Op, arrays: tuple[Any, ...], params: Params, axes: dict[str, tuple[str, ...]], prefer: str
) -> tuple[Any, Any, Any, Any]:
    """One device's part of the gradient, summed over the mesh where an operand was shared by what is split."""
    dq, dk, dv, dbias = run(op, arrays, params, prefer=prefer, local=True)

    def summed(x: Any, over: tuple[str, ...]) -> Any:
        if not over:
            return x
        wide = jnp.promote_types(jnp.float32, x.dtype)
        return jax.lax.psum(x.astype(wide), over).astype(x.dtype)

    group = axes.get("g", ())
    dk, dv = summed(dk, group), summed(dv, group)
    if dbias is not None:
        over = axes.get("b", ()) if arrays[3].shape[0] == 1 else ()
        if arrays[3].shape[1] == 1:
            over += axes.get("h", ()) + group
        dbias = summed(dbias, over)
    return dq, dk, dv, dbias


_LOGICAL = {"b": "batch", "h": "heads", "g": "heads"}
PARTITION = Partition(rule, replicated=whole, sizes=factor_sizes, logical=_LOGICAL)
PARTITION_GRAD = Partition(rule_grad, replicated=whole, sizes=factor_sizes, local=local_grad, logical=_LOGICAL)
