"""A product on Hopper's tensor cores whose warpgroups take turns: while one multiplies, the other finishes its tile.

A persistent grid, one program a multiprocessor, walks the tiles of the product in bands that share operands in L2. One
warpgroup fetches (TMA), tile after tile, into one ring. Two multiply, each every other tile of 128 x 128. The ring has
their tiles one after another, so that the one whose tile is not there yet is free to do what its last one needs before
it leaves. Where that is as much as an activation's gradient, with arrays of its own to be read, a tile that two
warpgroups share would leave the tensor cores idle meanwhile.

On an H200 power is what limits such a product: 730 W at 1.5 of 2 GHz. So idle tensor cores cost less than they seem to,
and saved passes gain less: at 16384 x 2048 x 8192 the gradient's product and its pass took 1,074 us apart, 1,058 as one
kernel with shared tiles, 1,014 in turns. The product alone is still cuBLAS's, 785 us for 823 with shared tiles and 849
in turns; clusters that share an operand gained the former 2 % and the latter nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.layers.gated_mlp.pairs import WIDTH
from capibara.kernels.ops.layers.gated_mlp.rules import sizes
from capibara.kernels.ops.layers.grouped.hopper.forward import banded
from capibara.kernels.pallas.hopper import refuses_chip, swizzled

TILE = 128  # rows and columns of a warpgroup's tile
DEPTH = 64  # of a step: one swizzle atom of 16-bit numbers
PIECE = 64  # a tile leaves through shared memory in pieces of 64 x 64
MANY_ROWS = 4096  # from which on both kernels go before XLA's forms
FETCH_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # a thread; 65,536 a multiprocessor over three warpgroups
THREADS: dict[str, Any] = {"grid_names": ("program",), "num_threads": 3, "thread_name": "warpgroup"}
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)


@dataclasses.dataclass(frozen=True)
class TurnsConfig:
    """The ring's depth, the pieces of a tile that are in shared memory together, and the band that tiles are walked in.

    A band is so many tiles of rows, which share what is read of the other operand.
    """

    stages: int = 4
    slots: int = 2
    band: int = 16

    def __post_init__(self) -> None:
        if not 2 <= self.stages <= 6 or not 2 <= self.slots <= 4 or self.band < 1:
            raise rule_error(
                "stages are 2 to 6, slots 2 to 4, and band is 1 or more", self, "use stages=4, slots=2, band=16"
            )


class Tile(NamedTuple):
    """A tile's place among those of the product, counted in tiles, and the warpgroup that it is of."""

    row: Any
    column: Any
    warpgroup: Any


def pieces() -> list[tuple[int, int]]:
    """Where the pieces of a tile begin."""
    return [(row, column) for row in range(0, TILE, PIECE) for column in range(0, TILE, PIECE)]


def ring(config: TurnsConfig, dtype: Any, *, transpose_b: bool) -> dict[str, Any]:
    """Shared memory and barriers of the operands' ring."""
    b_block = (TILE, DEPTH) if transpose_b else (DEPTH, TILE)
    return {
        "a_smem": plgpu.SMEM((config.stages, TILE, DEPTH), dtype, transforms=swizzled(dtype)),
        "b_smem": plgpu.SMEM((config.stages, *b_block), dtype, transforms=swizzled(dtype)),
        # A stage has a barrier for each warpgroup that may be the one to take it: each then waits for its own alone.
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=2 * config.stages),
        "drained": plgpu.Barrier(num_barriers=config.stages),
    }


def refuses(call: Call) -> str | None:
    """Why neither kernel takes this call, or None."""
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    first = call.args[0]
    assert first is not None
    if np.dtype(first.dtype).name != "bfloat16":
        return f"its activations are good for bfloat16 alone, not {first.dtype}"
    n = sizes(call)
    if 0 in n:
        return "an operand is empty"
    # Mosaic cuts arrays into pieces of 8 rows by one swizzle atom and pads neither; an array of a single piece loses
    # that axis from its TMA descriptor, and what lies past its edge is no longer dropped.
    if n.rows % 8 or n.rows < 16:
        return f"there are {n.rows} rows; it takes a multiple of 8, 16 or more"
    if n.depth % DEPTH or n.depth < 2 * DEPTH:
        return f"products sum over {n.depth} numbers; it takes a multiple of {DEPTH}, {2 * DEPTH} or more"
    if n.columns < 2 * WIDTH:
        return f"there are {n.columns} columns; it takes {2 * WIDTH} or more"
    return None


def walk(
    operands: tuple[Any, Any], lengths: tuple[int, int, int], config: TurnsConfig, smem: dict[str, Any],
    programs: int, begin: Callable[[Tile], None], finish: Callable[[Tile, Any], None], *, transpose_b: bool,
) -> None:  # fmt: skip
    """The whole program: `begin` is called before a tile is multiplied and `finish` with its float32 sums, each by the
    warpgroup whose tile it is. `lengths` are the product's rows, columns and depth."""
    a_hbm, b_hbm = operands
    rows, columns, depth = lengths
    grid_rows, grid_columns = math.ceil(rows / TILE), math.ceil(columns / TILE)
    steps, stages = math.ceil(depth / DEPTH), config.stages
    a_smem, b_smem, filled, drained = smem["a_smem"], smem["b_smem"], smem["filled"], smem["drained"]
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    mine = lax.div(grid_rows * grid_columns - program + (programs - 1), programs)

    def place(number: Any) -> tuple[Any, Any]:
        return banded(number * programs + program, grid_rows, grid_columns, config.band)

    @pl.when(warpgroup == 2)
    def _fetch() -> None:
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

        @pl.loop(0, mine)
        def _tile(number: Any) -> None:
            row, column = place(number)
            whose = lax.rem(number, 2)

            @pl.loop(0, steps)
            def _step(step: Any) -> None:
                slot = lax.rem(number * steps + step, stages)

                @pl.when(number * steps + step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(drained.at[slot])

                here, arrived = pl.ds(step * DEPTH, DEPTH), filled.at[whose * stages + slot]
                across = pl.ds(column * TILE, TILE)
                b_at = (across, here) if transpose_b else (here, across)
                plgpu.copy_gmem_to_smem(a_hbm.at[pl.ds(row * TILE, TILE), here], a_smem.at[slot], arrived)
                plgpu.copy_gmem_to_smem(b_hbm.at[b_at], b_smem.at[slot], arrived)

    @pl.when(warpgroup < 2)
    def _multiply() -> None:
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")

        @pl.loop(0, lax.div(mine - warpgroup + 1, 2))
        def _turn(turn: Any) -> None:
            number = 2 * turn + warpgroup
            tile = Tile(*place(number), warpgroup)
            begin(tile)

            def contract(sums: Any) -> None:
                before = number * steps

                @pl.loop(0, steps)
                def _step(step: Any) -> None:
                    slot = lax.rem(before + step, stages)
                    plgpu.barrier_wait(filled.at[warpgroup * stages + slot])
                    right = b_smem.at[slot]
                    plgpu.wgmma(sums, a_smem.at[slot], right.transpose((1, 0)) if transpose_b else right)
                    # One product stays in flight; the one before it is done with its stage.
                    plgpu.wgmma_wait(1)

                    @pl.when(step > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(drained.at[lax.rem(before + step - 1, stages)])

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(drained.at[lax.rem(before + steps - 1, stages)])
                finish(tile, sums[...])

            pl.run_scoped(contract, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
