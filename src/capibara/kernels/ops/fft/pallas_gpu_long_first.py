"""The first pass of a long transform on Hopper; see `pallas_gpu_long`."""

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
    LAYOUT,
    ROWS,
    Planes,
    add_products,
    after_product,
    load_matrices,
    spread,
    start,
    times,
)
from capibara.kernels.ops.fft.pallas_gpu_moves import keep_exchanged, keep_operand
from capibara.kernels.ops.fft.pallas_gpu_pairs import split_pairs
from capibara.kernels.pallas.hopper import load, swizzled

WIDE = 256  # numbers of the longest line that one copy moves


def _program(*refs: Any, programs: int, radix: int, next_radix: int, inverse: bool, pairs: bool) -> None:
    """Transforms of 64 · radix points down the columns of [signals · 64, radix · width] planes.

    A warpgroup keeps to the same 16 columns of all its signals, so that it fetches their factors once. Bfloat16
    numbers arrive as the products take them. Float32 ones are rounded first; with `pairs` they are real and imaginary
    by turns, and the columns of each eight are in the order of TURNS from there on.
    """
    given_hbm, (matrices_hbm, lines_hbm, base_hbm, step_hbm), out_hbm = refs[:-6], refs[-6:-2], refs[-2:]
    kind = given_hbm[0].dtype
    rounded = kind == BF16
    each = 2 if pairs else 1  # numbers of a column
    columns_read = each * COLUMNS
    signals = given_hbm[0].shape[0] // ROWS
    blocks = given_hbm[0].shape[1] // radix // columns_read
    together = 2 * programs // blocks  # signals
    assert together, f"{blocks} warpgroups or more, not {2 * programs}"
    slots = len(given_hbm) * radix
    stages = 2 if rounded else 1  # tiles on their way to a warpgroup: what shared memory holds
    rows_made = COLUMNS // next_radix
    made_shape = (2, 2, rows_made, *out_hbm[0].shape[1:])
    made_spec = plgpu.SMEM(made_shape, BF16)
    operand_spec = plgpu.SMEM((2, 2, radix * COLUMNS, ROWS), BF16, transforms=swizzled(BF16))

    @functools.partial(
        pl.run_scoped,
        given=plgpu.SMEM(
            (2 * stages, slots, ROWS, columns_read),
            kind,
            transforms=swizzled(kind, columns_read * jnp.dtype(kind).itemsize),
        ),
        # A tile that has been rounded is gone when its result is there.
        shared=made_spec if rounded else plgpu.RefUnion(made_spec, operand_spec),
        lines=plgpu.SMEM((2, 2, radix, ROWS), jnp.float32),
        base=plgpu.SMEM((2, 2, ROWS, COLUMNS), jnp.float32, transforms=swizzled(jnp.float32, 4 * COLUMNS)),
        step=plgpu.SMEM((2, 2, COLUMNS), jnp.float32),
        constants_arrived=plgpu.Barrier(num_arrivals=3, num_barriers=2),
        arrived=plgpu.Barrier(num_arrivals=slots, num_barriers=2 * stages),  # for each warpgroup
        collective_axes="warpgroup",
    )
    def _scoped(
        given: Any, shared: Any, lines: Any, base: Any, step: Any, constants_arrived: Any, arrived: Any
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("program") * 2 + warpgroup
        first, block = lax.div(worker, blocks), lax.rem(worker, blocks)
        count = jnp.where(first < together, lax.div(signals - first + together - 1, together), 0)
        made: Any
        operand: Any
        made, operand = (shared, None) if rounded else shared

        def stage(turn: Any) -> Any:
            return warpgroup * stages + lax.rem(turn, stages) if stages > 1 else warpgroup

        def fetch(turn: Any) -> None:
            rows = pl.ds((first + turn * together) * ROWS, ROWS)
            slot = stage(turn)
            for plane, hbm in enumerate(given_hbm):
                for part in range(radix):
                    own = hbm.at[rows, pl.ds((part * blocks + block) * columns_read, columns_read)]
                    plgpu.copy_gmem_to_smem(own, given.at[slot, plane * radix + part], arrived.at[slot])

        for early in range(stages):
            pl.when(count > early)(functools.partial(fetch, early))
        ready = constants_arrived.at[warpgroup]
        columns = pl.ds(block * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(lines_hbm, lines.at[warpgroup], ready)
        plgpu.copy_gmem_to_smem(base_hbm.at[:, :, columns], base.at[warpgroup], ready)
        plgpu.copy_gmem_to_smem(step_hbm.at[:, columns], step.at[warpgroup], ready)
        matrices = load_matrices(matrices_hbm)
        plgpu.barrier_wait(ready)

        def round_given(mine: Any) -> None:
            """The float32 numbers as bfloat16 planes, transposed, where the products read them."""
            for part in range(radix):
                if pairs:
                    planes = split_pairs(load(mine.at[part], LAYOUT))
                else:
                    planes = tuple(load(mine.at[plane * radix + part], LAYOUT) for plane in range(2))
                for plane, value in enumerate(planes):
                    own = operand.at[warpgroup, plane, pl.ds(part * COLUMNS, COLUMNS)]
                    keep_operand(own, value.astype(BF16))
            plgpu.commit_smem()

        def products(mine: Any, *sums: Any) -> list[Planes]:
            for part in range(radix):
                real, imag = sums[2 * part : 2 * part + 2]
                add_products(real, imag, matrices, mine.at[part], mine.at[radix + part])
            plgpu.wgmma_wait(0)
            return [(sums[2 * part][...], sums[2 * part + 1][...]) for part in range(radix)]

        def products_at_once(real: Any, imag: Any) -> list[Planes]:
            re, im = (plgpu.transpose_ref(operand.at[warpgroup, plane], (1, 0)) for plane in range(2))
            add_products(real, imag, matrices, re, im)
            plgpu.wgmma_wait(0)
            re, im = real[...], imag[...]
            columns = [slice(part * COLUMNS, (part + 1) * COLUMNS) for part in range(radix)]
            return [(re[:, own], im[:, own]) for own in columns]

        def multiplied(mine: Any) -> list[Planes]:
            count, columns = (2 * radix, COLUMNS) if rounded else (2, radix * COLUMNS)
            sums = (plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32) for _ in range(count))
            return pl.run_scoped(functools.partial(products, mine) if rounded else products_at_once, *sums)

        def with_factors(parts: list[Planes]) -> list[Planes]:
            """Times the factors between the passes. A part's are those of the first and powers of the second's."""
            own = [load(base.at[warpgroup, plane], LAYOUT) for plane in range(2)]
            of_rows = (own[0], own[1])
            line = [load(step.at[warpgroup, plane], LAYOUT.reduce(0), optimized=False) for plane in range(2)]
            powers: list[Planes] = [(line[0], line[1])]
            while len(powers) < radix - 1:
                power = len(powers) + 1
                powers.append(times(powers[power // 2 - 1], powers[power - power // 2 - 1]))
            done = [times(parts[0], of_rows)]
            for z, own_power in zip(parts[1:], powers[: radix - 1], strict=True):
                done.append(times(z, times(of_rows, spread(own_power, 1, (ROWS, COLUMNS)))))
            return done

        @pl.loop(0, count)
        def _tile(turn: Any) -> None:
            mine = given.at[stage(turn)]
            plgpu.barrier_wait(arrived.at[stage(turn)])

            def ask_for_next() -> None:
                pl.when(turn + stages < count)(functools.partial(fetch, turn + stages))

            def wait_for_last() -> None:
                """What was made of the tile before has left."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            if not rounded:
                wait_for_last()
                round_given(mine)
                ask_for_next()
            parts = multiplied(mine)
            plgpu.commit_smem()  # every warp's part of the products is done with the tile
            if rounded:
                ask_for_next()
            parts = with_factors(after_product(parts, lines.at[warpgroup], inverse))
            if rounded:
                wait_for_last()
            for part, z in enumerate(parts):
                for plane in range(2):
                    value = z[plane].astype(BF16)
                    keep_exchanged(made.at[warpgroup, plane], value, part, next_radix, in_turns=pairs)
            plgpu.commit_smem()
            row = (first + turn * together) * ROWS + block * rows_made
            for plane, hbm in enumerate(out_hbm):
                plgpu.copy_smem_to_gmem(made.at[warpgroup, plane], hbm.at[pl.ds(row, rows_made)])

        plgpu.wait_smem_to_gmem(0)


def first_pass(
    *operands: jax.Array, out: Sequence[Any], programs: int, radix: int, next_radix: int, inverse: bool,
    pairs: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Planes [signals · 64, radix · width], or pairs of numbers, and the pass's constants, to the second pass's planes.

    Those are [signals · 64, 64 · radix · next_radix], by WIDE: row by row, for each 16 rows of a transform here two
    halves of 8, in each the parts there.
    """
    program = functools.partial(_program, radix=radix, next_radix=next_radix, inverse=inverse, pairs=pairs)
    return start(program, operands, out, programs)
