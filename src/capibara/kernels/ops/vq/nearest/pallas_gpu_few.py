"""The nearest of a few codes on Hopper, in one kernel that reads x once: all else is in its shadow.

A persistent grid of five warpgroups a program. One fetches rows by TMA. Two round the codes to 16 bits into shared
memory, where they stay, and then take 64 rows of a tile each: the best few codes of every row by 16-bit products, with
a bound on their error. Two more look again, in float32, at the rows of a computing warpgroup whose best codes are not
told apart; where the list may not be complete, at all codes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.pallas_gpu_compare import LARGEST_USABLE
from capibara.kernels.ops.vq.nearest.pallas_gpu_prepare import enlargement
from capibara.kernels.ops.vq.nearest.pallas_gpu_resolve import look_again
from capibara.kernels.ops.vq.nearest.pallas_gpu_search import (
    COLUMN_BITS,
    DEPTH,
    FETCH_REGISTERS,
    LAYOUT,
    LOWEST,
    PROGRAM_ROWS,
    ROW_LAYOUT,
    ROWS,
    SearchConfig,
    error_bound,
    tile_best,
)
from capibara.kernels.pallas.hopper import SMEM_BYTES, load, swizzled

COMPUTE_REGISTERS, LOOK_REGISTERS = 152, 64  # with those that fetch 472 of 480, which five warpgroups start with
LARGEST_NUMBER = 8.0  # of the scaled codes, roughly: rows may have 8,000 times as large ones before float16 ends


def smem_bytes(config: SearchConfig, width: int, x_bytes: int) -> int:
    lists = 2 * ROWS * (config.kept + 1) * 4
    return config.tile * (width * 2 + 4) + config.stages * PROGRAM_ROWS * DEPTH * x_bytes + lists + 2048


def fits(config: SearchConfig, width: int, x_bytes: int) -> bool:
    return config.tile == ROWS and smem_bytes(config, width, x_bytes) <= SMEM_BYTES


def nearest_of_few(x: jax.Array, codebook: jax.Array, config: SearchConfig, programs: int) -> jax.Array:
    """Indices [N] of the nearest of config.tile codes or fewer; N is 128 or more."""
    count = codebook.shape[0]
    codes = lax.pad(codebook, np.zeros((), codebook.dtype), ((0, config.tile - count, 0), (0, 0, 0)))
    (made,) = plgpu.kernel(
        functools.partial(_program, config=config, count=count),
        out_type=[out_struct((x.shape[0],), jnp.int32, x)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=5,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes)
    return made


def _program(x_hbm: Any, codes_hbm: Any, out_hbm: Any, *, config: SearchConfig, count: int) -> None:
    rows, width = x_hbm.shape
    stages, kept, steps = config.stages, config.kept, width // DEPTH
    narrow_type = jnp.float16 if codes_hbm.dtype == jnp.float32 else codes_hbm.dtype

    def each_row_tile(visit: Any) -> None:
        """Call visit(first row, tiles done before) for this program's share."""

        @plgpu.nd_loop((math.ceil(rows / PROGRAM_ROWS),), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            # The last starts early: it finds some rows' codes again.
            visit(jnp.minimum(index * PROGRAM_ROWS, rows - PROGRAM_ROWS), loop.local_index)

    @functools.partial(
        pl.run_scoped,
        codes_smem=plgpu.SMEM((steps, config.tile, DEPTH), narrow_type, transforms=swizzled(narrow_type)),
        x_smem=plgpu.SMEM((stages, 2, ROWS, DEPTH), x_hbm.dtype, transforms=swizzled(x_hbm.dtype)),
        half_smem=plgpu.SMEM((config.tile,), jnp.float32),
        found_smem=plgpu.SMEM((2, kept + 1, ROWS), jnp.int32),
        filled=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # both halves of the rows
        drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both computing warpgroups
        prepared=plgpu.Barrier(num_arrivals=2),  # the codes, by both
        listed=plgpu.Barrier(num_arrivals=1, num_barriers=2),  # a computing warpgroup's lists
        looked=plgpu.Barrier(num_arrivals=1, num_barriers=2),  # they may be written over
        collective_axes="warpgroup",
    )
    def _scoped(
        codes_smem: Any, x_smem: Any, half_smem: Any, found_smem: Any, filled: Any, drained: Any, prepared: Any,
        listed: Any, looked: Any,
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 4)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch(start: Any, done: Any) -> None:
                @pl.loop(0, steps)
                def _step(step: Any) -> None:
                    turn = done * steps + step
                    slot = lax.rem(turn, stages)

                    @pl.when(turn >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    for part in range(2):
                        at = pl.ds(start + part * ROWS, ROWS), pl.ds(step * DEPTH, DEPTH)
                        plgpu.copy_gmem_to_smem(x_hbm.at[at], x_smem.at[slot, part], filled.at[slot])

            each_row_tile(fetch)

        @pl.when((warpgroup == 2) | (warpgroup == 3))
        def _look() -> None:
            plgpu.set_max_registers(LOOK_REGISTERS, action="decrease")
            whose = warpgroup - 2

            def look(start: Any, done: Any) -> None:
                plgpu.barrier_wait(listed.at[whose])

                @pl.loop(0, ROWS)
                def _row(row: Any) -> None:
                    look_again(
                        x_hbm, codes_hbm, out_hbm, start + whose * ROWS + row,
                        lambda place: found_smem[whose, place, row], kept, half_smem,
                    )  # fmt: skip

                plgpu.barrier_arrive(looked.at[whose])

            each_row_tile(look)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            bounds = _prepare(codes_hbm, codes_smem, half_smem, warpgroup, count)
            plgpu.commit_smem()
            plgpu.barrier_arrive(prepared)
            plgpu.barrier_wait(prepared)

            def compute(first: Any, done: Any) -> None:
                scores, squares, lost = _contract(
                    x_smem, codes_smem, filled, drained, warpgroup, bounds[0], done * steps
                )
                values, indices = tile_best(scores, half_smem, 0, config)
                error = error_bound(squares, lost, values[0], bounds, width, COLUMN_BITS)
                threshold = values[0] - 2 * error
                number = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.int32), ROW_LAYOUT)
                for value in values:
                    # Not below: what cannot be compared counts too.
                    number = number + jnp.where(value < threshold, 0, 1).astype(jnp.int32)
                out_hbm[pl.ds(first + warpgroup * ROWS, ROWS)] = indices[0]

                @pl.when(done > 0)
                def _() -> None:
                    plgpu.barrier_wait(looked.at[warpgroup])

                for place, vector in enumerate((*indices, number)):
                    found_smem[warpgroup, place] = vector
                plgpu.barrier_arrive(listed.at[warpgroup])

            each_row_tile(compute)


