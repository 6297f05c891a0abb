"""The second pass of a long transform on Hopper; see `pallas_gpu_long`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.fft.pallas_gpu_long_body import (
    BF16,
    COLUMNS,
    ROWS,
    Planes,
    add_products,
    after_product,
    load_matrices,
    start,
)
from capibara.kernels.ops.fft.pallas_gpu_moves import keep_result, store_pairs, store_quads
from capibara.kernels.pallas.hopper import swizzled

HALF = COLUMNS // 2


def _program(*refs: Any, programs: int, radix: int, inverse: bool) -> None:
    """Transforms of 64 · radix points of what the first pass made; one product is over all parts of a tile.

    Bfloat16 planes leave by way of shared memory. Float32 ones leave straight from registers, and so do complex
    numbers, which are one array of twice the columns.
    """
    given_hbm, (matrices_hbm, lines_hbm), out_hbm = refs[:2], refs[2:4], refs[4:]
    out_kind = out_hbm[0].dtype
    pairs = len(out_hbm) == 1
    by_copy = out_kind == BF16
    width = radix * COLUMNS
    signals, blocks = given_hbm[0].shape[0] // ROWS, given_hbm[0].shape[1] // width
    tiles = signals * blocks
    stride = 2 * programs
    stages = 2 if by_copy else 3  # tiles on their way to a warpgroup: what shared memory holds

    @functools.partial(
        pl.run_scoped,
        given=plgpu.SMEM((2 * stages, 2, ROWS, width), BF16, transforms=swizzled(BF16, min(2 * width, 128))),
        made=plgpu.SMEM((2, 2, radix * ROWS, COLUMNS), BF16, transforms=swizzled(BF16, 2 * COLUMNS))
        if by_copy
        else None,
        lines=plgpu.SMEM((2, radix, ROWS), jnp.float32),
        constants_arrived=plgpu.Barrier(num_arrivals=1),
        arrived=plgpu.Barrier(num_arrivals=2, num_barriers=2 * stages),  # a tile's planes, for each warpgroup
        collective_axes="warpgroup",
    )
    def _scoped(given: Any, made: Any, lines: Any, constants_arrived: Any, arrived: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("program") * 2 + warpgroup
        count = lax.div(tiles - first + stride - 1, stride)

        def stage(turn: Any) -> Any:
            return warpgroup * stages + lax.rem(turn, stages)

        def place(turn: Any) -> tuple[Any, Any]:
            tile = first + turn * stride
            return lax.div(tile, blocks), lax.rem(tile, blocks)

        def fetch(turn: Any) -> None:
            signal, block = place(turn)
            for plane, hbm in enumerate(given_hbm):
                own = hbm.at[pl.ds(signal * ROWS, ROWS), pl.ds(block * width, width)]
                plgpu.copy_gmem_to_smem(own, given.at[stage(turn), plane], arrived.at[stage(turn)])

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(lines_hbm, lines, constants_arrived)

        for early in range(stages):
            pl.when(count > early)(functools.partial(fetch, early))
        matrices = load_matrices(matrices_hbm)
        plgpu.barrier_wait(constants_arrived)

        def products(mine: Any, real: Any, imag: Any) -> Planes:
            add_products(real, imag, matrices, mine.at[0], mine.at[1])
            plgpu.wgmma_wait(0)
            return real[...], imag[...]

        def half(z: Planes, which: int) -> list[Planes]:
            """The parts of 8 of the 16 columns."""
            own = [slice((which * radix + part) * HALF, (which * radix + part + 1) * HALF) for part in range(radix)]
            return [(z[0][:, columns], z[1][:, columns]) for columns in own]

        def send(left: list[Planes], right: list[Planes], rows: Any, block: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
            for part in range(radix):
                for plane in range(2):
                    own = made.at[warpgroup, plane, pl.ds(part * ROWS, ROWS)]
                    keep_result(own, *(z[part][plane].astype(BF16) for z in (left, right)))
            plgpu.commit_smem()
            for plane, hbm in enumerate(out_hbm):
                to = hbm.at[pl.ds(rows, radix * ROWS), pl.ds(block * COLUMNS, COLUMNS)]
                plgpu.copy_smem_to_gmem(made.at[warpgroup, plane], to)

        def store(left: list[Planes], right: list[Planes], rows: Any, block: Any) -> None:
            for part in range(radix):
                own = pl.ds(rows + part * ROWS, ROWS)
                if pairs:
                    for side, z in enumerate((left, right)):
                        columns = pl.ds((2 * block + side) * COLUMNS, COLUMNS)
                        store_pairs(out_hbm[0].at[own, columns], *z[part])
                else:
                    for plane, hbm in enumerate(out_hbm):
                        to = hbm.at[own, pl.ds(block * COLUMNS, COLUMNS)]
                        store_quads(to, left[part][plane], right[part][plane])

        @pl.loop(0, count)
        def _tile(turn: Any) -> None:
            signal, block = place(turn)
            plgpu.barrier_wait(arrived.at[stage(turn)])
            sums = (plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32) for _ in range(2))
            z = pl.run_scoped(functools.partial(products, given.at[stage(turn)]), *sums)
            plgpu.commit_smem()  # every warp's part of the products is done with the tile
            pl.when(turn + stages < count)(functools.partial(fetch, turn + stages))
            left, right = (after_product(half(z, which), lines, inverse) for which in range(2))
            (send if by_copy else store)(left, right, signal * radix * ROWS, block)

        plgpu.wait_smem_to_gmem(0)


def second_pass(
    *operands: jax.Array, out: Sequence[Any], programs: int, radix: int, inverse: bool
) -> tuple[jax.Array, ...]:
    """The first pass's planes and this one's constants, to `out` [signals · 64 · radix, width]: planes, or pairs."""
    return start(functools.partial(_program, radix=radix, inverse=inverse), operands, out, programs)
