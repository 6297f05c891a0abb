"""The few best codes of every row by 16-bit products, where rows stay in shared memory while all codes come by.

A persistent grid of three warpgroups a program: one fetches codes by TMA, two take 64 rows each. Rows are read once,
rounded to 16 bits in registers and kept in shared memory; what the rounding took is measured while it happens. Codes
come in blocks of 64 x 64 numbers through a short ring, four blocks side by side to a tile: the rows' part of a step is
loaded once for all four, which is what shared memory has bandwidth for.

Of a row's scores x·c - |c|²/2 the two best of each stream are kept: a stream is every sixteenth code of a span, two
tiles (one, where they are odd). That is three comparisons a score, and the streams need no exchange between threads.
From a span's streams the best few go into the row's list. A third code of a stream may hide behind its two best:
`resolve` looks at the whole stream where both of them may be the nearest.

Where rows are too few for all programs, the codes are divided in parts, and what a program takes at a time is a tile of
rows and a part. `resolve_parts` reads the lists of all parts of a row.
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
    COMPUTE_REGISTERS,
    FETCH_REGISTERS,
    LAYOUT,
    LOWEST,
    PROGRAM_M,
    PartLists,
    SearchConfig,
    across,
    count_close,
    error_bound,
    fits,
    merged,
    row_full,
)
from capibara.kernels.pallas.hopper import LANE, load, named, swizzled

BLOCK_N = 64  # codes of a block of the ring
BLOCKS = 4  # of a tile, side by side
TILE = BLOCK_N * BLOCKS
MOST_TILES = 2  # of a span
STREAMS = 16  # of a span
COLUMN_BITS = MOST_TILES * TILE - 1  # of a score, replaced by the code's place in the span
OTHER_BITS = ~COLUMN_BITS
MOST_STAGES = 12
IN_REGISTERS = 1  # steps whose rows stay in registers, so that the ring is longer


def resident_scratch(width: int, stages: int, dtype: Any) -> dict[str, Any]:
    """A program's shared memory: its rows, rounded, and the ring of codes; both of 16 bits."""
    k_steps = width // BLOCK_K - IN_REGISTERS
    return {
        "x_smem": plgpu.SMEM((k_steps, 2, BLOCK_M, BLOCK_K), dtype, transforms=swizzled(dtype)),
        "codes_smem": plgpu.SMEM((stages, BLOCK_N, BLOCK_K), dtype, transforms=swizzled(dtype)),
        "filled": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both computing warpgroups
    }


def stages_for(width: int) -> int:
    """The longest ring that fits beside rows of `width` numbers; 0 where none does."""
    stages = range(MOST_STAGES, 0, -1)
    return next((n for n in stages if fits(resident_scratch(width, n, jnp.dtype(jnp.float16)))), 0)


