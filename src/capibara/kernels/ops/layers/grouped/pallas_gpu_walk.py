"""What the grouped kernels on Hopper share: the walk over tiles, the ring's multiplying side, results on their way out.

Both kernels are persistent: one program a multiprocessor takes every so many tiles. One warpgroup of a program only
fetches (TMA, into a ring that runs on from tile to tile), two multiply (wgmma).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.layers.grouped.pallas_gpu_config import PIECE_ROWS, GroupedHopperConfig, piece_columns
from capibara.kernels.pallas.hopper import SWIZZLE

FETCH_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # a thread; 65,536 a multiprocessor over three warpgroups
FETCHER = 2  # the warpgroup that fetches; 0 and 1 multiply


def banded(index: Any, rows: Any, columns: int, band: int) -> tuple[Any, Any]:
    """The tile (row, column) at `index`: column by column inside a band of rows, back and forth from band to band.

    Tiles that are near in time then share their operands in L2, and two bands of one group meet at the same column.
    """
    number = lax.div(index, band * columns)
    rest = index - number * (band * columns)
    first = number * band
    height = lax.min(rows - first, band)
    column = lax.div(rest, height)
    row = first + rest - column * height
    backwards = lax.rem(number, 2)
    return row, column + backwards * (columns - 1 - 2 * column)


def each_tile(count: Any, programs: int, visit: Callable[[Any, Any], Any]) -> None:
    """visit(tile index, steps before) -> steps of the tile, for this program's tiles among `count`."""
    program = lax.axis_index("program")
    mine = lax.div(count - program + (programs - 1), programs)

    def turn(number: Any, before: Any) -> Any:
        return before + visit(number * programs + program, before)

    lax.fori_loop(0, mine, turn, program * 0)


def fetch_steps(
    config: GroupedHopperConfig, drained: Any, steps: Any, before: Any, fetch: Callable[[Any, Any], None]
) -> None:
    """fetch(step, slot) for each step of a tile, as soon as both multiplying warpgroups are done with the slot."""

    @pl.loop(0, steps)
    def _step(step: Any) -> None:
        slot = lax.rem(before + step, config.stages)

        @pl.when(before + step >= config.stages)
        def _() -> None:
            plgpu.barrier_wait(drained.at[slot])

        fetch(step, slot)


def contract(
    config: GroupedHopperConfig, filled: Any, drained: Any, steps: Any, before: Any, shape: tuple[int, int],
    operands: Callable[[Any], tuple[Any, Sequence[Any]]], use: Callable[[list[Any]], None],
) -> None:  # fmt: skip
    """use(sums), float32 of `shape`: over a tile's steps, `operands(slot)`'s left one by each of its right ones."""
    count = config.tile_n // shape[1]  # the right operands share the tile's width

    def scoped(*sums: Any) -> None:
        @pl.loop(0, steps)
        def _step(step: Any) -> None:
            slot = lax.rem(before + step, config.stages)
            plgpu.barrier_wait(filled.at[slot])
            left, rights = operands(slot)
            for total, right in zip(sums, rights, strict=True):
                plgpu.wgmma(total, left, right)
            # This step's products stay in flight; those of the one before are done with their stage.
            plgpu.wgmma_wait(len(sums))

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(drained.at[lax.rem(before + step - 1, config.stages)])

        plgpu.wgmma_wait(0)

        def release_last() -> None:
            plgpu.barrier_arrive(drained.at[lax.rem(before + steps - 1, config.stages)])

        if isinstance(steps, int):
            release_last()
        else:
            pl.when(steps > 0)(release_last)  # an empty group has none
        use([total[...] for total in sums])

    pl.run_scoped(scoped, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(count)))


def skip(config: GroupedHopperConfig, filled: Any, drained: Any, steps: Any, before: Any) -> None:
    """What `contract` does to the ring, without the products: for a warpgroup that has no row of a tile."""

    @pl.loop(0, steps)
    def _step(step: Any) -> None:
        slot = lax.rem(before + step, config.stages)
        plgpu.barrier_wait(filled.at[slot])
        plgpu.barrier_arrive(drained.at[slot])


def row_tiled(dtype: Any) -> tuple[Any, ...]:
    """A layout of shared memory whose rows can be copied from and to any row of an array.

    A buffer one swizzle atom wide has the same bytes in it as in the usual one, in tiles of 8 rows, which only starts
    at multiples of 8.
    """
    return plgpu.TilingTransform((1, piece_columns(dtype))), plgpu.SwizzleTransform(SWIZZLE)


def staging(config: GroupedHopperConfig, dtype: Any) -> Any:
    """The pieces of both warpgroups on their way out."""
    shape = (2, config.pieces, PIECE_ROWS, piece_columns(dtype))
    return plgpu.SMEM(shape, dtype, transforms=row_tiled(dtype))


def send(staged: Any, number: int, value: Any, store: Callable[[Any], None]) -> None:
    """Write a piece to its slot of this warpgroup's `staged` and let `store(slot)` copy it out, as one group."""
    slots = staged.shape[0]
    slot = staged.at[number % slots]
    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    slot[...] = value.astype(staged.dtype)
    plgpu.commit_smem()
    store(slot)
    plgpu.commit_smem_to_gmem_group()


def send_zeros(staged: Any, store: Callable[[Any], None]) -> None:
    """Let `store(slot)` copy a piece of zeros wherever it wants; nothing is on its way when it returns."""
    slot = staged.at[0]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    slot[...] = jnp.zeros(slot.shape, staged.dtype)
    plgpu.commit_smem()
    store(slot)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def part(smem: Any, start: Any, size: int, axis: int, split: bool) -> Any:
    """A warpgroup's share of an operand's tile; the whole of it along the side that is not split."""
    if not split:
        return smem
    return smem.at[pl.ds(start, size), :] if axis == 0 else smem.at[:, pl.ds(start, size)]
