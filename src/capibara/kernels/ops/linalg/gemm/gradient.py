"""The gradient, the batching rule and the mesh rule of gemm, each in terms of gemm itself."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.context import current_target
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.linalg.gemm.reference import ACTIVATIONS, epilogue

# Of gelu by a sigmoid, where the forward pass has a tanh: what both passes have alike XLA would write out, keep, and
# read again, in float32 (seen on a GPU). Apart they are two passes over z, or one where the cotangent is there before
# the output.
DIFFERENTIATED = ACTIVATIONS | {
    "gelu": lambda z: z * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)),
}

Params = dict[str, Any]
Arrays = tuple[Any, Any, Any, Any]


def forward(op: Op, arrays: Arrays, params: Params, prefer: str | None) -> tuple[jax.Array, Any]:
    """The product, and what its gradient needs: the operands, and z = a @ b + bias when there is an activation."""
    a, b, bias, residual = arrays
    kept = (a, b, _empty_like(bias), _empty_like(residual))
    activation = params["activation"]
    if activation is None:
        return run(op, arrays, params, prefer=prefer), (*kept, None)
    out = jnp.dtype(params["out_dtype"] or jnp.result_type(a, b))
    z = run(op, (a, b, bias, None), params | {"activation": None, "out_dtype": out.name}, prefer=prefer)
    y = epilogue(z.astype(jnp.promote_types(jnp.float32, out)), None, residual, activation).astype(out)
    return y, (*kept, z)


def _empty_like(x: Any) -> Any:
    """Remembers an operand's type and rank for the backward pass without keeping its values alive."""
    return None if x is None else jnp.zeros((0,) * (x.ndim - 1) + (0,), x.dtype)


def backward(op: Op, residuals: Any, cotangent: jax.Array, params: Params, prefer: str | None) -> Arrays:
    """The cotangents of (a, b, bias, residual): two products and a sum over rows."""
    a, b, bias, residual, z = residuals
    flip_a, flip_b = params["transpose_a"], params["transpose_b"]
    wide = jnp.promote_types(jnp.float32, cotangent.dtype)
    dz = cotangent
    if z is not None:
        _, pull = jax.vjp(DIFFERENTIATED[params["activation"]], z.astype(wide))
        dz = pull(cotangent.astype(wide))[0].astype(cotangent.dtype)
        if bias is not None and jnp.result_type(a, b, dz).itemsize == 2 and current_target().platform == "gpu":
            # Without it XLA sums dz over its rows where it rounds it, in a fusion that is a slow way to do either.
            dz = jax.lax.optimization_barrier(dz)
    common = jnp.result_type(a, b)
    flow = dz.astype(common)

    def product(x: Any, y: Any, transpose_x: bool, transpose_y: bool, like: Any) -> Any:
        summed = max(x.ndim, y.ndim) > like.ndim  # the operand was shared by the batch
        extra = {"transpose_a": transpose_x, "transpose_b": transpose_y, "precision": params["precision"]}
        out = jnp.dtype(wide if summed else like.dtype).name
        made = run(op, (x, y, None, None), extra | {"out_dtype": out}, prefer=prefer)
        return made.sum(0).astype(like.dtype) if summed else made

    if flip_a:
        da = product(b, flow, flip_b, True, a)
    else:
        da = product(flow, b, False, not flip_b, a)
    if flip_b:
        db = product(flow, a, True, flip_a, b)
    else:
        db = product(a, flow, not flip_a, False, b)
    dbias = None
    if bias is not None:
        rows = tuple(range(dz.ndim - 1)) if bias.ndim == 1 else (dz.ndim - 2,)
        dbias = dz.astype(wide).sum(rows).astype(bias.dtype)
    dresidual = None if residual is None else cotangent.astype(residual.dtype)
    return da, db, dbias, dresidual


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: Arrays, params: Params, prefer: str) -> jax.Array:
    """vmap of gemm is gemm with one more batch axis; a batch axis that is there already is merged with it."""
    a, b, bias, residual = arrays
    a_batched, b_batched, bias_batched, residual_batched = batched
    inner = max(a.ndim - a_batched, b.ndim - b_batched) == 3

    def merge(x: Any, is_batched: bool, rank: int) -> Any:
        """To [size * inner, ...] when there is an inner batch; as it is otherwise."""
        if x is None or not inner:
            return x
        has_inner = x.ndim - is_batched == rank + 1
        if not is_batched and not has_inner:
            return x  # shared by all
        if not is_batched:
            x = jnp.broadcast_to(x, (size, *x.shape))
        if not has_inner:
            x = jnp.broadcast_to(x[:, None], (size, count, *x.shape[1:]))
        return x.reshape(size * count, *x.shape[2:])

    count = 1
    if inner:
        holder = a if a.ndim - a_batched == 3 else b
        count = holder.shape[1] if (a_batched if holder is a else b_batched) else holder.shape[0]
    a, b = merge(a, a_batched, 2), merge(b, b_batched, 2)
    if a.ndim != 3 and b.ndim != 3:  # only the epilogue's operands carry the axis
        a = jnp.broadcast_to(a, (size, *a.shape))
    if bias is not None and inner:
        bias = merge(bias, bias_batched, 1)
    if residual is not None:
        if inner:
            residual = merge(residual, residual_batched, 2)
        elif not residual_batched:
            residual = jnp.broadcast_to(residual, (size, *residual.shape))
    out = run(op, (a, b, bias, residual), params, prefer=prefer)
    return out.reshape(size, count, *out.shape[1:]) if inner else out


def mesh_rule(call: Call) -> str:
    """Which dimensions of the operands are the same, for the partitioner."""
    a, b = call.need("a"), call.need("b")
    lead = lambda x: "b " if len(x.shape) == 3 else ""  # noqa: E731
    operands = [
        lead(a) + ("k m" if call.params["transpose_a"] else "m k"),
        lead(b) + ("n k" if call.params["transpose_b"] else "k n"),
    ]
    batched = "b " if lead(a) or lead(b) else ""
    if call["bias"] is not None:
        operands.append("b n" if len(call.need("bias").shape) == 2 else "n")
    if call["residual"] is not None:
        operands.append(f"{batched}m n")
    return f"{', '.join(operands)} -> {batched}m n"


def combine(op: Op, arrays: Arrays, params: Params, axes: tuple[str, ...], prefer: str) -> jax.Array:
    """The contraction is split over `axes`: multiply the local part in float32, sum, then the epilogue."""
    a, b, bias, residual = arrays
    wide = jnp.promote_types(jnp.float32, jnp.result_type(a, b))
    bare = params | {"activation": None, "out_dtype": wide.name}
    z = jax.lax.psum(run(op, (a, b, None, None), bare, prefer=prefer, local=True), axes)
    out = jnp.dtype(params["out_dtype"] or jnp.result_type(a, b))
    return epilogue(z, bias, residual, params["activation"]).astype(out)