def tiles_of_a_span(codes: int) -> int:
    """Of so many codes, up to a whole number of tiles."""
    return MOST_TILES - -(-codes // TILE) % MOST_TILES


def stream_of(index: Any, codes: int) -> tuple[Any, int, int]:
    """(the first code of the stream that a code is in, how far apart they are, how many)."""
    span = tiles_of_a_span(codes) * TILE
    return lax.div(index, span) * span + lax.rem(index, STREAMS), STREAMS, span // STREAMS


def search_resident(
    x: jax.Array, codes: jax.Array, half: jax.Array, centre: jax.Array, bounds: jax.Array, config: SearchConfig,
    programs: int,
) -> jax.Array:  # fmt: skip
    """[kept + 1, rows] int32: the best codes of every row, and how many may be the nearest.

    As `search` returns it, but for the streams, and with no rows beyond x's. The ring has `config.stages` blocks. With
    `config.parts` it is their `PartLists`, and the codes are as many whole tiles for each.
    """
    shape = config.kept + 1, x.shape[0]
    if config.parts > 1:
        shape = x.shape[0], PartLists(config.parts, config.kept).words
    (lists,) = plgpu.kernel(
        named("nearest_code_search", _program, config=config, programs=programs),
        out_type=[out_struct(shape, jnp.int32, x)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
    )(x, codes, half, centre, bounds)
    return lists


def _program(
    x_hbm: Any, codes_hbm: Any, half_hbm: Any, centre_hbm: Any, bounds_hbm: Any, lists_hbm: Any, *,
    config: SearchConfig, programs: int,
) -> None:  # fmt: skip
    parts = config.parts
    (rows, width), codes = x_hbm.shape, codes_hbm.shape[0] // parts
    stages, kept, span_tiles = config.stages, config.kept, tiles_of_a_span(codes)
    k_steps, tiles = width // BLOCK_K, codes // TILE
    smem_steps = k_steps - IN_REGISTERS
    turns = k_steps * tiles * BLOCKS

    def each_row_tile(visit: Any) -> None:
        """Call visit(first row, that of the next turn, blocks fetched before, part) for this program's share."""

        @plgpu.nd_loop((math.ceil(rows / PROGRAM_M) * parts,), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            part: Any = 0
            row_tiles = [index, index + programs]
            if parts > 1:
                row_tiles, part = [lax.div(each, parts) for each in row_tiles], lax.rem(index, parts)
            # The last starts early: it searches for some rows' codes again.
            start, following = (jnp.minimum(each * PROGRAM_M, rows - PROGRAM_M) for each in row_tiles)
            visit(start, following, loop.local_index * turns, part)

    allocate: Any = functools.partial(
        pl.run_scoped, **resident_scratch(width, stages, codes_hbm.dtype), collective_axes="warpgroup"
    )

    @allocate
    def _scoped(x_smem: Any, codes_smem: Any, filled: Any, drained: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch(start: Any, following: Any, before: Any, part: Any) -> None:
                @pl.loop(0, turns)
                def _turn(turn: Any) -> None:
                    @pl.when(turn < k_steps)
                    def _() -> None:
                        # Rows are next read when these are done; meanwhile they come as far as the second-level cache.
                        plgpu.async_prefetch(x_hbm.at[pl.ds(following, PROGRAM_M), pl.ds(turn * BLOCK_K, BLOCK_K)])

                    slot = lax.rem(before + turn, stages)

                    @pl.when(before + turn >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    step = lax.div(turn, BLOCKS)
                    first = lax.div(step, k_steps) * TILE + lax.rem(turn, BLOCKS) * BLOCK_N
                    n = pl.ds(first + part * codes if parts > 1 else first, BLOCK_N)
                    k = pl.ds(lax.rem(step, k_steps) * BLOCK_K, BLOCK_K)
                    plgpu.copy_gmem_to_smem(codes_hbm.at[n, k], codes_smem.at[slot], filled.at[slot])

            each_row_tile(fetch)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            scale = bounds_hbm[0]

            def keep_rows(start: Any) -> tuple[list[Any], tuple[Any, Any]]:
                """Round the rows from `start` on into shared memory.

                Returns the last steps, which stay in registers, and the squares of the rows and of what rounding took.
                """
                zeros = row_full(0, jnp.float32)

                def fetched(step: Any) -> Any:
                    part = pl.ds(start, BLOCK_M), pl.ds(step * BLOCK_K, BLOCK_K)
                    return load(x_hbm.at[part], LAYOUT, optimized=False)

                def rounded(step: Any, raw: Any, norms: Any) -> Any:
                    wide = raw.astype(jnp.float32)
                    if x_hbm.dtype == x_smem.dtype:
                        wide = wide * scale  # the codes have it twice: for themselves and for the rows
                        return raw, (norms[0] + (wide * wide).sum(axis=1), norms[1])
                    wide = (wide - across(centre_hbm, step * BLOCK_K, (BLOCK_M, BLOCK_K))) * scale
                    narrow = wide.astype(x_smem.dtype)
                    lost = wide - narrow.astype(jnp.float32)
                    return narrow, (norms[0] + (wide * wide).sum(axis=1), norms[1] + (lost * lost).sum(axis=1))

                # Two steps are on the way from memory while one is rounded.
                def k_step(step: Any, carry: Any) -> Any:
                    first, second, norms = carry
                    third = fetched(jnp.minimum(step + 2, k_steps - 1))
                    x_smem[step, warpgroup], norms = rounded(step, first, norms)
                    return second, third, norms

                carry = fetched(0), fetched(1), (zeros, zeros)
                *coming, norms = lax.fori_loop(0, smem_steps, k_step, carry)
                last_rows = []
                for number, raw in enumerate(coming[:IN_REGISTERS]):
                    narrow, norms = rounded(smem_steps + number, raw, norms)
                    last_rows.append(narrow)
                return last_rows, norms

            def contract(last_rows: list[Any], before: Any) -> Any:
                """The products of this warpgroup's rows and a tile of codes, whose first block is the `before`-th."""

                def products(*accs: Any) -> tuple[Any, ...]:
                    def rows_of(step: Any) -> Any:
                        return load(x_smem.at[step, warpgroup], LAYOUT)

                    def multiply(step: Any, rows: Any, load_next: Any) -> Any:
                        next_rows = None
                        for block, acc in enumerate(accs):
                            turn = before + step * BLOCKS + block
                            slot = lax.rem(turn, stages)
                            plgpu.barrier_wait(filled.at[slot])
                            plgpu.wgmma(acc, rows, codes_smem.at[slot].transpose((1, 0)))
                            if block == 0 and load_next is not None:
                                next_rows = load_next()
                            # All but the newest product are done, so the slot before this one is free.
                            plgpu.wgmma_wait(1)
                            if block:
                                plgpu.barrier_arrive(drained.at[lax.rem(turn - 1, stages)])
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(drained.at[slot])
                        return next_rows

                    def k_step(step: Any, rows: Any) -> Any:
                        return multiply(step, rows, lambda: rows_of(jnp.minimum(step + 1, smem_steps - 1)))

                    lax.fori_loop(0, smem_steps, k_step, rows_of(0))
                    for number, rows in enumerate(last_rows):
                        multiply(smem_steps + number, rows, None)
                    return tuple(acc[...] for acc in accs)

                accs = (plgpu.WGMMAAccumulatorRef((BLOCK_M, BLOCK_N), jnp.float32) for _ in range(BLOCKS))
                return pl.run_scoped(products, *accs)

            def compute(first: Any, following: Any, before: Any, part: Any) -> None:
                start = first + warpgroup * BLOCK_M
                last_rows, (squares, lost) = keep_rows(start)

                def within(number: Any, of_a_part: int) -> Any:
                    """The tile or span of all codes that is so far into the part."""
                    return number + part * of_a_part if parts > 1 else number

                nothing = _no_streams()

                def span_step(span: Any, best: Any) -> Any:
                    # One program for both tiles of a span; nothing of one is made beside the other anyway.
                    def tile_step(number: Any, streams: Any) -> Any:
                        tile = span * span_tiles + number
                        blocks = contract(last_rows, before + tile * (k_steps * BLOCKS))
                        return _both(streams, _tile_streams(blocks, half_hbm, within(tile, tiles), number))

                    streams = lax.fori_loop(0, span_tiles, tile_step, (nothing, nothing))
                    first_code = within(span, tiles // span_tiles) * (span_tiles * TILE)
                    return merged(best, _span_best(streams, first_code, kept))

                no_code = row_full(0, jnp.int32)
                best = (row_full(LOWEST, jnp.float32),) * kept, (no_code,) * kept
                values, indices = lax.fori_loop(0, tiles // span_tiles, span_step, best)
                error = error_bound(squares, lost, values[0], bounds_hbm, width, COLUMN_BITS)
                if parts > 1:
                    PartLists(parts, kept).write(lists_hbm, start, part, (values, indices), error, no_code)
                    return
                threshold = values[0] - 2 * error
                count = count_close(values, threshold, no_code)
                for place, entries in enumerate((*indices, count)):
                    lists_hbm[place, pl.ds(start, BLOCK_M)] = entries

            each_row_tile(compute)


def _no_streams() -> Any:
    return plgpu.layout_cast(jnp.full((BLOCK_M, STREAMS), -np.inf, jnp.float32), LAYOUT)


def _tile_streams(blocks: Any, half_hbm: Any, tile: Any, part: Any) -> tuple[Any, Any]:
    """The two best scores of each stream [64, STREAMS] of a tile, the `part`-th of its span.

    Their low bits say which code of the span it is.
    """
    best = second = None
    for block, products in enumerate(blocks):
        scores = products - across(half_hbm, tile * TILE + block * BLOCK_N, (BLOCK_M, BLOCK_N))
        bits = lax.bitcast_convert_type(scores, jnp.int32) & OTHER_BITS
        for start in range(0, BLOCK_N, STREAMS):
            place = part * TILE + block * BLOCK_N + start
            key = lax.bitcast_convert_type(bits[:, start : start + STREAMS] | place, jnp.float32)
            if best is None:
                best = key
            elif second is None:
                best, second = jnp.maximum(best, key), jnp.minimum(best, key)
            else:
                best, second = jnp.maximum(best, key), jnp.maximum(second, jnp.minimum(best, key))
    stream = plgpu.broadcasted_iota(jnp.int32, (BLOCK_M, STREAMS), 1, layout=LAYOUT)

    def with_stream(keys: Any) -> Any:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(keys, jnp.int32) | stream, jnp.float32)

    return with_stream(best), with_stream(second)


def _both(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """The two best of each stream of both tiles."""
    best, least = jnp.maximum(left[0], right[0]), jnp.minimum(left[0], right[0])
    return best, jnp.maximum(least, jnp.maximum(left[1], right[1]))


def _span_best(streams: Any, first: Any, kept: int) -> tuple[list[Any], list[Any]]:
    """The best `kept` scores of a span and their indices, by row, the best first."""
    best, second = streams
    values, indices = [], []
    for turn in range(kept):
        highest = best.max(axis=1)
        values.append(highest)
        place = lax.bitcast_convert_type(highest, jnp.int32) & COLUMN_BITS
        indices.append(place + first)
        if turn + 1 < kept:
            taken = best == lax.broadcast_in_dim(highest, (BLOCK_M, STREAMS), (0,))
            best, second = jnp.where(taken, second, best), jnp.where(taken, LOWEST, second)
    return values, indices
