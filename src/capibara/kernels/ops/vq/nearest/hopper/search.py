"""The few best codes of every row by 16-bit products, where rows and codes both come by again and again.

A persistent grid of three warpgroups a program: one fetches by TMA, two take 64 rows each. A program's rows meet all
codes, tile by tile; x is read as it lies and rounded to 16 bits in registers, so that no copy of it is ever stored.
For every row the best few scores x·c - |c|²/2 and their indices stay in registers. What the rounding took from the
row is measured while it happens: together with the codes' own it bounds the error of every score, and so tells which
codes could be the nearest.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.hopper.common import (
    BLOCK_K,
    BLOCK_M,
    COLUMN_BITS,
    COMPUTE_REGISTERS,
    FETCH_REGISTERS,
    LAYOUT,
    LOWEST,
    PROGRAM_M,
    SearchConfig,
    across,
    count_close,
    error_bound,
    merged,
    narrow_type,
    packed,
    row_full,
    tile_best,
    words_of,
)
from capibara.kernels.pallas.hopper import load, named, swizzled


def search_scratch(config: SearchConfig, codes: int, x_dtype: Any) -> dict[str, Any]:
    """A program's shared memory: the ring of rows and codes, and the lists on their way out."""
    stages, c_dtype = config.stages, narrow_type(x_dtype)
    return {
        "x_smem": plgpu.SMEM((stages, 2, BLOCK_M, BLOCK_K), x_dtype, transforms=swizzled(x_dtype)),
        "codes_smem": plgpu.SMEM((stages, config.tile, BLOCK_K), c_dtype, transforms=swizzled(c_dtype)),
        "lists_smem": plgpu.SMEM((2, words_of(config.kept, codes), BLOCK_M), jnp.int32),
        "filled": plgpu.Barrier(num_arrivals=3, num_barriers=stages),  # both halves of the rows, and the codes
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both computing warpgroups
    }


