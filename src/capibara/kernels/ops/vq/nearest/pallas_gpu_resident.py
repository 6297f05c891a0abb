"""The search of the Hopper nearest-code kernel whose rows stay in shared memory while all codes come by.

A persistent grid of three warpgroups a program: one fetches codes by TMA, two take 64 rows each. Rows are read once,
rounded to 16 bits in registers and kept in shared memory; what the rounding took is measured while it happens. Codes
come in blocks of 64 x 64 numbers through a short ring, four blocks side by side to a tile: the rows' part of a step is
loaded once for all four, which is what shared memory has bandwidth for.

Of a row's scores x·c - |c|²/2 the two best of each stream are kept: a stream is every sixteenth code of a span, two
tiles (one, where they are odd). That is three comparisons a score, and the streams need no exchange between threads.
From a span's streams the best few go into the row's list. A third code of a stream may hide behind its two best:
`resolve` looks at the whole stream where both of them may be the nearest.
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
from capibara.kernels.ops.vq.nearest.pallas_gpu_search import (
    COMPUTE_REGISTERS,
    FETCH_REGISTERS,
    LAYOUT,
    LOWEST,
    PROGRAM_ROWS,
    ROW_LAYOUT,
    ROWS,
    SearchConfig,
    across,
    error_bound,
    merged,
)
from capibara.kernels.pallas.hopper import SMEM_BYTES, load, swizzled

BLOCK = 64  # codes and numbers of a block of the ring
BLOCKS = 4  # of a tile, side by side
TILE = BLOCK * BLOCKS
MOST_TILES = 2  # of a span
STREAMS = 16  # of a span
COLUMN_BITS = MOST_TILES * TILE - 1  # of a score, replaced by the code's place in the span
OTHER_BITS = ~COLUMN_BITS
MOST_SLOTS = 12
HELD = 1  # steps whose rows stay in registers, so that the ring is longer
RESERVED = 2048  # bytes of barriers, and a margin


def slots_for(width: int) -> int:
    """The most blocks of the ring that fit beside rows of `width` numbers."""
    left = SMEM_BYTES - RESERVED - PROGRAM_ROWS * (width - HELD * BLOCK) * 2
    return min(max(left, 0) // (BLOCK * BLOCK * 2), MOST_SLOTS)


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

    As `search` returns it, but for the streams, and with no rows beyond x's. The ring has `config.stages` blocks.
    """
    rows, width = x.shape
    (made,) = plgpu.kernel(
        functools.partial(_program, config=config, rows=rows, width=width, count=codes.shape[0], programs=programs),
        out_type=[out_struct((config.kept + 1, rows), jnp.int32, x)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes, half, centre, bounds)
    return made


def _program(
    x_hbm: Any, codes_hbm: Any, half_hbm: Any, centre_hbm: Any, bounds_hbm: Any, out_hbm: Any, *,
    config: SearchConfig, rows: int, width: int, count: int, programs: int,
) -> None:  # fmt: skip
    steps, tiles, slots, span_tiles = width // BLOCK, count // TILE, config.stages, tiles_of_a_span(count)
    turns = steps * tiles * BLOCKS

    def each_row_tile(visit: Any) -> None:
        """Call visit(first row, first row of the next tile, blocks fetched before) for this program's share."""

        @plgpu.nd_loop((math.ceil(rows / PROGRAM_ROWS),), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            # The last starts early: it finds some rows' codes again.
            start, following = (
                jnp.minimum(each * PROGRAM_ROWS, rows - PROGRAM_ROWS) for each in (index, index + programs)
            )
            visit(start, following, loop.local_index * turns)

    @functools.partial(
        pl.run_scoped,
        x_smem=plgpu.SMEM((steps - HELD, 2, ROWS, BLOCK), codes_hbm.dtype, transforms=swizzled(codes_hbm.dtype)),
        codes_smem=plgpu.SMEM((slots, BLOCK, BLOCK), codes_hbm.dtype, transforms=swizzled(codes_hbm.dtype)),
        filled=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        drained=plgpu.Barrier(num_arrivals=2, num_barriers=slots),  # by both computing warpgroups
        collective_axes="warpgroup",
    )
    def _scoped(x_smem: Any, codes_smem: Any, filled: Any, drained: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch(start: Any, following: Any, before: Any) -> None:
                @pl.loop(0, turns)
                def _turn(turn: Any) -> None:
                    @pl.when(turn < steps)
                    def _() -> None:
                        # Rows are next read when these are done; meanwhile they come as far as the second-level cache.
                        at = pl.ds(following, PROGRAM_ROWS), pl.ds(turn * BLOCK, BLOCK)
                        plgpu.async_prefetch(x_hbm.at[at])

                    slot = lax.rem(before + turn, slots)

                    @pl.when(before + turn >= slots)
                    def _() -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    step = lax.div(turn, BLOCKS)
                    code = lax.div(step, steps) * TILE + lax.rem(turn, BLOCKS) * BLOCK
                    at = pl.ds(code, BLOCK), pl.ds(lax.rem(step, steps) * BLOCK, BLOCK)
                    plgpu.copy_gmem_to_smem(codes_hbm.at[at], codes_smem.at[slot], filled.at[slot])

            each_row_tile(fetch)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            rows_of = _Rows(x_hbm, x_smem, centre_hbm, bounds_hbm[0], warpgroup, steps)
            products = _Products(x_smem, codes_smem, filled, drained, warpgroup)

            def compute(first: Any, following: Any, before: Any) -> None:
                start = first + warpgroup * ROWS
                held, (squares, lost) = rows_of.keep(start)

                def one_span(span: Any, best: Any) -> Any:
                    streams = None
                    for part in range(span_tiles):
                        tile = span * span_tiles + part
                        new = products.of_tile(held, before + tile * (steps * BLOCKS), half_hbm, tile, part)
                        streams = new if streams is None else _both(streams, new)
                    return merged(best, _span_best(streams, span * (span_tiles * TILE), config.kept))

                nobody = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.int32), ROW_LAYOUT)
                lowest = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
                best = (lowest,) * config.kept, (nobody,) * config.kept
                best = lax.fori_loop(0, tiles // span_tiles, one_span, best)
                threshold = best[0][0] - 2 * error_bound(squares, lost, best[0][0], bounds_hbm, width, COLUMN_BITS)
                number = nobody
                for value in best[0]:
                    # Not below: what cannot be compared counts too.
                    number = number + jnp.where(value < threshold, 0, 1).astype(jnp.int32)
                for place, vector in enumerate((*best[1], number)):
                    out_hbm[place, pl.ds(start, ROWS)] = vector

            each_row_tile(compute)


class _Rows:
    """A computing warpgroup's rows: from memory to shared memory, rounded on the way."""

    def __init__(self, x_hbm: Any, x_smem: Any, centre_hbm: Any, scale: Any, warpgroup: Any, steps: int) -> None:
        self.x_hbm, self.x_smem, self.centre_hbm, self.scale = x_hbm, x_smem, centre_hbm, scale
        self.warpgroup, self.steps = warpgroup, steps

    def keep(self, start: Any) -> tuple[list[Any], tuple[Any, Any]]:
        """Round the rows from `start` on: (the last steps, the squares of the rows and of what rounding took)."""
        nothing = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), ROW_LAYOUT)

        def fetched(step: Any) -> Any:
            return load(self.x_hbm.at[pl.ds(start, ROWS), pl.ds(step * BLOCK, BLOCK)], LAYOUT, optimized=False)

        def rounded(step: Any, raw: Any, norms: Any) -> Any:
            wide = raw.astype(jnp.float32)
            if self.x_hbm.dtype == self.x_smem.dtype:
                wide = wide * self.scale  # the codes have it twice: for themselves and for the rows
                return raw, (norms[0] + (wide * wide).sum(axis=1), norms[1])
            wide = (wide - across(self.centre_hbm, step * BLOCK, (ROWS, BLOCK))) * self.scale
            narrow = wide.astype(self.x_smem.dtype)
            gone = wide - narrow.astype(jnp.float32)
            return narrow, (norms[0] + (wide * wide).sum(axis=1), norms[1] + (gone * gone).sum(axis=1))

        # Two steps are on the way from memory while one is rounded.
        def step(number: Any, carry: Any) -> Any:
            first, second, norms = carry
            third = fetched(jnp.minimum(number + 2, self.steps - 1))
            self.x_smem[number, self.warpgroup], norms = rounded(number, first, norms)
            return second, third, norms

        carry = fetched(0), fetched(1), (nothing, nothing)
        *coming, norms = lax.fori_loop(0, self.steps - HELD, step, carry)
        held = []
        for number, raw in enumerate(coming[:HELD]):
            narrow, norms = rounded(self.steps - HELD + number, raw, norms)
            held.append(narrow)
        return held, norms


