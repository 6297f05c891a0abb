"""Norm for the TPU, in Pallas (Mosaic): blocks of whole rows stream through VMEM, each number once.

The grid is (groups, blocks of rows), all of it parallel, so both cores of a v4 chip have half of the blocks. Inside a
block a loop takes a few rows at a time, so that what is computed stays small beside the block that is moved. Row
statistics leave as lanes: a column of one number a row would be padded to 128 in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.norm.reference import outputs, shrink_of
from capibara.kernels.ops.layers.norm.rules import MOST_COLUMNS, sizes, sizes_of
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES = 128
SUBLANES = 8
CHUNKS = {2: 16, 4: 8}  # rows computed at a time, by bytes of a number: what fills a packed register
# Copies of a chunk in float32 that may be alive at once: values, their squares or products, the result.
LIVE = 4


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Rows of a block, and how many of them are computed at a time."""

    block: int
    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.block < 1 or self.block % self.chunk:
            raise rule_error("block is a positive multiple of chunk", self, "use block=256, chunk=16")


def rows_spec(block: int, columns: int, at: Callable[..., Any]) -> pl.BlockSpec:
    """A block of whole rows; `at` gives its place from the grid's indices after the group's."""
    return pl.BlockSpec((None, block, columns), lambda g, *index: (g, at(*index), 0))


def vector_spec(columns: int) -> pl.BlockSpec:
    """A group's scale or bias."""
    return pl.BlockSpec((None, 1, columns), lambda g, *index: (g, 0, 0))


def statistic_scratch(block: int) -> Any:
    """Where statistics that leave as lanes stand as a column first."""
    return pltpu.VMEM((block, LANES), jnp.float32)