def search(
    x: jax.Array, codes: jax.Array, half: jax.Array, centre: jax.Array, bounds: jax.Array, config: SearchConfig,
    programs: int,
) -> jax.Array:  # fmt: skip
    """[words, rows up to a multiple of 128] int32: the rows' lists, as `entry_of` reads them.

    Codes, half norms, centre and bounds are as `prepare` makes them, K a multiple of the tile. A count of `kept` says
    that there may be more.
    """
    padded_rows = math.ceil(x.shape[0] / PROGRAM_M) * PROGRAM_M
    (lists,) = plgpu.kernel(
        named("nearest_code_search", _program, config=config),
        out_type=[out_struct((words_of(config.kept, codes.shape[0]), padded_rows), jnp.int32, x)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes, half, centre, bounds)
    return lists


def _program(
    x_hbm: Any, codes_hbm: Any, half_hbm: Any, centre_hbm: Any, bounds_hbm: Any, lists_hbm: Any, *, config: SearchConfig
) -> None:
    (rows, width), codes = x_hbm.shape, codes_hbm.shape[0]
    stages, tile, kept = config.stages, config.tile, config.kept
    k_steps, tiles = math.ceil(width / BLOCK_K), codes // tile
    exact = x_hbm.dtype == codes_hbm.dtype

    def each_row_tile(visit: Any) -> None:
        """Call visit(row tile, steps done before) for this program's share."""

        @plgpu.nd_loop((math.ceil(rows / PROGRAM_M),), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            visit(index, loop.local_index * (k_steps * tiles))

    allocate: Any = functools.partial(
        pl.run_scoped, **search_scratch(config, codes, x_hbm.dtype), collective_axes="warpgroup"
    )

    @allocate
    def _scoped(x_smem: Any, codes_smem: Any, lists_smem: Any, filled: Any, drained: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch(row_tile: Any, before: Any) -> None:
                @pl.loop(0, k_steps * tiles)
                def _step(turn: Any) -> None:
                    slot = lax.rem(before + turn, stages)

                    @pl.when(before + turn >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    k = pl.ds(lax.rem(turn, k_steps) * BLOCK_K, BLOCK_K)
                    for part in range(2):
                        m = pl.ds(row_tile * PROGRAM_M + part * BLOCK_M, BLOCK_M)
                        plgpu.copy_gmem_to_smem(x_hbm.at[m, k], x_smem.at[slot, part], filled.at[slot])
                    n = pl.ds(lax.div(turn, k_steps) * tile, tile)
                    plgpu.copy_gmem_to_smem(codes_hbm.at[n, k], codes_smem.at[slot], filled.at[slot])

            each_row_tile(fetch)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            scale = bounds_hbm[0]

            def rounded(turn: Any, norms: Any) -> tuple[Any, Any]:
                """A step's rows as 16-bit numbers in registers, and the squares of the rows and of what rounding took.

                Without `norms` nothing is added to them: the first tile has measured them.
                """
                slot = lax.rem(turn, stages)
                plgpu.barrier_wait(filled.at[slot])
                raw = load(x_smem.at[slot, warpgroup], LAYOUT)
                if exact:
                    if norms is not None:
                        wide = raw.astype(jnp.float32) * scale  # the codes have it twice: for themselves, for the rows
                        norms = norms[0] + (wide * wide).sum(axis=1), norms[1]
                    return raw, norms
                wide = (raw - across(centre_hbm, lax.rem(turn, k_steps) * BLOCK_K, (BLOCK_M, BLOCK_K))) * scale
                narrow = wide.astype(codes_smem.dtype)
                if norms is not None:
                    lost = wide - narrow.astype(jnp.float32)
                    norms = norms[0] + (wide * wide).sum(axis=1), norms[1] + (lost * lost).sum(axis=1)
                return narrow, norms

            def contract(before: Any, norms: Any) -> tuple[Any, ...]:
                """The products of this warpgroup's rows and a tile of codes; with `norms`, the squares added."""

                def products(acc: Any) -> tuple[Any, ...]:
                    def multiply(step: Any, narrow: Any) -> Any:
                        slot = lax.rem(before + step, stages)
                        plgpu.wgmma(acc, narrow, codes_smem.at[slot].transpose((1, 0)))
                        return slot

                    def k_step(step: Any, carry: Any) -> Any:
                        narrow, *norms = carry
                        slot = multiply(step, narrow)
                        # The next rows are rounded while these are multiplied.
                        next_narrow, next_norms = rounded(before + step + 1, norms or None)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(drained.at[slot])
                        return next_narrow, *(next_norms or ())

                    narrow, first_norms = rounded(before, norms)
                    carry = narrow, *(first_norms or ())
                    if k_steps > 1:
                        carry = lax.fori_loop(0, k_steps - 1, k_step, carry)
                    narrow, *squares = carry
                    slot = multiply(k_steps - 1, narrow)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(drained.at[slot])
                    return acc[...], *squares

                return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((BLOCK_M, tile), jnp.float32))

            def compute(row_tile: Any, before: Any) -> None:
                zeros, lowest = row_full(0, jnp.float32), row_full(LOWEST, jnp.float32)
                no_code = row_full(0, jnp.int32)
                best = (lowest,) * kept, (no_code,) * kept

                scores, squares, lost = contract(before, (zeros, zeros))
                first_tile = lax.rem(before, 1)  # 0, traced as in the loop
                best = merged(best, tile_best(scores, half_hbm, first_tile, config))

                def tile_step(index: Any, best: Any) -> Any:
                    (scores,) = contract(before + index * k_steps, None)
                    return merged(best, tile_best(scores, half_hbm, index, config))

                if tiles > 1:
                    best = lax.fori_loop(1, tiles, tile_step, best)
                values, indices = best
                threshold = values[0] - 2 * error_bound(squares, lost, values[0], bounds_hbm, width, COLUMN_BITS)
                count = count_close(values, threshold, no_code)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for place, words in enumerate(packed((*indices, count), codes)):
                    lists_smem[warpgroup, place] = words
                plgpu.commit_smem()
                m = pl.ds(row_tile * PROGRAM_M + warpgroup * BLOCK_M, BLOCK_M)
                for place in range(words_of(kept, codes)):
                    plgpu.copy_smem_to_gmem(lists_smem.at[warpgroup, place], lists_hbm.at[place, m])

            each_row_tile(compute)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
