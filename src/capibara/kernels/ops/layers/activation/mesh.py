"""The batching rule and the mesh rule of activation and of its gradient.

vmap is one more leading axis, along which rows are not counted: each element drops what it would alone. On a mesh
every axis is split freely and nothing is moved; a device's part knows where in the whole array it begins, so that what
is dropped does not depend on how the array is split.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.layers.activation.masking import row_major

Params = dict[str, Any]
_LIKE_X = ("x", "up", "d_out")


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: `size` calls as one with one more leading axis; seeds of their own make that axis the first one's."""
    given = dict(zip(op.operands, zip(arrays, batched, strict=True), strict=True))
    if given["offsets"][1]:
        return one_by_one(op, batched, arrays, params, prefer)

    def stacked(x: Any, is_batched: bool) -> Any:
        return x if x is None or is_batched else jnp.broadcast_to(x, (size, *x.shape))

    x, x_batched = given["x"]
    lead = x.shape[1:-1] if x_batched else x.shape[:-1]
    seed, seed_batched = given["seed"]
    grouped = seed is not None and seed.ndim - seed_batched == 2  # by a vmap inside of this one
    strides = row_major(lead) if params["strides"] is None else params["strides"]

    def fold(name: str, x: Any, is_batched: bool) -> Any:
        each = name in _LIKE_X or (name == "seed" and (seed_batched or grouped))
        x = stacked(x, is_batched) if each else x
        if not grouped or not each or x is None:
            return x
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # a -1 has no value where an axis is empty

    folded = tuple(fold(name, *given[name]) for name in op.operands)
    # Rows are counted only for dropout; without it the calls stay alike.
    strides = params["strides"] if seed is None else strides if grouped else (0, *strides)
    made = run(op, folded, params | {"strides": strides}, prefer=prefer)
    return jax.tree.map(lambda x: x.reshape(size, lead[0], *x.shape[1:]), made) if grouped else made


def _terms(call: Call) -> dict[str, str]:
    """An einsum-like term for each operand: r0, r1, ... are the leading axes, c the columns."""
    rows = " ".join(f"r{axis}" for axis in range(len(call.need("x").shape) - 1))
    seed = call["seed"]
    terms = dict.fromkeys(_LIKE_X, f"{rows} c".strip())
    terms |= {"seed": "r0 w" if seed is not None and len(seed.shape) == 2 else "w", "offsets": "o"}
    return {name: terms[name] for name, x in zip(call.op.operands, call.args, strict=True) if x is not None}


def rule(call: Call) -> str:
    terms = _terms(call)
    made = [terms["x"]] * (2 if "d_out" in terms and "up" in terms else 1)
    return f"{', '.join(terms.values())} -> {', '.join(made)}"


def local(op: Op, arrays: tuple[Any, ...], params: Params, axes: dict[str, tuple[str, ...]], prefer: Prefer) -> Any:
    """One device's part, told at which row and column of the whole it begins."""
    given = dict(zip(op.operands, arrays, strict=True))
    if given["seed"] is None:
        return run(op, arrays, params, prefer=prefer, local=True)

    def parts(factor: str) -> int:
        return math.prod(jax.lax.axis_size(name) for name in axes.get(factor, ()))

    def begins(factor: str, length: int) -> Any:
        names = axes.get(factor, ())
        return jax.lax.axis_index(names) * length if names else jnp.int32(0)

    *lead, columns = given["x"].shape
    whole = tuple(length * parts(f"r{axis}") for axis, length in enumerate(lead))
    strides = row_major(whole) if params["strides"] is None else params["strides"]
    row = sum((begins(f"r{axis}", n) * s for axis, (n, s) in enumerate(zip(lead, strides, strict=True))), jnp.int32(0))
    offsets = jnp.stack([row, begins("c", columns)]).astype(jnp.int32)
    if given["offsets"] is not None:
        offsets = offsets + given["offsets"]
    full = tuple(offsets if name == "offsets" else x for name, x in given.items())
    return run(op, full, params | {"strides": strides}, prefer=prefer, local=True)


_LOGICAL = {"r0": "batch", "r1": "sequence", "c": "mlp"}
PARTITION = Partition(rule, replicated=lambda call: ("w", "o"), local=local, logical=_LOGICAL)
