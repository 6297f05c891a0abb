"""gated_products' gradient for Hopper, in Pallas (Mosaic GPU): what comes back through `down` is never written.

A tile's own part of the products is on its way while the other warpgroup multiplies; both gradients leave from where it
came to. See turns.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.activation.tanh_formulas import value_and_slope
from capibara.kernels.ops.layers.gated_mlp.hopper import turns
from capibara.kernels.ops.layers.gated_mlp.hopper.turns import (
    MANY_ROWS,
    PIECE,
    TILE,
    Tile,
    TurnsConfig,
    pieces,
    refuses,
)
from capibara.kernels.ops.layers.gated_mlp.rules import sizes
from capibara.kernels.pallas.hopper import multiprocessors, named, swizzled


def candidates(call: Call) -> Sequence[TurnsConfig]:
    return [TurnsConfig(4, 3, 8), TurnsConfig(4, 2, 8), TurnsConfig(4, 3, 16), TurnsConfig(3, 3, 8)]


def products_grad_hopper(
    d_out: jax.Array, down: jax.Array, products: jax.Array, *, config: TurnsConfig, kind: str
) -> jax.Array:
    (rows, depth), columns = d_out.shape, down.shape[0]
    programs = multiprocessors(current_target().device_kind)
    (made,) = plgpu.kernel(
        named("gated_products_grad", _program, lengths=(rows, columns, depth), config=config, kind=kind,
              programs=programs),
        out_type=[out_struct(products.shape, products.dtype, products)],
        grid=(programs,),
        compiler_params=turns.COMPILER_PARAMS,
        **turns.THREADS,
    )(d_out, down, products)  # fmt: skip
    return made


def _program(
    d_out_hbm: Any, down_hbm: Any, products_hbm: Any, made_hbm: Any, *, lengths: tuple[int, int, int],
    config: TurnsConfig, kind: str, programs: int,
) -> None:  # fmt: skip
    dtype, slots = d_out_hbm.dtype, config.slots
    of_tile = pieces()

    def scoped(staged: Any, arrived: Any, **smem: Any) -> None:
        def slot_of(tile: Tile, number: int) -> Any:
            return tile.warpgroup * slots + number % slots

        def where(tile: Tile, number: int) -> Any:
            """A piece's pairs: as many columns of the gate as it has, and as many of up."""
            row, column = of_tile[number]
            return pl.ds(tile.row * TILE + row, PIECE), pl.ds(2 * (tile.column * TILE + column), 2 * PIECE)

        def fetch(tile: Tile, number: int) -> None:
            slot = slot_of(tile, number)
            plgpu.copy_gmem_to_smem(products_hbm.at[where(tile, number)], staged.at[slot], arrived.at[slot])

        def begin(tile: Tile) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for number in range(slots):
                fetch(tile, number)

        def finish(tile: Tile, sums: Any) -> None:
            for number, (row, column) in enumerate(of_tile):
                slot = slot_of(tile, number)
                plgpu.barrier_wait(arrived.at[slot])
                flow, pair = sums[row : row + PIECE, column : column + PIECE], staged.at[slot]
                gate, up = (pair[:, first : first + PIECE].astype(jnp.float32) for first in (0, PIECE))
                result, slope = value_and_slope(kind, gate)
                pair[:, PIECE:] = (flow * result).astype(dtype)
                pair[:, :PIECE] = (flow * up if slope is None else flow * up * slope).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(pair, made_hbm.at[where(tile, number)])
                if number and number - 1 + slots < len(of_tile):
                    # The piece before this one has left by now: another comes to its place.
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    fetch(tile, number - 1 + slots)

        turns.walk((d_out_hbm, down_hbm), lengths, config, smem, programs, begin, finish, transpose_b=True)

    allocate: Any = functools.partial(pl.run_scoped, collective_axes="warpgroup")
    allocate(
        scoped,
        staged=plgpu.SMEM((2 * slots, PIECE, 2 * PIECE), dtype, transforms=swizzled(dtype)),
        arrived=plgpu.Barrier(num_barriers=2 * slots),
        **turns.ring(config, dtype, transpose_b=True),
    )


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200 that is held up by its power, beside a product of cuBLAS and a pass: 1.00 to 1.11 times as fast at
    4,096 rows and more of five models (1.16 and 0.99 at two that nothing was chosen by); 0.92 and 0.89 at 2,048 and
    2,104."""
    return ("xla",) if sizes(call).rows >= MANY_ROWS else ()


IMPLEMENTATION = Implementation(
    "hopper",
    products_grad_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=TurnsConfig,
    candidates=candidates,
)