def _prepare(codes_hbm: Any, codes_smem: Any, half_smem: Any, warpgroup: Any, count: int) -> tuple[Any, Any, Any]:
    """Round the codes into shared memory, every other step by each warpgroup; (scale, largest norm, largest lost).

    The scale brings the codes of the first step near LARGEST_NUMBER: what lies beyond float16 then is left out of the
    products, and is in what was lost.
    """
    steps = codes_smem.shape[0]
    exact = codes_hbm.dtype == codes_smem.dtype

    def fetched(step: Any) -> Any:
        return load(codes_hbm.at[:, pl.ds(step * DEPTH, DEPTH)], LAYOUT, optimized=False)

    first = fetched(0)
    scale: Any = np.float32(1)
    if codes_hbm.dtype != jnp.float16:
        sizes = jnp.abs(first.astype(jnp.float32))
        largest = jnp.where(sizes < 1e30, sizes, 0.0).max(axis=1).max()
        usual = LARGEST_NUMBER / jnp.where(largest > 1e-30, largest, LARGEST_NUMBER)
        scale = enlargement(largest) if exact else usual
    nothing = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), ROW_LAYOUT)

    def step(number: Any, carry: Any) -> Any:
        raw, whole, norms, lost = carry
        following = fetched(jnp.minimum(number + 1, steps - 1))
        wide = raw.astype(jnp.float32)
        whole = whole + (wide * wide).sum(axis=1)
        wide = wide * scale
        # Codes of 16 bits have the scale twice, for themselves and for the rows.
        taken = wide * scale if exact else wide
        held = jnp.abs(taken) < np.float32(np.inf if exact else 65000.0)
        narrow = jnp.where(held, taken, 0.0).astype(codes_smem.dtype)
        norms = norms + (wide * wide).sum(axis=1)
        gone = jnp.where(held, 0.0, wide) if exact else wide - narrow.astype(jnp.float32)
        lost = lost + (gone * gone).sum(axis=1)

        @pl.when(lax.rem(number, 2) == warpgroup)
        def _() -> None:
            codes_smem[number] = narrow

        return following, whole, norms, lost

    _, whole, norms, lost = lax.fori_loop(0, steps, step, (first, nothing, nothing, nothing))
    code = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=LAYOUT).max(axis=1)
    usable = (whole < np.inf) & (code < count)

    @pl.when(warpgroup == 0)
    def _write() -> None:
        # Norms beyond are of codes that are lost as a whole, so that every distance is computed.
        half_smem[...] = jnp.where(usable, jnp.minimum(norms * 0.5, 0.5 * LARGEST_USABLE), -LOWEST)

    def root(squares: Any) -> Any:
        largest = jnp.where(usable, squares, 0.0).max()
        return largest * lax.rsqrt(jnp.maximum(largest, 1e-35))

    return scale, root(norms), root(lost)


def _contract(
    x_smem: Any, codes_smem: Any, filled: Any, drained: Any, warpgroup: Any, scale: Any, before: Any
) -> tuple[Any, Any, Any]:
    """(products of this warpgroup's rows and the codes, squares of the rows, squares of what rounding took)."""
    steps, tile, _ = codes_smem.shape
    stages = x_smem.shape[0]
    exact = x_smem.dtype == codes_smem.dtype

    def rounded(step: Any, norms: Any) -> tuple[Any, Any]:
        slot = lax.rem(before + step, stages)
        plgpu.barrier_wait(filled.at[slot])
        raw = load(x_smem.at[slot, warpgroup], LAYOUT)
        plgpu.barrier_arrive(drained.at[slot])
        wide = raw.astype(jnp.float32) * scale
        if exact:
            return raw, (norms[0] + (wide * wide).sum(axis=1), norms[1])
        narrow = wide.astype(codes_smem.dtype)
        gone = wide - narrow.astype(jnp.float32)
        return narrow, (norms[0] + (wide * wide).sum(axis=1), norms[1] + (gone * gone).sum(axis=1))

    def products(accumulator: Any) -> Any:
        nothing = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), ROW_LAYOUT)

        def multiply(step: Any, narrow: Any) -> None:
            plgpu.wgmma(accumulator, narrow, plgpu.transpose_ref(codes_smem.at[step], (1, 0)))

        def one(step: Any, carry: Any) -> Any:
            narrow, norms = carry
            multiply(step, narrow)
            # The next rows are rounded while these are multiplied.
            following, norms = rounded(step + 1, norms)
            plgpu.wgmma_wait(0)
            return following, norms

        narrow, norms = lax.fori_loop(0, steps - 1, one, rounded(0, (nothing, nothing)))
        multiply(steps - 1, narrow)
        plgpu.wgmma_wait(0)
        return accumulator[...], *norms

    return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((ROWS, tile), jnp.float32))
