"""The few best codes of every row in every part of the codes, for rows too few to keep all multiprocessors busy.

A program has 64 rows and a part of the codes, some tiles of 128. It is one warpgroup, which rounds its rows to 16 bits
into shared memory, where they stay, and then a tile of codes after another. Codes are rounded again by each program
that meets them, which is less, where those are few, than a kernel before this one and what waits for it: a call of a
few hundred rows is mostly its launches. Several programs on a multiprocessor wait for memory in turns.

All programs move and scale by the same codes, so that scores of different parts can be compared.
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
    LAYOUT,
    LOWEST,
    PartLists,
    SearchConfig,
    across,
    error_bound,
    merged,
    narrow_type,
    row_full,
    row_numbers,
    safe_sqrt,
    tile_best,
)
from capibara.kernels.ops.vq.nearest.hopper.prepare import norms_of, rounded_codes, sampled
from capibara.kernels.pallas.hopper import LANE, load, named, swizzled

TILE = 128
MOST_AHEAD = 2  # steps of a tile that are on the way from memory together: 128 registers of a thread


def parts_scratch(width: int, x_dtype: Any) -> dict[str, Any]:
    """A program's shared memory: its rows and some steps of a tile of codes, rounded; the centre; half norms."""
    steps, dtype = width // BLOCK_K, narrow_type(x_dtype)
    ahead = math.gcd(steps, MOST_AHEAD)
    return {
        "x_smem": plgpu.SMEM((steps, BLOCK_M, BLOCK_K), dtype, transforms=swizzled(dtype)),
        "codes_smem": plgpu.SMEM((ahead, TILE, BLOCK_K), dtype, transforms=swizzled(dtype)),
        "centre_smem": plgpu.SMEM((width,), jnp.float32),
        "half_smem": plgpu.SMEM((TILE,), jnp.float32),
    }


def search_parts(x: jax.Array, codebook: jax.Array, config: SearchConfig) -> jax.Array:
    """The rows' `PartLists`, of 64 rows or more and TILE codes or more; a part is whole tiles of them."""
    rows = x.shape[0]
    (lists,) = plgpu.kernel(
        named("nearest_code_search", _program, config=config),
        out_type=[out_struct((rows, PartLists(config.parts, config.kept).words), jnp.int32, x)],
        grid=(config.parts, math.ceil(rows / BLOCK_M)),
        grid_names=("part", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
    )(x, codebook)
    return lists


def tiles_of_a_part(codes: int, tile: int, parts: int) -> int:
    return -(-codes // (tile * parts))


def _program(x_hbm: Any, codes_hbm: Any, lists_hbm: Any, *, config: SearchConfig) -> None:
    (rows, width), codes = x_hbm.shape, codes_hbm.shape[0]
    k_steps, kept = width // BLOCK_K, config.kept
    tiles = tiles_of_a_part(codes, TILE, config.parts)
    exact = x_hbm.dtype != jnp.float32
    part = lax.axis_index("part")
    # The last tile starts early: it searches for some rows' codes again.
    start = jnp.minimum(lax.axis_index("rows") * BLOCK_M, rows - BLOCK_M)

    allocate: Any = functools.partial(pl.run_scoped, **parts_scratch(width, x_hbm.dtype))

    @allocate
    def _scoped(x_smem: Any, codes_smem: Any, centre_smem: Any, half_smem: Any) -> None:
        ahead = codes_smem.shape[0]
        centre, scale = sampled(codes_hbm, codes, exact)
        centre_smem[...] = centre
        plgpu.commit_smem()

        def k_slice(step: Any) -> Any:
            return pl.ds(step * BLOCK_K, BLOCK_K)

        def keep_rows(turn: Any, norms: Any) -> Any:
            steps = [turn * ahead + number for number in range(ahead)]
            coming = [load(x_hbm.at[pl.ds(start, BLOCK_M), k_slice(step)], LAYOUT, optimized=False) for step in steps]
            for step, raw in zip(steps, coming, strict=True):
                squares, lost = norms
                wide = raw.astype(jnp.float32)
                if exact:
                    wide, narrow = wide * scale, raw  # the codes have it twice: for themselves and for the rows
                else:
                    wide = (wide - across(centre_smem, step * BLOCK_K, (BLOCK_M, BLOCK_K))) * scale
                    narrow = wide.astype(x_smem.dtype)
                    error = wide - narrow.astype(jnp.float32)
                    lost = lost + (error * error).sum(axis=1)
                x_smem[step] = narrow
                norms = squares + (wide * wide).sum(axis=1), lost
            return norms

        zeros, no_code = row_full(0, jnp.float32), row_full(0, jnp.int32)
        squares, lost = lax.fori_loop(0, k_steps // ahead, keep_rows, (zeros, zeros))
        code_zeros = row_full(0, jnp.float32, TILE)

        def contract(first: Any) -> Any:
            """(products of the rows and the codes from `first` on, and three squares of these: see `rounded_codes`)."""

            def products(acc: Any) -> Any:
                def round_multiply(turn: Any, carry: Any) -> Any:
                    steps = [turn * ahead + number for number in range(ahead)]
                    codes = [codes_hbm.at[pl.ds(first, TILE), k_slice(step)] for step in steps]
                    coming = [load(each, LAYOUT, optimized=False) for each in codes]
                    plgpu.wgmma_wait(0)  # those before have been multiplied
                    for number, raw in enumerate(coming):
                        codes_smem[number], carry = rounded_codes(
                            raw.astype(jnp.float32), carry, centre_smem, steps[number] * BLOCK_K, scale,
                            codes_smem.dtype, exact,
                        )  # fmt: skip
                    plgpu.commit_smem()
                    for number, step in enumerate(steps):
                        plgpu.wgmma(acc, x_smem.at[step], codes_smem.at[number].transpose((1, 0)))
                    return carry

                carry = lax.fori_loop(0, k_steps // ahead, round_multiply, (code_zeros,) * 3)
                plgpu.wgmma_wait(0)
                return acc[...], *carry

            return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((BLOCK_M, TILE), jnp.float32))

        def tile_step(tile: Any, carry: Any) -> Any:
            best, largest = carry
            # The last tile starts early, and what it shares with the one before it is not looked at again. Past the
            # last there are none.
            intended = (part * tiles + tile) * TILE
            first = jnp.minimum(intended, codes - TILE)
            scores, *code_squares = contract(first)
            half_smem[...], *usable_squares = norms_of(code_squares, row_numbers(TILE) + first >= intended)
            plgpu.commit_smem()
            largest = tuple(map(jnp.maximum, largest, usable_squares))
            values, columns = tile_best(scores, half_smem, 0, config)
            return merged(best, (values, [column + first for column in columns])), largest

        best = (row_full(LOWEST, jnp.float32),) * kept, (no_code,) * kept
        best, largest = lax.fori_loop(0, tiles, tile_step, (best, (code_zeros, code_zeros)))
        bounds = scale, *(safe_sqrt(jnp.max(each)) for each in largest)
        error = error_bound(squares, lost, best[0][0], bounds, width, COLUMN_BITS)
        PartLists(config.parts, kept).write(lists_hbm, start, part, best, error, no_code)
