"""The grouped product and the gated one for the TPU's matrix units, in Pallas (Mosaic).

The grid is (tiles of columns, visits, steps of the contraction). A visit is a tile of rows and a group that has rows
in it, from a table that the scalar core reads ahead; a tile on a boundary is visited once for each of its groups, and
each visit stores its own group's rows. Columns come first and are parallel, so that both cores of a v4 chip have half
of them. Where the whole contraction fits VMEM there is one step, and a group's weights stay for all of its rows. The
rows that no group has are one more group, whose result is zeros.
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
from capibara.kernels.core.context import current_interpret, matmul_precision
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.grouped.reference import gated
from capibara.kernels.ops.layers.grouped.rules import floats, out_dtype_of, sizes
from capibara.kernels.ops.layers.grouped.tiles import aligned_tiles, with_rest
from capibara.kernels.ops.linalg.gemm.tpu.forward import LANES, STEP_SECONDS, matrix_precision
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

ROWS = 16  # what a tile's rows are a multiple of: a register of bfloat16 has so many


@dataclasses.dataclass(frozen=True)
class GroupedTile:
    """Rows, columns and K of one program's tile; a dimension that is shorter is taken whole."""

    block_m: int
    block_n: int
    block_k: int

    def __post_init__(self) -> None:
        for field, unit in (("block_m", ROWS), ("block_n", LANES), ("block_k", LANES)):
            value = getattr(self, field)
            if not isinstance(value, int) or value <= 0 or value % unit:
                raise rule_error(f"{field} is a positive multiple of {unit}", value, "use 256 or 512")

    def cut(self, rows: int, inner: int, columns: int) -> tuple[int, int, int]:
        """(rows, columns, K) of the tile for operands of this size."""
        return min(self.block_m, rows), min(self.block_n, columns), min(self.block_k, inner)


def whole(length: int) -> int:
    """A length as the matrix unit pays for it."""
    return math.ceil(length / LANES) * LANES


def tiles_for(call: Call, used: Callable[[GroupedTile], int], seconds: Callable[[GroupedTile], float]) -> Any:
    """Every tile that fits VMEM by `used`, the one predicted fastest by `seconds` first."""
    n = sizes(call)
    limit = vmem.limit(call)
    tiles = (
        GroupedTile(bm, bn, bk)
        for bm in (16, 64, 128, 256, 512)
        for bn in (128, 256, 512, 1024, 2048)
        for bk in (128, 256, 512, 1024, 2048, 4096, 8192)
    )
    distinct = {tile.cut(n.rows, n.inner, n.columns): tile for tile in tiles if used(tile) <= limit}
    return sorted(distinct.values(), key=seconds)


def _specs(tile: tuple[int, int, int], groups: int, flipped: bool) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """The blocks of the rows, of a weight and of a result, for a tile's (rows, columns, K)."""
    bm, bn, bk = tile

    def weight_at(n: Any, v: Any, k: Any, group_of: Any, *_: Any) -> tuple[Any, Any, Any]:
        group = jnp.minimum(group_of[v], groups - 1)
        return (group, n, k) if flipped else (group, k, n)

    return (
        pl.BlockSpec((bm, bk), lambda n, v, k, group_of, tile_of, bounds: (tile_of[v], k)),
        pl.BlockSpec((None, bn, bk) if flipped else (None, bk, bn), weight_at),
        pl.BlockSpec((bm, bn), lambda n, v, k, group_of, tile_of, bounds: (tile_of[v], n)),
    )


def _sum_scratch(tile: tuple[int, int, int]) -> Any:
    return pltpu.VMEM(tile[:2], jnp.float32)


def tile_bytes(call: Call, config: GroupedTile) -> int:
    """VMEM of the blocks and the sums. With one step of K these are in the compiler's own memory, and as large."""
    rows, inner, columns, groups = sizes(call)
    tile = config.cut(rows, inner, columns)
    lhs_spec, weight_spec, out_spec = _specs(tile, groups, flipped=False)
    dtype, weights = call.need("lhs").dtype, len(floats(call)) - 1
    results = 3 if weights == 2 else 1  # training returns both products too
    blocks = [(lhs_spec, dtype), *[(weight_spec, dtype)] * weights, *[(out_spec, out_dtype_of(call))] * results]
    return vmem_bytes(blocks, [_sum_scratch(tile)] * weights)


