"""The nearest of narrow codes by the distances themselves, in float32: of eight columns they are less work than a
product of rows that are padded for it, and leave nothing to be told apart.

A program has some rows, of which each thread keeps a few in registers, and a part of the codes, which come by in shared
memory, two tiles of them at a time; every thread meets the same code at the same time. Several programs on a
multiprocessor wait in turns. Where codes are in parts, a reduction takes each row's nearest, of equals the first.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.hopper.common import THREADS, SearchConfig
from capibara.kernels.ops.vq.nearest.reference import enlargement_of, is_finite, largest_number
from capibara.kernels.pallas.hopper import LANE, load, named, store_to_memory

MOST_COLUMNS = 8
TILE = 64  # codes
COLUMNS = 4  # TMA copies multiples of 16 bytes
ROWS_A_THREAD = (4, 2, 1)
PROGRAMS = 4  # on a multiprocessor, which hide each other's waiting
TOGETHER = 4  # codes of a turn of the loop
FAR_AWAY = 1e18  # beside codes of about 1


def direct_config(rows: int, codes: int, multiprocessors: int) -> SearchConfig:
    """As many rows a thread, and as few parts, as leave every multiprocessor several programs."""
    wanted = PROGRAMS * multiprocessors
    for rows_a_thread in ROWS_A_THREAD:
        units = -(-rows // (THREADS * rows_a_thread))
        if units * 2 >= multiprocessors or rows_a_thread == ROWS_A_THREAD[-1]:
            break
    tiles = -(-codes // TILE)
    parts = max(1, min(tiles, -(-wanted // units)))
    return SearchConfig(TILE, 2, parts=-(-tiles // -(-tiles // parts)), direct=rows_a_thread)


def nearest_directly(x: jax.Array, codebook: jax.Array, config: SearchConfig) -> jax.Array:
    """Indices [N] of rows x [N, D]."""
    (rows, width), count = x.shape, codebook.shape[0]
    if width > MOST_COLUMNS:
        raise rule_error(f"direct is for codes of up to {MOST_COLUMNS} columns", width, "use direct=0")
    codes, values = codebook.astype(jnp.float32), x.astype(jnp.float32)
    usable = is_finite(_norms(codes))
    by = enlargement_of(largest_number(codes, usable))
    # By halves no distance overflows; nor does a row that codes were enlarged beside, and that is as far from them all.
    half, most = by / 2, jnp.where(by > 1, FAR_AWAY, jnp.inf)
    # Of what cannot be used all distances are NaN, which are below none.
    length = -(-count // (config.tile * config.parts)) * config.tile
    added, columns = config.parts * length - count, -width % COLUMNS
    codes = jnp.where(usable[:, None], codes * half, jnp.nan)
    codes = jnp.pad(jnp.pad(codes, ((0, 0), (0, columns))), ((0, added), (0, 0)), constant_values=jnp.nan)
    values = jnp.where(is_finite(_norms(values))[:, None], jnp.clip(values * half, -most, most), jnp.nan)
    program_rows = THREADS * config.direct
    values = jnp.pad(values, ((0, -rows % program_rows), (0, columns))).T
    shape = (config.parts, values.shape[1])
    distances, indices = plgpu.kernel(
        named("nearest_code_direct", _program, config=config, length=length),
        out_type=[out_struct(shape, jnp.float32, x), out_struct(shape, jnp.int32, x)],
        grid=(config.parts, shape[1] // program_rows),
        grid_names=("part", "rows"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE),
    )(values, codes)
    if config.parts == 1:
        return indices[0, :rows]
    return _nearest_of_parts(distances[:, :rows], indices[:, :rows])


def _norms(x: jax.Array) -> jax.Array:
    """Squared, a column after another: a sum over an axis would be a launch of its own."""
    return functools.reduce(operator.add, (jnp.square(x[:, column]) for column in range(x.shape[1])))


def _nearest_of_parts(distances: jax.Array, indices: jax.Array) -> jax.Array:
    """Of each row [parts, N]; the first of equals, whose index is the lowest."""

    def nearer(one: Any, other: Any) -> Any:
        (near, first), (far, last) = one, other
        takes = (near < far) | ((near == far) & (first < last))
        return jnp.where(takes, near, far), jnp.where(takes, first, last)

    # A part without a code that can be used has the distance that no code has.
    return lax.reduce((distances, indices), (np.float32(np.inf), np.int32(-1)), nearer, (0,))[1]


def _program(
    x_hbm: Any, codes_hbm: Any, distances_hbm: Any, indices_hbm: Any, *, config: SearchConfig, length: int
) -> None:
    columns, tile, rows = x_hbm.shape[0], config.tile, THREADS * config.direct
    part, at = lax.axis_index("part"), pl.ds(lax.axis_index("rows") * rows, rows)
    layout = plgpu.Layout.WG_STRIDED((rows,), vec_size=config.direct)
    first, tiles = part * length, length // tile

    def full(value: Any, dtype: Any) -> Any:
        return plgpu.layout_cast(jnp.full((rows,), value, dtype), layout)

    def searched(codes_smem: Any, arrived: Any) -> None:
        def fetch(number: Any) -> None:
            slot = lax.rem(number, 2)
            source = codes_hbm.at[pl.ds(first + number * tile, tile)]
            plgpu.copy_gmem_to_smem(source, codes_smem.at[slot], arrived.at[slot])

        fetch(part * 0)
        x = [load(x_hbm.at[column, at], layout) for column in range(columns)]

        def meet(number: Any, best: Any) -> Any:
            slot = lax.rem(number, 2)
            pl.when(number + 1 < tiles)(lambda: fetch(number + 1))
            plgpu.barrier_wait(arrived.at[slot])

            def several(turn: Any, best: Any) -> Any:
                for one in range(TOGETHER):
                    best = nearer(turn * TOGETHER + one, best)
                return best

            def nearer(place: Any, best: Any) -> Any:
                near, found = best
                distance: Any = None
                for column in range(columns):
                    difference = x[column] - codes_smem[slot, place, column]
                    square = difference * difference
                    distance = square if distance is None else distance + square
                # What is chosen first has to be a vector, or the lowering takes its type from the comparison.
                takes = distance < near
                index = first + number * tile + place
                return jnp.where(takes, distance, near), jnp.where(jnp.logical_not(takes), found, index)

            best = lax.fori_loop(0, tile // TOGETHER, several, best)
            plgpu.commit_smem()  # every thread has met these codes: others may land on them
            return best

        best = full(jnp.inf, jnp.float32), full(-1, jnp.int32)
        distances, indices = lax.fori_loop(0, tiles, meet, best)
        store_to_memory(distances_hbm.at[part, at], distances)
        store_to_memory(indices_hbm.at[part, at], indices)

    pl.run_scoped(searched, plgpu.SMEM((2, tile, columns), jnp.float32), plgpu.Barrier(num_barriers=2))