def candidates_for(call: Call, moving: Sequence[Any], sums: Sequence[pl.BlockSpec] = ()) -> Sequence[RowsConfig]:
    """Blocks that fit VMEM, the largest first: rows of the arrays `moving` go through it, float32 `sums` stay."""
    _, rows, columns = sizes_of(call)
    width = math.ceil(columns / LANES) * LANES
    chunk = CHUNKS[min(x.dtype.itemsize for x in call.args if x is not None and x.shape == call.need("x").shape)]

    def fits(block: int) -> bool:
        own = rows_spec(block, columns, lambda i: i)
        blocks = [(own, x.dtype) for x in moving]
        blocks += [(spec, jnp.float32) for spec in (vector_spec(columns), vector_spec(columns), *sums)]
        temporaries = 4 * LIVE * chunk * width
        return vmem_bytes(blocks, [statistic_scratch(block)] * 2) + temporaries <= vmem.limit(call)

    if rows < chunk:  # a block of all rows may have any number of them
        return [RowsConfig(rows, rows)] if fits(chunk) else []
    blocks = {min(target, rows // chunk * chunk) for target in (1024, 512, 256, 128, 64, 32, 16)}
    # A block is moved while another is computed: past a mebibyte it hides what a step costs, and a smaller one starts
    # sooner and leaves less idle at the end. 128 rows make whole registers of their statistics.
    moved = sum(x.dtype.itemsize for x in moving)
    enough = {b for b in blocks if b * width * moved >= 1 << 20 and b >= LANES}
    order = sorted(blocks, key=lambda b: (b not in enough, b if b in enough else -b))
    return [RowsConfig(block, chunk) for block in order if fits(block)]


def refuses_shape(call: Call) -> str | None:
    dtype = np.dtype(call.need("x").dtype).name
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {x.dtype.name}"
    groups, rows, columns = sizes_of(call)
    if 0 in (groups, rows):
        return "x is empty"
    if columns > MOST_COLUMNS:
        return f"it takes up to {MOST_COLUMNS} columns, not {columns}"
    if not call.op.implementations["pallas_tpu"].candidates(call):
        return f"no block of {columns} {dtype} columns fits the core's VMEM"
    return None


def candidates(call: Call) -> Sequence[RowsConfig]:
    x, residual = call.need("x"), call["residual"]
    # x and y; with a residual also the sum, which training returns.
    return candidates_for(call, [x, x] if residual is None else [x, x, residual, x])


def vector_rows(vector: jax.Array, groups: int) -> jax.Array:
    """A scale or bias in float32 as [groups, 1, columns]."""
    return vector.astype(jnp.float32).reshape(groups, 1, vector.shape[-1])


def statistics(values: jax.Array, kind: str, eps: float) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """The rows' mean (None for RMS norm), 1/std, and the values about the mean; each [rows, 1 or columns]."""
    columns, shrink = values.shape[-1], shrink_of(eps)
    mean = values.sum(-1, keepdims=True) * (1 / columns) if kind == "layer" else None
    centred = values if mean is None else values - mean
    smaller = centred * shrink
    variance = (smaller * smaller).sum(-1, keepdims=True) * (1 / columns)
    return mean, lax.rsqrt(variance + eps * shrink**2) * shrink, centred


def _body(
    *refs: Any, config: RowsConfig, kind: str, eps: float, offset: float, has: tuple[bool, bool, bool],
    summed: bool, stats: int, as_lanes: bool,
) -> None:  # fmt: skip
    x_ref, *rest = refs
    scale_ref, bias_ref, residual_ref = (rest.pop(0) if present else None for present in has)
    y_ref = rest.pop(0)
    sum_ref = rest.pop(0) if summed else None
    stat_refs, columns_of = rest[:stats], rest[stats:]
    if not as_lanes:
        columns_of = stat_refs

    def step(turn: Any, carry: None) -> None:
        at = pl.ds(pl.multiple_of(turn * config.chunk, config.chunk), config.chunk)
        values = x_ref[at, :].astype(jnp.float32)
        if residual_ref is not None:
            total = (values + residual_ref[at, :].astype(jnp.float32)).astype(x_ref.dtype)
            if sum_ref is not None:
                sum_ref[at, :] = total
            values = total.astype(jnp.float32)
        mean, rstd, centred = statistics(values, kind, eps)
        y = centred * rstd
        if scale_ref is not None:
            y = y * (scale_ref[...] + offset)
        if bias_ref is not None:
            y = y + bias_ref[...]
        y_ref[at, :] = y.astype(y_ref.dtype)
        for ref, number in zip(columns_of, [s for s in (mean, rstd) if s is not None], strict=False):
            ref[at, :] = jnp.broadcast_to(number, (config.chunk, ref.shape[1]))
        return carry

    lax.fori_loop(0, config.block // config.chunk, step, None)
    if as_lanes:
        for ref, column in zip(stat_refs, columns_of, strict=True):
            ref[...] = column[...].T[:1, :]


def norm_forward(
    x: jax.Array, scale: jax.Array | None = None, bias: jax.Array | None = None, residual: jax.Array | None = None,
    *, config: RowsConfig, kind: str, eps: float, offset: float, return_residual: bool, return_stats: bool,
) -> Any:  # fmt: skip
    """The forward pass as one Pallas call; see the module's text."""
    n = sizes(x, scale, bias)
    lead = x.shape[:-1]
    block = config.block
    flat = x.reshape(n.groups, n.rows, n.columns)
    rows = rows_spec(block, n.columns, lambda i: i)
    operands, specs = [flat], [rows]
    for vector in (scale, bias):
        if vector is not None:
            operands.append(vector_rows(vector, n.groups))
            specs.append(vector_spec(n.columns))
    if residual is not None:
        operands.append(residual.reshape(flat.shape))
        specs.append(rows)

    stats = (2 if kind == "layer" else 1) if return_stats else 0
    summed = return_residual and residual is not None
    # A block of statistics is [1, block] in lanes, which are whole registers or the whole array.
    as_lanes = stats > 0 and block % LANES == 0
    outs, out_specs = [out_struct(flat.shape, x.dtype, x)], [rows]
    if summed:
        outs.append(outs[0])
        out_specs.append(rows)
    for _ in range(stats):
        shape = (n.groups, 1, n.rows) if as_lanes else (n.groups, n.rows, 1)
        outs.append(out_struct(shape, jnp.float32, x))
        out_specs.append(
            pl.BlockSpec((None, 1, block), lambda g, i: (g, 0, i))
            if as_lanes
            else pl.BlockSpec((None, block, 1), lambda g, i: (g, i, 0))
        )
    results = pl.pallas_call(
        functools.partial(
            _body, config=config, kind=kind, eps=eps, offset=offset,
            has=(scale is not None, bias is not None, residual is not None), summed=summed, stats=stats,
            as_lanes=as_lanes,
        ),
        out_shape=outs,
        grid=(n.groups, math.ceil(n.rows / block)),
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=[statistic_scratch(block)] * (stats if as_lanes else 0),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size,
            bytes_accessed=sum(v.size * v.dtype.itemsize for v in operands)
            + sum(math.prod(v.shape) * v.dtype.itemsize for v in outs),
            transcendentals=math.prod(lead),
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_norm",
    )(*operands)  # fmt: skip
    y, *rest = results
    total = rest.pop(0).reshape(x.shape) if summed else x
    numbers = [v.reshape(lead) for v in rest]
    mean, rstd = numbers if len(numbers) == 2 else (None, *numbers) if numbers else (None, None)
    return outputs(y.reshape(x.shape), total, mean, rstd, kind, return_residual, return_stats)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    norm_forward,
    platforms=("tpu",),
    refuses=refuses_shape,
    kernel=True,
    config_type=RowsConfig,
    candidates=candidates,
)