class _Products:
    """A computing warpgroup's side of the ring."""

    def __init__(self, x_smem: Any, codes_smem: Any, filled: Any, drained: Any, warpgroup: Any) -> None:
        self.x_smem, self.codes_smem, self.filled, self.drained = x_smem, codes_smem, filled, drained
        self.warpgroup = warpgroup
        self.steps, self.slots = x_smem.shape[0], codes_smem.shape[0]

    def of_tile(self, held: list[Any], before: Any, half_hbm: Any, tile: Any, part: int) -> tuple[Any, Any]:
        """The streams of a tile, the `part`-th of its span, whose first block is the `before`-th of the ring."""

        def products(*accumulators: Any) -> tuple[Any, ...]:
            def rows_of(step: Any) -> Any:
                return load(self.x_smem.at[step, self.warpgroup], LAYOUT)

            def multiply(step: Any, rows: Any, following: Any) -> Any:
                made = None
                for block in range(BLOCKS):
                    turn = before + step * BLOCKS + block
                    slot = lax.rem(turn, self.slots)
                    plgpu.barrier_wait(self.filled.at[slot])
                    plgpu.wgmma(accumulators[block], rows, plgpu.transpose_ref(self.codes_smem.at[slot], (1, 0)))
                    if block == 0 and following is not None:
                        made = following()
                    # All but the newest product are done, so the slot before this one is free.
                    plgpu.wgmma_wait(1)
                    if block:
                        plgpu.barrier_arrive(self.drained.at[lax.rem(turn - 1, self.slots)])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.drained.at[slot])
                return made

            def one(step: Any, rows: Any) -> Any:
                return multiply(step, rows, lambda: rows_of(jnp.minimum(step + 1, self.steps - 1)))

            lax.fori_loop(0, self.steps, one, rows_of(0))
            for number, rows in enumerate(held):
                multiply(self.steps + number, rows, None)
            return tuple(accumulator[...] for accumulator in accumulators)

        blocks = pl.run_scoped(
            products, *(plgpu.WGMMAAccumulatorRef((ROWS, BLOCK), jnp.float32) for _ in range(BLOCKS))
        )
        return _tile_streams(blocks, half_hbm, tile, part)