def predicted_seconds(call: Call, tile: GroupedTile) -> float:
    """An ordering, not a measurement: matrix work on whole tiles against bytes through HBM, and a fee a step."""
    rows, inner, columns, groups = sizes(call)
    chip = vmem.chip_of(call)
    bm, bn, bk = tile.cut(rows, inner, columns)
    tiles, steps_n, steps_k = math.ceil(rows / bm), math.ceil(columns / bn), math.ceil(inner / bk)
    visits = tiles + groups - 1  # every boundary inside a tile
    weights, item = len(floats(call)) - 1, call.need("lhs").dtype.itemsize
    # A weight tile is loaded into the matrix unit in the time that 128 rows take.
    matrix = 2.0 * weights * visits * max(bm, LANES) * steps_n * whole(bn) * steps_k * whole(bk)
    matrix *= 1 + LANES / (2 * whole(bk))
    fetched = (tiles, min(groups, visits)) if steps_k == 1 else (visits, visits)
    moved = item * (fetched[0] * bm * inner * steps_n + weights * fetched[1] * inner * columns + rows * columns)
    peak = chip.peak_flops("bfloat16") or math.inf
    fees = visits * steps_n * steps_k * STEP_SECONDS / (chip.cores_per_chip or 1)
    halves = 1 if steps_n > 1 else 2  # one tile of columns keeps one core of the two busy
    return halves * max(matrix / peak, moved / chip.hbm_bandwidth) + fees


def candidates(call: Call) -> Sequence[GroupedTile]:
    return tiles_for(call, functools.partial(tile_bytes, call), functools.partial(predicted_seconds, call))


def refuses(call: Call) -> str | None:
    operands = floats(call)
    types = {np.dtype(x.dtype).name for x in operands}
    if len(types) > 1:
        return f"its operands have one type; these are {' and '.join(sorted(types))}"
    (dtype,) = types
    if dtype not in ("bfloat16", "float32"):
        return f"the v4 matrix units take bfloat16 and float32, not {dtype}"
    if np.dtype(out_dtype_of(call)).name not in ("bfloat16", "float32"):
        return f"it writes bfloat16 and float32, not {out_dtype_of(call)}"
    if any(0 in x.shape for x in operands):
        return "an operand is empty"
    if dtype == "float32" and matmul_precision() in ("high", "tensorfloat32", "bfloat16_3x"):
        return f"Mosaic has no {matmul_precision()!r} precision between one pass and the full six"
    if not call.op.implementations["pallas_tpu"].candidates(call):
        return "no tile of it fits the core's VMEM"
    return None


def _body(
    group_of: Any, tile_of: Any, bounds: Any, lhs_ref: Any, *refs: Any, groups: int, weights: int, results: int,
    steps: int, tail: int, weight_axis: int, precision: Any, finish: Callable[..., tuple[jax.Array, ...]],
) -> None:  # fmt: skip
    weight_refs, out_refs, sums = refs[:weights], refs[weights : weights + results], refs[weights + results :]
    visit, step = pl.program_id(1), pl.program_id(2)
    group = group_of[visit]
    some_group = group < groups  # not the rows that no group has

    def product(weight_ref: Any, masked: bool) -> jax.Array:
        a, b = lhs_ref[...], weight_ref[...]
        if masked:
            # Past the edge lies whatever memory held, NaN too, and NaN times zero is NaN: both sides are cleared.
            a = jnp.where(lax.broadcasted_iota(jnp.int32, a.shape, 1) < tail, a, jnp.zeros_like(a))
            b = jnp.where(lax.broadcasted_iota(jnp.int32, b.shape, weight_axis) < tail, b, jnp.zeros_like(b))
        numbers = (((1,), (weight_axis,)), ((), ()))
        return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)

    def store(values: Sequence[jax.Array]) -> None:
        """The group's own rows; the others are those of visits before and after this one."""
        first = tile_of[visit] * lhs_ref.shape[0]
        for out_ref, value in zip(out_refs, values, strict=True):
            row = lax.broadcasted_iota(jnp.int32, value.shape, 0) + first
            mine = (row >= bounds[group]) & (row < bounds[group + 1])
            out_ref[...] = jnp.where(mine, value, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)

    if steps == 1:

        @pl.when(some_group)
        def _products() -> None:
            store(finish(*(product(ref, masked=False) for ref in weight_refs)))

        @pl.when(jnp.logical_not(some_group))
        def _zeros() -> None:
            store([jnp.zeros(ref.shape, jnp.float32) for ref in out_refs])

        return

    last = steps - 1

    @pl.when(step == 0)
    def _clear() -> None:
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    def add(masked: bool) -> None:
        for ref, weight_ref in zip(sums, weight_refs, strict=True):
            ref[...] += product(weight_ref, masked)

    pl.when(some_group & (step < last) if tail else some_group)(lambda: add(masked=False))
    if tail:
        pl.when(some_group & (step == last))(lambda: add(masked=True))

    @pl.when(step == last)
    def _finish() -> None:
        store(finish(*(ref[...] for ref in sums)))


