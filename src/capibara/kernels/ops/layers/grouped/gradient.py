"""How the grouped products are differentiated: each in terms of the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer
from capibara.kernels.ops.layers.grouped.reference import gated, wide_type

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """A product keeps its operands."""
    return run(op, arrays, params, prefer=prefer), arrays


def backward(
    gemm: Op, weights: Op, residuals: Any, d_out: Any, params: Params, prefer: Prefer
) -> tuple[Any, Any, None]:
    """Of grouped_gemm: one more for lhs, and grouped_gemm_weights for rhs. Sizes have no cotangent."""
    lhs, rhs, group_sizes = residuals
    # The kernels take operands of one type; a wide output's cotangent is rounded to it, as lhs and rhs were.
    flow = d_out.astype(jnp.result_type(lhs, rhs))
    return *_of_product(gemm, weights, lhs, rhs, flow, group_sizes, params["transpose_rhs"], prefer), None


def _of_product(
    gemm: Op, weights: Op, lhs: Any, rhs: Any, flow: Any, group_sizes: Any, flipped: bool, prefer: Prefer
) -> tuple[Any, Any]:
    back = {"transpose_rhs": not flipped, "out_dtype": _name_unless(lhs.dtype, flow, rhs)}
    d_lhs = run(gemm, (flow, rhs, group_sizes), back, prefer=prefer)
    made = {"transpose": flipped, "out_dtype": _name_unless(rhs.dtype, lhs, flow)}
    d_rhs = run(weights, (lhs, flow, group_sizes), made, prefer=prefer)
    return d_lhs, d_rhs


def _name_unless(dtype: Any, *operands: Any) -> str | None:
    """The output type to ask for: None where the operands have it anyway, which is what was tuned."""
    return None if dtype == jnp.result_type(*operands) else jnp.dtype(dtype).name


def backward_weights(gemm: Op, residuals: Any, d_weights: Any, params: Params, prefer: Prefer) -> tuple[Any, Any, None]:
    """Of grouped_gemm_weights, whose cotangent is a weight a group: two of grouped_gemm."""
    lhs, d_out, group_sizes = residuals
    flow = d_weights.astype(jnp.result_type(lhs, d_out))
    flipped = params["transpose"]
    to_lhs = {"transpose_rhs": not flipped, "out_dtype": _name_unless(lhs.dtype, d_out, flow)}
    to_out = {"transpose_rhs": flipped, "out_dtype": _name_unless(d_out.dtype, lhs, flow)}
    d_lhs = run(gemm, (d_out, flow, group_sizes), to_lhs, prefer=prefer)
    return d_lhs, run(gemm, (lhs, flow, group_sizes), to_out, prefer=prefer), None


def forward_gated(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The result, and what its gradient needs: the operands and both products."""
    made = run(op, arrays, params | {"return_products": True}, prefer=prefer)
    return (made if params["return_products"] else made[0]), (*arrays, *made[1:])


def backward_gated(
    gemm: Op, weights: Op, residuals: Any, cotangent: Any, params: Params, prefer: Prefer
) -> tuple[Any, Any, Any, None]:
    """Through the products, number by number; then each product's own gradient."""
    lhs, gate, up, group_sizes, gate_product, up_product = residuals
    d_out, *direct = cotangent if params["return_products"] else (cotangent,)
    wide = wide_type(lhs, gate, up)
    products = gate_product.astype(wide), up_product.astype(wide)
    _, pull = jax.vjp(lambda g, u: gated(params["activation"], g, u), *products)
    flows = [flow.astype(gate_product.dtype) for flow in _added(pull(d_out.astype(wide)), direct)]
    to_gate = _of_product(gemm, weights, lhs, gate, flows[0], group_sizes, False, prefer)
    to_up = _of_product(gemm, weights, lhs, up, flows[1], group_sizes, False, prefer)
    d_lhs = (to_gate[0].astype(wide) + to_up[0].astype(wide)).astype(lhs.dtype)
    return d_lhs, to_gate[1], to_up[1], None


def _added(flows: Any, direct: list[Any]) -> list[Any]:
    """With the products' own cotangents, where they were returned."""
    if not direct:
        return list(flows)
    return [flow + own.astype(flow.dtype) for flow, own in zip(flows, direct, strict=True)]
