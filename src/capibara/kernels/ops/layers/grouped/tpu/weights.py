"""The gradient of the grouped weights for the TPU, in Pallas (Mosaic): a ragged contraction.

The grid is (tiles of K, tiles of N, visits). The visits, tiles of rows and their groups from a table that the scalar
core reads ahead, are ordered by group; a group's product is summed in a float32 scratch over its visits and written
with the last. Rows of other groups in a tile are cleared on both sides. An empty group has one visit, with no rows of
its own, that writes zeros.
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
from capibara.kernels.core.spec import Call
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.grouped.rules import out_dtype_of, sizes
from capibara.kernels.ops.layers.grouped.tiles import aligned_tiles
from capibara.kernels.ops.layers.grouped.tpu.forward import GroupedTile, implementation, tiles_for, whole
from capibara.kernels.ops.linalg.gemm.tpu.forward import LANES, STEP_SECONDS, matrix_precision
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes


def _specs(rows: int, block: tuple[int, int]) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """The blocks of the two operands, `rows` high, and the result's `block`."""
    return (
        pl.BlockSpec((rows, block[0]), lambda i, j, v, group_of, tile_of, *_: (tile_of[v], i)),
        pl.BlockSpec((rows, block[1]), lambda i, j, v, group_of, tile_of, *_: (tile_of[v], j)),
        pl.BlockSpec((None, *block), lambda i, j, v, group_of, *_: (group_of[v], i, j)),
    )


def _sum_scratch(block: tuple[int, int]) -> Any:
    return pltpu.VMEM(block, jnp.float32)


def tile_bytes(call: Call, config: GroupedTile) -> int:
    """VMEM of the blocks and the float32 sum."""
    rows, inner, columns, _ = sizes(call)
    bm, bn, bk = config.cut(rows, inner, columns)
    dtype = call.need("lhs").dtype
    blocks = zip(_specs(bm, (bk, bn)), (dtype, dtype, out_dtype_of(call)), strict=True)
    return vmem_bytes(blocks, _sum_scratch((bk, bn)))


def predicted_seconds(call: Call, tile: GroupedTile) -> float:
    """An ordering, not a measurement: matrix work on whole tiles against bytes through HBM, and a fee a step."""
    rows, inner, columns, groups = sizes(call)
    chip = vmem.chip_of(call)
    bm, bn, bk = tile.cut(rows, inner, columns)
    steps_n, steps_k = math.ceil(columns / bn), math.ceil(inner / bk)
    visits = math.ceil(rows / bm) + groups - 1
    matrix = 2.0 * visits * whole(bm) * steps_n * whole(bn) * steps_k * whole(bk)
    # Reading and writing the sum once a visit hides behind the matrix work in the ratio 128 : rows.
    matrix *= 1 + LANES / (2 * whole(bm))
    item = call.need("lhs").dtype.itemsize
    moved = item * (visits * bm * (inner * steps_n + columns * steps_k) + groups * inner * columns)
    peak = chip.peak_flops("bfloat16") or math.inf
    fees = visits * steps_n * steps_k * STEP_SECONDS / (chip.cores_per_chip or 1)
    halves = 1 if steps_n * steps_k > 1 else 2  # a single tile keeps one core of the two busy
    return halves * max(matrix / peak, moved / chip.hbm_bandwidth) + fees


def candidates(call: Call) -> Sequence[GroupedTile]:
    return tiles_for(call, functools.partial(tile_bytes, call), functools.partial(predicted_seconds, call))


def _body(
    group_of: Any, tile_of: Any, bounds: Any, count: Any, left_ref: Any, right_ref: Any, out_ref: Any, total: Any,
    *, precision: Any,
) -> None:  # fmt: skip
    visit, block = pl.program_id(2), left_ref.shape[0]
    last = count[0] - 1
    group, first_row = group_of[visit], tile_of[visit] * block
    start, end = bounds[group], bounds[group + 1]

    @pl.when((visit == 0) | (group_of[jnp.maximum(visit - 1, 0)] != group))
    def _clear() -> None:
        total[...] = jnp.zeros_like(total)

    def add(masked: bool) -> None:
        def own(ref: Any) -> jax.Array:
            x = ref[...]
            if not masked:
                return x
            row = lax.broadcasted_iota(jnp.int32, x.shape, 0) + first_row
            return jnp.where((row >= start) & (row < end), x, jnp.zeros_like(x))

        numbers = (((0,), (0,)), ((), ()))
        total[...] += lax.dot_general(
            own(left_ref), own(right_ref), numbers, precision=precision, preferred_element_type=jnp.float32
        )

    inside = (start <= first_row) & (first_row + block <= end)
    pl.when(inside)(lambda: add(masked=False))
    pl.when(jnp.logical_not(inside) & (end > start))(lambda: add(masked=True))

    @pl.when((visit == last) | (group_of[jnp.minimum(visit + 1, last)] != group))
    def _write() -> None:
        out_ref[...] = total[...].astype(out_ref.dtype)


def grouped_weights(
    lhs: jax.Array, d_out: jax.Array, group_sizes: jax.Array, *, config: GroupedTile, transpose: bool,
    out_dtype: str | None,
) -> jax.Array:  # fmt: skip
    """One Pallas call; see the module's text."""
    (rows, inner), columns, (groups,) = lhs.shape, d_out.shape[1], group_sizes.shape
    bm, bn, bk = config.cut(rows, inner, columns)
    left, right, block = (d_out, lhs, (bn, bk)) if transpose else (lhs, d_out, (bk, bn))
    left_spec, right_spec, out_spec = _specs(bm, block)
    visits = aligned_tiles(group_sizes, rows, bm, visit_empty=True)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), visits.group_ends])
    out = out_struct((groups, left.shape[1], right.shape[1]), jnp.dtype(out_dtype) if out_dtype else lhs.dtype, lhs)
    return pl.pallas_call(
        functools.partial(_body, precision=matrix_precision(lhs.dtype, None)),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(math.ceil(left.shape[1] / block[0]), math.ceil(right.shape[1] / block[1]), visits.visit_count),
            in_specs=[left_spec, right_spec],
            out_specs=out_spec,
            scratch_shapes=[_sum_scratch(block)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * columns,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in (lhs, d_out, out)),
            transcendentals=0,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_grouped_gemm_weights",
    )(visits.group_of_visit, visits.tile_of_visit, bounds, visits.visit_count[None], left, right)


WEIGHTS_IMPLEMENTATION = implementation(grouped_weights, candidates)
