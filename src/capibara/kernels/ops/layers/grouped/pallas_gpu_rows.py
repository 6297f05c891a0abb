"""The product of grouped rows with their groups' weights on Hopper, plain or gated, as one persistent kernel.

A tile is a block of one group's rows by a block of columns. A group's last tile has rows to spare, and reaches back
for rows of the tile before: both make the same numbers of them, and whole pieces leave at once. A group shorter than
a piece cannot: what its tile reads past the group's end is multiplied and not stored, and the rows leave in runs of
powers of two. A warpgroup without a row of its own in a tile multiplies nothing. The rows of no group are one more
group, whose tiles are zeros and need no contraction.

The gated product has a block of the gate and one of up in each stage, each half as wide, and two sums: a thread holds
both numbers that it multiplies.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_target
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.grouped.pallas_gpu_config import PIECE_ROWS, STEP, GroupedHopperConfig, piece_columns
from capibara.kernels.ops.layers.grouped.pallas_gpu_walk import (
    FETCH_REGISTERS,
    FETCHER,
    MULTIPLY_REGISTERS,
    banded,
    contract,
    each_tile,
    fetch_steps,
    part,
    row_tiled,
    send,
    send_zeros,
    skip,
    staging,
)
from capibara.kernels.ops.layers.grouped.tiles import row_tiles
from capibara.kernels.pallas.hopper import multiprocessors, swizzled

RUNS = (32, 16, 8, 4, 2, 1)  # rows of a partial piece that leave together
FEWEST_ROWS = 8  # an axis of a single row would have no place in a TMA descriptor


def _sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp(-z))


def _gelu(z: Any) -> Any:
    """z times the normal distribution function, whose tail is a polynomial times an exponential.

    The formula (Abramowitz and Stegun, 7.1.26) is within 1.5e-7 of the tail: below what a 16-bit result can show.
    """
    x = jnp.abs(z) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * jnp.exp(-x * x)
    return z * jnp.where(z < 0.0, tail, 1.0 - tail)


# Exponentials and quotients, which keep their relative accuracy in the tails when they are approximated; the
# hardware's approximate tanh would not.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": lambda z: z * _sigmoid(z),
    "gelu": _gelu,
    "gelu_tanh": lambda z: z * _sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)),
    "relu": lambda z: jnp.maximum(z, 0.0),
    "sigmoid": _sigmoid,
}


def grouped_rows(
    lhs: jax.Array, weights: tuple[jax.Array, ...], group_sizes: jax.Array, *, config: GroupedHopperConfig,
    transposed: bool, out_dtype: Any, activation: str | None = None, outputs: int = 1,
) -> list[jax.Array]:  # fmt: skip
    """`lhs` by its groups' one weight, or activation(by the first) times (by the second); see the module's text.

    Of the gated product three `outputs` are it and both products.
    """
    if (config.tile_n // len(weights)) % piece_columns(out_dtype):
        raise rule_error("The gated product halves tile_n, to multiples of 64", config.tile_n, "use 128 or 256")
    rows, _ = lhs.shape
    columns = weights[0].shape[1 if transposed else 2]
    if rows < FEWEST_ROWS:
        lhs = jnp.pad(lhs, ((0, FEWEST_ROWS - rows), (0, 0)))
    tiles = row_tiles(group_sizes, rows, config.program_tile[0], rest=True)
    out = out_struct((lhs.shape[0], columns), out_dtype, lhs)
    programs = multiprocessors(current_target().device_kind)
    kernel = plgpu.kernel(
        functools.partial(
            _program, config=config, programs=programs, transposed=transposed, activation=activation, outputs=outputs
        ),
        out_type=[out] * outputs,
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Exponentials good to 2 units of float32: far below what a 16-bit output can show.
            approx_math=out.dtype.itemsize == 2,
        ),
    )
    made = kernel(lhs, *weights, *tiles)
    return [x[:rows] for x in made] if rows < FEWEST_ROWS else made


def _program(
    *refs: Any, config: GroupedHopperConfig, programs: int, transposed: bool, activation: str | None, outputs: int
) -> None:
    lhs, *middle = refs[: len(refs) - outputs]
    outs = refs[len(refs) - outputs :]
    *weights, group_of, bounds, group_start, tile_count = middle
    groups, columns = weights[0].shape[0], weights[0].shape[1 if transposed else 2]
    contraction = lhs.shape[1] // STEP
    tile_m, tile_n, stages = config.tile_m, config.tile_n, config.stages
    program_m, program_n = config.program_tile
    share = tile_n // len(weights)  # a warpgroup's columns of each weight
    across = program_n // len(weights)  # a program's columns of the result
    column_tiles = math.ceil(columns / across)
    width = piece_columns(outs[0].dtype)
    pieces = [(r, c) for r in range(0, tile_m, PIECE_ROWS) for c in range(0, share, width)]
    b_block = (across, STEP) if transposed else (STEP, across)

    @functools.partial(
        pl.run_scoped,
        a_smem=plgpu.RefUnion(
            plgpu.SMEM((stages, program_m, STEP), lhs.dtype, transforms=row_tiled(lhs.dtype)),
            plgpu.SMEM((stages, program_m, STEP), lhs.dtype, transforms=swizzled(lhs.dtype)),
        ),
        b_smem=[plgpu.SMEM((stages, *b_block), w.dtype, transforms=swizzled(w.dtype)) for w in weights],
        filled=plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=stages),
        drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both multiplying warpgroups
        staged=staging(config, outs[0].dtype),
        collective_axes="warpgroup",
    )
    def _scoped(a_smem: Any, b_smem: Any, filled: Any, drained: Any, staged: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        # The same bytes twice: as TMA fills them from any row, and as wgmma reads them.
        a_fetched, a_read = a_smem
        tiles = tile_count[0]

        def place(index: Any) -> tuple[Any, Any, Any]:
            """The tile's place in the list, its first column, and whether its rows have a group."""
            row, column = banded(index, tiles, column_tiles, config.band)
            return row, column * across, group_of[row] < groups

        def span(row: Any) -> tuple[Any, Any]:
            """The tile's first row and the row after its last: whole pieces, as far as the group reaches back."""
            end = bounds[row + 1]
            pieces_long = lax.div(end - bounds[row] + (PIECE_ROWS - 1), PIECE_ROWS)
            return lax.max(group_start[row], end - pieces_long * PIECE_ROWS), end

        @pl.when(warpgroup == FETCHER)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def visit(index: Any, before: Any) -> Any:
                row, column, grouped = place(index)
                group, rows, columns_at = group_of[row], pl.ds(span(row)[0], program_m), pl.ds(column, across)

                def fetch(step: Any, slot: Any) -> None:
                    depth = pl.ds(step * STEP, STEP)
                    plgpu.copy_gmem_to_smem(lhs.at[rows, depth], a_fetched.at[slot], filled.at[slot])
                    at = (group, columns_at, depth) if transposed else (group, depth, columns_at)
                    for weight, block in zip(weights, b_smem, strict=True):
                        plgpu.copy_gmem_to_smem(weight.at[at], block.at[slot], filled.at[slot])

                @pl.when(grouped)
                def _grouped() -> None:
                    fetch_steps(config, drained, contraction, before, fetch)

                return jnp.where(grouped, contraction, 0)

            each_tile(tiles * column_tiles, programs, visit)

        @pl.when(warpgroup < FETCHER)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            # Where this warpgroup's part starts inside the program's tile.
            inside_m = warpgroup * tile_m if config.split == "m" else 0
            inside_n = warpgroup * share if config.split == "n" else 0

            def operands(slot: Any) -> tuple[Any, list[Any]]:
                left = part(a_read.at[slot], inside_m, tile_m, 0, config.split == "m")
                axis = 0 if transposed else 1
                rights = [part(block.at[slot], inside_n, share, axis, config.split == "n") for block in b_smem]
                return left, [plgpu.transpose_ref(x, (1, 0)) for x in rights] if transposed else rights

            def visit(index: Any, before: Any) -> Any:
                row, column, grouped = place(index)
                start, end = span(row)
                first = start + inside_m
                own = end - first  # rows of this warpgroup's part that are the group's

                def store(sums: list[Any]) -> None:
                    for number, (r, c) in enumerate(pieces):
                        values = [z[r : r + PIECE_ROWS, c : c + width] for z in sums]
                        if activation is not None:
                            values = [ACTIVATIONS[activation](values[0]) * values[1], *values]
                        for which, out in enumerate(outs):
                            copy = functools.partial(_store_rows, out, first + r, own - r, column + inside_n + c, width)
                            send(staged.at[warpgroup], number * outputs + which, values[which], copy)

                def store_zeros(slot: Any) -> None:
                    @pl.loop(0, share // width)
                    def _column(number: Any) -> None:
                        for r, out in itertools.product(range(0, tile_m, PIECE_ROWS), outs):
                            _store_rows(out, first + r, own - r, column + inside_n + number * width, width, slot)

                @pl.when(grouped & (own > 0))
                def _own() -> None:
                    contract(config, filled, drained, contraction, before, (tile_m, share), operands, store)

                @pl.when(grouped & (own <= 0))
                def _none() -> None:
                    skip(config, filled, drained, contraction, before)

                @pl.when(jnp.logical_not(grouped))
                def _rest() -> None:
                    send_zeros(staged.at[warpgroup], store_zeros)

                return jnp.where(grouped, contraction, 0)

            each_tile(tiles * column_tiles, programs, visit)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_rows(out: Any, first: Any, count: Any, column: Any, width: int, slot: Any) -> None:
    """Copy the piece's first `count` rows, or all 64, to `out`; none where `count` is not above 0."""
    columns = pl.ds(column, width)

    @pl.when(count >= PIECE_ROWS)
    def _whole() -> None:
        plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(first, PIECE_ROWS), columns], commit_group=False)

    @pl.when(count < PIECE_ROWS)
    def _partial() -> None:
        own = lax.max(count, 0)
        for rows in RUNS:  # the bits of the count
            at = lax.div(own, 2 * rows) * (2 * rows)

            @pl.when(own - at >= rows)
            def _run(at: Any = at, rows: int = rows) -> None:
                here, there = slot.at[pl.ds(at, rows)], out.at[pl.ds(first + at, rows), columns]
                plgpu.copy_smem_to_gmem(here, there, commit_group=False)
