"""The nearest of 64 codes or fewer, in one kernel that reads x once: all else is in its shadow.

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
from capibara.kernels.ops.vq.nearest.hopper.common import (
    BLOCK_K,
    BLOCK_M,
    COLUMN_BITS,
    FETCH_REGISTERS,
    LARGEST_NARROW,
    LARGEST_SCALED,
    LARGEST_USABLE,
    LAYOUT,
    LOWEST,
    PROGRAM_M,
    SearchConfig,
    count_close,
    enlargement,
    error_bound,
    narrow_type,
    row_full,
    safe_sqrt,
    tile_best,
)
from capibara.kernels.ops.vq.nearest.hopper.resolve import look_again
from capibara.kernels.pallas.hopper import load, named, swizzled

COMPUTE_REGISTERS, LOOK_REGISTERS = 152, 64  # with those that fetch 472 of 480, which five warpgroups start with


def few_scratch(config: SearchConfig, width: int, x_dtype: Any) -> dict[str, Any]:
    """A program's shared memory: all codes, rounded, the ring of rows, and the lists for those who look again."""
    tile, stages, c_dtype = config.tile, config.stages, narrow_type(x_dtype)
    return {
        "codes_smem": plgpu.SMEM((width // BLOCK_K, tile, BLOCK_K), c_dtype, transforms=swizzled(c_dtype)),
        "x_smem": plgpu.SMEM((stages, 2, BLOCK_M, BLOCK_K), x_dtype, transforms=swizzled(x_dtype)),
        "half_smem": plgpu.SMEM((tile,), jnp.float32),
        "lists_smem": plgpu.SMEM((2, config.kept + 1, BLOCK_M), jnp.int32),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # both halves of the rows
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both computing warpgroups
        "prepared": plgpu.Barrier(num_arrivals=2),  # the codes, by both
        "listed": plgpu.Barrier(num_arrivals=1, num_barriers=2),  # a computing warpgroup's lists
        "looked": plgpu.Barrier(num_arrivals=1, num_barriers=2),  # they may be written over
    }


def nearest_of_few(x: jax.Array, codebook: jax.Array, config: SearchConfig, programs: int) -> jax.Array:
    """Indices [N] of the nearest of config.tile codes or fewer; N is 128 or more."""
    count = codebook.shape[0]
    codes = lax.pad(codebook, np.zeros((), codebook.dtype), ((0, config.tile - count, 0), (0, 0, 0)))
    (indices,) = plgpu.kernel(
        named("nearest_code_few", _program, config=config, count=count),
        out_type=[out_struct((x.shape[0],), jnp.int32, x)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=5,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes)
    return indices


def _program(x_hbm: Any, codes_hbm: Any, out_hbm: Any, *, config: SearchConfig, count: int) -> None:
    rows, width = x_hbm.shape
    stages, kept, k_steps = config.stages, config.kept, width // BLOCK_K

    def each_row_tile(visit: Any) -> None:
        """Call visit(first row, tiles done before) for this program's share."""

        @plgpu.nd_loop((math.ceil(rows / PROGRAM_M),), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            # The last starts early: it finds some rows' codes again.
            visit(jnp.minimum(index * PROGRAM_M, rows - PROGRAM_M), loop.local_index)

    allocate: Any = functools.partial(
        pl.run_scoped, **few_scratch(config, width, x_hbm.dtype), collective_axes="warpgroup"
    )

    @allocate
    def _scoped(
        codes_smem: Any, x_smem: Any, half_smem: Any, lists_smem: Any, filled: Any, drained: Any, prepared: Any,
        listed: Any, looked: Any,
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 4)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch(start: Any, done: Any) -> None:
                @pl.loop(0, k_steps)
                def _step(step: Any) -> None:
                    turn = done * k_steps + step
                    slot = lax.rem(turn, stages)

                    @pl.when(turn >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    for part in range(2):
                        at = pl.ds(start + part * BLOCK_M, BLOCK_M), pl.ds(step * BLOCK_K, BLOCK_K)
                        plgpu.copy_gmem_to_smem(x_hbm.at[at], x_smem.at[slot, part], filled.at[slot])

            each_row_tile(fetch)

        @pl.when((warpgroup == 2) | (warpgroup == 3))
        def _look() -> None:
            plgpu.set_max_registers(LOOK_REGISTERS, action="decrease")
            partner = warpgroup - 2

            def look(start: Any, done: Any) -> None:
                plgpu.barrier_wait(listed.at[partner])

                @pl.loop(0, BLOCK_M)
                def _row(row: Any) -> None:
                    look_again(
                        x_hbm, codes_hbm, out_hbm, start + partner * BLOCK_M + row,
                        lambda place: lists_smem[partner, place, row], kept, half_smem,
                    )  # fmt: skip

                plgpu.barrier_arrive(looked.at[partner])

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
                    x_smem, codes_smem, filled, drained, warpgroup, bounds[0], done * k_steps
                )
                values, indices = tile_best(scores, half_smem, 0, config)
                error = error_bound(squares, lost, values[0], bounds, width, COLUMN_BITS)
                threshold = values[0] - 2 * error
                count = count_close(values, threshold, row_full(0, jnp.int32))
                out_hbm[pl.ds(first + warpgroup * BLOCK_M, BLOCK_M)] = indices[0]

                @pl.when(done > 0)
                def _() -> None:
                    plgpu.barrier_wait(looked.at[warpgroup])

                for place, entries in enumerate((*indices, count)):
                    lists_smem[warpgroup, place] = entries
                plgpu.barrier_arrive(listed.at[warpgroup])

            each_row_tile(compute)


def _prepare(codes_hbm: Any, codes_smem: Any, half_smem: Any, warpgroup: Any, count: int) -> tuple[Any, Any, Any]:
    """Round the codes into shared memory, every other step by each warpgroup; (scale, largest norm, largest lost).

    The scale brings the codes of the first step near LARGEST_SCALED: what lies beyond float16 then is left out of the
    products, and is in what was lost.
    """
    steps = codes_smem.shape[0]
    exact = codes_hbm.dtype == codes_smem.dtype

    def fetched(step: Any) -> Any:
        return load(codes_hbm.at[:, pl.ds(step * BLOCK_K, BLOCK_K)], LAYOUT, optimized=False)

    first = fetched(0)
    scale: Any = np.float32(1)
    if codes_hbm.dtype != jnp.float16:
        sizes = jnp.abs(first.astype(jnp.float32))
        largest = jnp.where(sizes < 1e30, sizes, 0.0).max(axis=1).max()
        usual = LARGEST_SCALED / jnp.where(largest > 1e-30, largest, LARGEST_SCALED)
        scale = enlargement(largest) if exact else usual
    zeros = row_full(0, jnp.float32)

    def k_step(step: Any, carry: Any) -> Any:
        raw, whole, norms, lost = carry
        following = fetched(jnp.minimum(step + 1, steps - 1))
        wide = raw.astype(jnp.float32)
        whole = whole + (wide * wide).sum(axis=1)
        wide = wide * scale
        # Codes of 16 bits have the scale twice, for themselves and for the rows.
        taken = wide * scale if exact else wide
        in_range = jnp.abs(taken) < np.float32(np.inf if exact else LARGEST_NARROW)
        narrow = jnp.where(in_range, taken, 0.0).astype(codes_smem.dtype)
        norms = norms + (wide * wide).sum(axis=1)
        error = jnp.where(in_range, 0.0, wide) if exact else wide - narrow.astype(jnp.float32)
        lost = lost + (error * error).sum(axis=1)

        @pl.when(lax.rem(step, 2) == warpgroup)
        def _() -> None:
            codes_smem[step] = narrow

        return following, whole, norms, lost

    _, whole, norms, lost = lax.fori_loop(0, steps, k_step, (first, zeros, zeros, zeros))
    code = plgpu.broadcasted_iota(jnp.int32, (BLOCK_M, 8), 0, layout=LAYOUT).max(axis=1)
    usable = (whole < np.inf) & (code < count)

    @pl.when(warpgroup == 0)
    def _write() -> None:
        # Norms beyond are of codes that are lost as a whole, so that every distance is computed.
        half_smem[...] = jnp.where(usable, jnp.minimum(norms * 0.5, 0.5 * LARGEST_USABLE), -LOWEST)

    largest_norm, largest_lost = (safe_sqrt(jnp.where(usable, squares, 0.0).max()) for squares in (norms, lost))
    return scale, largest_norm, largest_lost


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
        error = wide - narrow.astype(jnp.float32)
        return narrow, (norms[0] + (wide * wide).sum(axis=1), norms[1] + (error * error).sum(axis=1))

    def products(acc: Any) -> Any:
        zeros = row_full(0, jnp.float32)

        def multiply(step: Any, narrow: Any) -> None:
            plgpu.wgmma(acc, narrow, codes_smem.at[step].transpose((1, 0)))

        def k_step(step: Any, carry: Any) -> Any:
            narrow, norms = carry
            multiply(step, narrow)
            # The next rows are rounded while these are multiplied.
            next_narrow, norms = rounded(step + 1, norms)
            plgpu.wgmma_wait(0)
            return next_narrow, norms

        narrow, norms = lax.fori_loop(0, steps - 1, k_step, rounded(0, (zeros, zeros)))
        multiply(steps - 1, narrow)
        plgpu.wgmma_wait(0)
        return acc[...], *norms

    return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((BLOCK_M, tile), jnp.float32))
