"""gated_products for Hopper, in Pallas (Mosaic GPU): the gate's sums and up's meet in registers; see turns.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.activation.tanh_formulas import value
from capibara.kernels.ops.layers.gated_mlp.hopper import turns
from capibara.kernels.ops.layers.gated_mlp.hopper.turns import MANY_ROWS, PIECE, TILE, Tile, TurnsConfig, refuses
from capibara.kernels.ops.layers.gated_mlp.rules import sizes
from capibara.kernels.pallas.hopper import multiprocessors, named, swizzled


def candidates(call: Call) -> Sequence[TurnsConfig]:
    return [TurnsConfig(4, 2, 16), TurnsConfig(5, 2, 16), TurnsConfig(4, 3, 16), TurnsConfig(4, 2, 8)]


def products_hopper(x: jax.Array, pairs: jax.Array, *, config: TurnsConfig, kind: str, keep: bool) -> Any:
    (rows, depth), columns = x.shape, pairs.shape[1]
    programs = multiprocessors(current_target().device_kind)
    out = [out_struct((rows, columns // 2), x.dtype, x)]
    if keep:
        out.append(out_struct((rows, columns), x.dtype, x))
    made = plgpu.kernel(
        named(
            "gated_products", _program, lengths=(rows, columns, depth), config=config, kind=kind, keep=keep,
            programs=programs,
        ),
        out_type=out,
        grid=(programs,),
        compiler_params=turns.COMPILER_PARAMS,
        **turns.THREADS,
    )(x, pairs)  # fmt: skip
    return tuple(made) if keep else made[0]


def _program(
    x_hbm: Any, pairs_hbm: Any, inner_hbm: Any, products_hbm: Any = None, *, lengths: tuple[int, int, int],
    config: TurnsConfig, kind: str, keep: bool, programs: int,
) -> None:  # fmt: skip
    dtype, slots = x_hbm.dtype, config.slots
    staged = plgpu.SMEM((2 * slots, PIECE, PIECE), dtype, transforms=swizzled(dtype))

    def scoped(staged: Any, **smem: Any) -> None:
        def finish(tile: Tile, sums: Any) -> None:
            count = 0
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before, which left long ago

            def leave(piece: Any, target: Any, row: int, column: Any) -> None:
                nonlocal count
                slot = staged.at[tile.warpgroup * slots + count % slots]
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                slot[...] = piece.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, target.at[pl.ds(tile.row * TILE + row, PIECE), pl.ds(column, PIECE)])
                count += 1

            for row in range(0, TILE, PIECE):
                gate, up = (sums[row : row + PIECE, first : first + PIECE] for first in (0, PIECE))
                if keep:
                    leave(gate, products_hbm, row, tile.column * TILE)
                    leave(up, products_hbm, row, tile.column * TILE + PIECE)
                leave(value(kind, gate) * up, inner_hbm, row, tile.column * PIECE)

        turns.walk(
            (x_hbm, pairs_hbm), lengths, config, smem, programs, lambda tile: None, finish, transpose_b=False
        )  # fmt: skip

    allocate: Any = functools.partial(pl.run_scoped, collective_axes="warpgroup")
    allocate(scoped, staged=staged, **turns.ring(config, dtype, transpose_b=False))


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200 that is held up by its power, beside two products of cuBLAS and a pass: 1.02 to 1.08 times as fast at
    4,096 rows and more of five models (0.99 and 1.09 at two that nothing was chosen by), 1.07 to 1.21 where the
    products are not kept. At 2,104 rows of 4096 x 14336 0.94."""
    return ("xla",) if sizes(call).rows >= MANY_ROWS else ()


IMPLEMENTATION = Implementation(
    "hopper",
    products_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=TurnsConfig,
    candidates=candidates,
)