def _call(
    lhs: jax.Array, weights: Sequence[jax.Array], group_sizes: jax.Array, config: GroupedTile, *, flipped: bool,
    outs: Sequence[Any], finish: Callable[..., tuple[jax.Array, ...]], name: str,
) -> Sequence[jax.Array]:  # fmt: skip
    """`finish(lhs @ weight, ...)` as one Pallas call; `outs` are the results' types."""
    rows, inner = lhs.shape
    groups, columns = weights[0].shape[0], weights[0].shape[1 if flipped else 2]
    tile = (bm, bn, bk) = config.cut(rows, inner, columns)
    steps, steps_n = math.ceil(inner / bk), math.ceil(columns / bn)
    visits = aligned_tiles(with_rest(group_sizes, rows), rows, bm)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), visits.group_ends])
    lhs_spec, weight_spec, out_spec = _specs(tile, groups, flipped)
    results = [out_struct((rows, columns), dtype, lhs) for dtype in outs]
    moved: list[Any] = [lhs, *weights, *results]
    return pl.pallas_call(
        functools.partial(
            _body, groups=groups, weights=len(weights), results=len(outs), steps=steps,
            tail=inner - (steps - 1) * bk if inner % bk else 0, weight_axis=1 if flipped else 0,
            precision=matrix_precision(lhs.dtype, None), finish=finish,
        ),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(steps_n, visits.visit_count, steps),
            in_specs=[lhs_spec, *[weight_spec] * len(weights)],
            out_specs=[out_spec] * len(outs),
            scratch_shapes=[_sum_scratch(tile)] * (len(weights) if steps > 1 else 0),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(weights) * rows * inner * columns,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in moved),
            transcendentals=rows * columns if len(weights) > 1 else 0,
        ),
        interpret=current_interpret().pallas_argument(),
        name=name,
    )(visits.group_of_visit, visits.tile_of_visit, bounds, lhs, *weights)  # fmt: skip


def grouped_forward(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, config: GroupedTile, transpose_rhs: bool,
    out_dtype: str | None,
) -> jax.Array:  # fmt: skip
    out = jnp.dtype(out_dtype) if out_dtype else lhs.dtype
    (result,) = _call(
        lhs, [rhs], group_sizes, config, flipped=transpose_rhs, outs=[out], finish=lambda z: (z,),
        name="capibara_grouped_gemm",
    )  # fmt: skip
    return result


def gated_forward(
    lhs: jax.Array, gate: jax.Array, up: jax.Array, group_sizes: jax.Array, *, config: GroupedTile, activation: str,
    return_products: bool,
) -> Any:  # fmt: skip
    """Two products with one reading of lhs; the activation is applied before they leave VMEM."""

    def finish(*products: jax.Array) -> tuple[jax.Array, ...]:
        y = gated(activation, *products)
        return (y, *products) if return_products else (y,)

    results = _call(
        lhs, [gate, up], group_sizes, config, flipped=False, outs=[lhs.dtype] * (3 if return_products else 1),
        finish=finish, name="capibara_grouped_gated_gemm",
    )  # fmt: skip
    return tuple(results) if return_products else results[0]


def implementation(fn: Callable[..., Any], candidates: Callable[[Call], Sequence[GroupedTile]]) -> Implementation:
    return Implementation(
        "pallas_tpu",
        fn,
        platforms=("tpu",),
        refuses=refuses,
        kernel=True,
        config_type=GroupedTile,
        candidates=candidates,
    )


IMPLEMENTATION = implementation(grouped_forward, candidates)
GATED_IMPLEMENTATION = implementation(gated_forward, candidates)