def _tile_streams(blocks: Any, half_hbm: Any, tile: Any, part: int) -> tuple[Any, Any]:
    """The two best scores of each stream [64, STREAMS] of a tile; their low bits say which code of the span it is."""
    best = second = None
    for block, products in enumerate(blocks):
        scores = products - across(half_hbm, tile * TILE + block * BLOCK, (ROWS, BLOCK))
        bits = lax.bitcast_convert_type(scores, jnp.int32) & OTHER_BITS
        for start in range(0, BLOCK, STREAMS):
            place = part * TILE + block * BLOCK + start
            key = lax.bitcast_convert_type(bits[:, start : start + STREAMS] | place, jnp.float32)
            if best is None:
                best = key
            elif second is None:
                best, second = jnp.maximum(best, key), jnp.minimum(best, key)
            else:
                best, second = jnp.maximum(best, key), jnp.maximum(second, jnp.minimum(best, key))
    stream = plgpu.broadcasted_iota(jnp.int32, (ROWS, STREAMS), 1, layout=LAYOUT)

    def named(keys: Any) -> Any:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(keys, jnp.int32) | stream, jnp.float32)

    return named(best), named(second)


def _both(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """The two best of each stream of both tiles."""
    best, least = jnp.maximum(one[0], other[0]), jnp.minimum(one[0], other[0])
    return best, jnp.maximum(least, jnp.maximum(one[1], other[1]))


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
            taken = best == lax.broadcast_in_dim(highest, (ROWS, STREAMS), (0,))
            best, second = jnp.where(taken, second, best), jnp.where(taken, LOWEST, second)
    return values, indices
