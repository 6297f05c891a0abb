"""The batching rule and the mesh rule of norm and of its gradient.

vmap is one more leading axis of the rows. On a mesh every leading axis is split freely and nothing is gathered; the
columns are whole on every device. dscale and dbias are summed over the devices that hold other rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer

Params = dict[str, Any]
VECTORS = ("scale", "bias")


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: `size` calls as one whose rows have one more axis.

    A scale that differs from element to element, or whose gradient does, is given one row for each.
    """
    present = [
        (name, x, is_batched) for name, x, is_batched in zip(op.operands, arrays, batched, strict=True) if x is not None
    ]
    vectors = [(x, is_batched) for name, x, is_batched in present if name in VECTORS]
    grouped = any(x.ndim - is_batched == 2 for x, is_batched in vectors)  # by a vmap inside of this one
    gradient = "d_out" in op.operands
    each = grouped or any(is_batched for _, is_batched in vectors) or (gradient and bool(vectors))

    def stacked(x: Any, is_batched: bool) -> Any:
        return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

    def fold(name: str, x: Any, is_batched: bool) -> Any:
        if x is None or (name in VECTORS and not each):
            return x
        x = stacked(x, is_batched)
        # A -1 has no value where an axis is empty.
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if grouped else x

    folded = tuple(fold(n, x, b) for n, x, b in zip(op.operands, arrays, batched, strict=True))
    made = run(op, folded, params, prefer=prefer)
    if not grouped:
        return made
    groups = arrays[0].shape[int(batched[0])]  # x's first axis, and that of all that is made
    return jax.tree.map(lambda x: x.reshape(size, groups, *x.shape[1:]), made)


def _operand_factors(call: Call) -> dict[str, str]:
    """An einsum-like term for each operand: r0, r1, ... are the axes of the rows, c the columns."""
    rows = " ".join(f"r{axis}" for axis in range(len(call.need("x").shape) - 1))
    terms = {name: f"{rows} c".strip() for name in call.op.operands}
    terms |= {"mean": rows, "rstd": rows}
    for name in VECTORS:
        vector = call[name]
        terms[name] = "r0 c" if vector is not None and len(vector.shape) == 2 else "c"
    return {name: terms[name] for name, x in zip(call.op.operands, call.args, strict=True) if x is not None}


def rule(call: Call) -> str:
    terms = _operand_factors(call)
    made = [terms["x"]] * (2 if call.params["return_residual"] else 1)
    if call.params["return_stats"]:
        made += [terms["x"].removesuffix("c").strip()] * (2 if call.params["kind"] == "layer" else 1)
    return f"{', '.join(terms.values())} -> {', '.join(made)}"


def rule_grad(call: Call) -> str:
    terms = _operand_factors(call)
    return f"{', '.join(terms.values())} -> {', '.join(terms[n] for n in ('x', *VECTORS) if n in terms)}"


def local_grad(
    op: Op, arrays: tuple[Any, ...], params: Params, axes: dict[str, tuple[str, ...]], prefer: Prefer
) -> tuple[Any, Any, Any]:
    """One device's rows; what is summed over rows is then summed over the mesh, in float32."""
    dx, *sums = run(op, arrays, params, prefer=prefer, local=True)

    def summed(x: Any) -> Any:
        if x is None:
            return None
        own = ("c", "r0") if x.ndim == 2 else ("c",)
        over = tuple(name for factor, names in axes.items() if factor not in own for name in names)
        if not over:
            return x
        wide = jnp.promote_types(jnp.float32, x.dtype)
        return jax.lax.psum(x.astype(wide), over).astype(x.dtype)

    return dx, summed(sums[0]), summed(sums[1])


PARTITION = Partition(rule, replicated=lambda call: ("c",))
PARTITION_GRAD = Partition(rule_grad, replicated=lambda call: ("c",), local=local_grad)
