"""The backward pass of norm for the TPU, in Pallas (Mosaic): one pass over x and the cotangent.

The rows of a group are cut into one part for each core of the chip. A part's blocks follow one another, and its sums
for dscale and dbias stay in VMEM meanwhile, in float32, eight partial rows each: adding registers to registers. What
is left of them is summed outside. The rows are in VMEM anyway, so their statistics are computed again: that costs no
memory traffic, where reading one number a row as a column would.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.norm.rules import sizes
from capibara.kernels.ops.layers.norm.tpu.forward import (
    SUBLANES,
    RowsConfig,
    candidates_for,
    refuses_shape,
    rows_spec,
    statistics,
    vector_rows,
    vector_spec,
)

PARTS = 2  # cores of a chip; with one core, its two halves one after the other


def candidates(call: Call) -> Sequence[RowsConfig]:
    x, d_out, d_sum = call.need("x"), call.need("d_out"), call["d_sum"]
    sums = [partial_spec(SUBLANES, x.shape[-1]) for name in ("scale", "bias") if call[name] is not None]
    return candidates_for(call, [x, x, d_out] if d_sum is None else [x, x, d_out, d_sum], sums)


def partial_spec(rows: int, columns: int) -> pl.BlockSpec:
    """A part's partial sums for dscale or dbias."""
    return pl.BlockSpec((None, None, rows, columns), lambda g, p, s: (g, p, 0, 0))


def _body(
    *refs: Any, config: RowsConfig, kind: str, eps: float, offset: float, has_scale: bool, has_sum: bool,
    sums: tuple[bool, bool], rows: int, blocks: int, steps: int,
) -> None:  # fmt: skip
    x_ref, *rest = refs
    scale_ref = rest.pop(0) if has_scale else None
    flow_ref = rest.pop(0)
    extra_ref = rest.pop(0) if has_sum else None
    dx_ref = rest.pop(0)
    dscale_ref, dbias_ref = (rest.pop(0) if wanted else None for wanted in sums)
    step_index = pl.program_id(2)
    block_index = pl.program_id(1) * steps + step_index
    chunk = config.chunk

    @pl.when(step_index == 0)
    def _clear() -> None:
        for ref in (dscale_ref, dbias_ref):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)

    def add(ref: Any, terms: jax.Array, start: Any) -> None:
        if rows % config.block:
            # Past the last row lies whatever memory held.
            row = lax.broadcasted_iota(jnp.int32, terms.shape, 0) + start
            terms = jnp.where(row < rows, terms, 0)
        kept = ref.shape[0]
        if kept > 1:
            ref[...] += sum(terms[at : at + kept] for at in range(0, chunk, kept))
        else:
            ref[...] += terms.sum(0, keepdims=True)

    def step(turn: Any, carry: None) -> None:
        at = pl.ds(pl.multiple_of(turn * chunk, chunk), chunk)
        _, rstd, centred = statistics(x_ref[at, :].astype(jnp.float32), kind, eps)
        normal = centred * rstd
        flow = flow_ref[at, :].astype(jnp.float32)
        start = block_index * config.block + turn * chunk
        if dscale_ref is not None:
            add(dscale_ref, flow * normal, start)
        if dbias_ref is not None:
            add(dbias_ref, flow, start)
        weighted = flow if scale_ref is None else flow * (scale_ref[...] + offset)
        share = 1 / normal.shape[-1]
        dx = weighted - normal * ((weighted * normal).sum(-1, keepdims=True) * share)
        if kind == "layer":
            dx = dx - weighted.sum(-1, keepdims=True) * share
        dx = dx * rstd
        if extra_ref is not None:
            dx = dx + extra_ref[at, :].astype(jnp.float32)
        dx_ref[at, :] = dx.astype(dx_ref.dtype)
        return carry

    @pl.when(block_index < blocks)
    def _compute() -> None:
        lax.fori_loop(0, config.block // chunk, step, None)


def norm_backward(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, mean: jax.Array | None, rstd: jax.Array,
    d_out: jax.Array, d_sum: jax.Array | None = None, *, config: RowsConfig, kind: str, eps: float, offset: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(dx, dscale, dbias) as one Pallas call and a sum of a few rows; see the module's text."""
    n = sizes(x, scale, bias)
    block = config.block
    flat = x.reshape(n.groups, n.rows, n.columns)
    blocks = math.ceil(n.rows / block)
    parts = min(PARTS, blocks)
    steps = math.ceil(blocks / parts)
    # The last part may be a block short: it then stays where it is, and nothing is computed or written twice.
    rows = rows_spec(block, n.columns, lambda p, s: jnp.minimum(p * steps + s, blocks - 1))
    operands, specs = [flat], [rows]
    if scale is not None:
        operands.append(vector_rows(scale, n.groups))
        specs.append(vector_spec(n.columns))
    for rowwise in (d_out, d_sum):
        if rowwise is not None:
            operands.append(rowwise.reshape(flat.shape))
            specs.append(rows)
    sums = (scale is not None, bias is not None)
    kept = SUBLANES if config.chunk % SUBLANES == 0 else 1
    partial_sums = out_struct((n.groups, parts, kept, n.columns), jnp.float32, x)
    outs = [out_struct(flat.shape, x.dtype, x)] + [partial_sums] * sum(sums)
    dx, *rest = pl.pallas_call(
        functools.partial(
            _body, config=config, kind=kind, eps=eps, offset=offset, has_scale=scale is not None,
            has_sum=d_sum is not None, sums=sums, rows=n.rows, blocks=blocks, steps=steps,
        ),
        out_shape=outs,
        grid=(n.groups, parts, steps),
        in_specs=specs,
        out_specs=[rows] + [partial_spec(kept, n.columns)] * sum(sums),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=16 * x.size,
            bytes_accessed=sum(v.size * v.dtype.itemsize for v in operands)
            + sum(math.prod(v.shape) * v.dtype.itemsize for v in outs),
            transcendentals=n.groups * n.rows,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_norm_grad",
    )(*operands)  # fmt: skip
    dscale, dbias = (
        None if like is None else rest.pop(0).sum((1, 2)).reshape(like.shape).astype(like.dtype)
        for like in (scale, bias)
    )
    return dx.reshape(x.shape), dscale, dbias


GRAD_IMPLEMENTATION = Implementation(
    "pallas_tpu",
    norm_backward,
    platforms=("tpu",),
    refuses=refuses_shape,
    kernel=True,
    config_type=RowsConfig,
    candidates=candidates,
)
