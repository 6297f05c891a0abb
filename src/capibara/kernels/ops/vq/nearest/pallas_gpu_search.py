"""The search of the Hopper nearest-code kernel: the few best codes of every row by 16-bit products.

A persistent grid of three warpgroups a program: one fetches by TMA, two take 64 rows each. A program's rows meet all
codes, tile by tile; x is read as it lies and rounded to 16 bits in registers, so that no copy of it is ever stored.
For every row the best few scores x·c - |c|²/2 and their indices stay in registers. What the rounding took from the
row is measured while it happens: together with the codes' own it bounds the error of every score, and so tells which
codes could be the nearest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.pallas_gpu_lists import packed, words_of
from capibara.kernels.pallas.hopper import SMEM_BYTES, load, swizzled

LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT, COLUMN_LAYOUT = LAYOUT.reduce(1), LAYOUT.reduce(0)
FETCH_REGISTERS, COMPUTE_REGISTERS = 40, 232
ROWS = 64  # of a warpgroup
PROGRAM_ROWS = 2 * ROWS
DEPTH = 64  # of the contraction a step
PIECE = 64  # columns of a tile that are looked at together
LOWEST = -1e30  # a score that no code has
COLUMN_BITS = 0xFF  # of a score, replaced by the column: a tile has 256 at most
OTHER_BITS = ~COLUMN_BITS
TINY = 1e-35


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Codes of a tile, stages of the ring, how many codes are kept for every row; and what stays in SMEM.

    With `resident` and a tile of 256 it is the rows, and a stage is a block of 64 x 64 numbers of the codes, see
    `pallas_gpu_resident`; with a tile of 64 it is the codes, all of them, see `pallas_gpu_few`. Else nothing stays.
    """

    tile: int
    stages: int
    kept: int = 4
    resident: bool = False

    def __post_init__(self) -> None:
        if self.tile not in (64, 128, 192, 256):
            raise rule_error("tile is 64, 128, 192 or 256", self.tile, "use 256")
        if self.stages < 2:
            raise rule_error("stages is 2 or more", self.stages, "use 3")
        if not 2 <= self.kept <= 8:
            raise rule_error("kept is from 2 to 8", self.kept, "use 4")
        if self.resident and self.tile not in (64, 256):
            raise rule_error("tile is 64 where codes stay in shared memory, 256 where rows do", self.tile, "use 256")

    def smem_bytes(self, x_bytes: int) -> int:
        return self.stages * DEPTH * (PROGRAM_ROWS * x_bytes + self.tile * 2) + 2 * 4 * ROWS * (self.kept + 1) + 2048

    def fits(self, x_bytes: int) -> bool:
        return self.smem_bytes(x_bytes) <= SMEM_BYTES


def search(
    x: jax.Array, codes: jax.Array, half: jax.Array, centre: jax.Array, bounds: jax.Array, config: SearchConfig,
    programs: int,
) -> jax.Array:  # fmt: skip
    """[words, rows up to a multiple of 128] int32: the lists of `pallas_gpu_lists`, the best codes of every row.

    Codes, half norms, centre and bounds are as `prepare` makes them, K a multiple of the tile. A count of `kept` says
    that there may be more.
    """
    rows, width = x.shape
    padded = math.ceil(rows / PROGRAM_ROWS) * PROGRAM_ROWS
    made = plgpu.kernel(
        functools.partial(_program, config=config, rows=rows, width=width, count=codes.shape[0]),
        out_type=[out_struct((words_of(config.kept, codes.shape[0]), padded), jnp.int32, x)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, codes, half, centre, bounds)
    return made[0]


def _program(
    x_hbm: Any, codes_hbm: Any, half_hbm: Any, centre_hbm: Any, bounds_hbm: Any, out_hbm: Any, *,
    config: SearchConfig, rows: int, width: int, count: int,
) -> None:  # fmt: skip
    stages, kept = config.stages, config.kept
    steps, tiles = math.ceil(width / DEPTH), count // config.tile
    row_tiles = math.ceil(rows / PROGRAM_ROWS)

    def each_row_tile(visit: Any) -> None:
        """Call visit(row tile, steps done before) for this program's share."""

        @plgpu.nd_loop((row_tiles,), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            visit(index, loop.local_index * (steps * tiles))

    @functools.partial(
        pl.run_scoped,
        x_smem=plgpu.SMEM((stages, 2, ROWS, DEPTH), x_hbm.dtype, transforms=swizzled(x_hbm.dtype)),
        codes_smem=plgpu.SMEM((stages, config.tile, DEPTH), codes_hbm.dtype, transforms=swizzled(codes_hbm.dtype)),
        found_smem=plgpu.SMEM((2, words_of(kept, count), ROWS), jnp.int32),
        filled=plgpu.Barrier(num_arrivals=3, num_barriers=stages),  # both halves of the rows, and the codes
        drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both computing warpgroups
        collective_axes="warpgroup",
    )
    def _scoped(x_smem: Any, codes_smem: Any, found_smem: Any, filled: Any, drained: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch(row_tile: Any, before: Any) -> None:
                @pl.loop(0, steps * tiles)
                def _step(turn: Any) -> None:
                    slot = lax.rem(before + turn, stages)

                    @pl.when(before + turn >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    depth = pl.ds(lax.rem(turn, steps) * DEPTH, DEPTH)
                    for part in range(2):
                        at = pl.ds(row_tile * PROGRAM_ROWS + part * ROWS, ROWS)
                        plgpu.copy_gmem_to_smem(x_hbm.at[at, depth], x_smem.at[slot, part], filled.at[slot])
                    at = pl.ds(lax.div(turn, steps) * config.tile, config.tile)
                    plgpu.copy_gmem_to_smem(codes_hbm.at[at, depth], codes_smem.at[slot], filled.at[slot])

            each_row_tile(fetch)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            ring = _Ring(x_smem, codes_smem, centre_hbm, filled, drained, warpgroup, steps)
            scale = bounds_hbm[0]

            def compute(row_tile: Any, before: Any) -> None:
                nothing = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), ROW_LAYOUT)
                lowest = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_LAYOUT)
                nobody = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.int32), ROW_LAYOUT)
                best = (lowest,) * kept, (nobody,) * kept

                scores, squares, lost = ring.contract(before, scale, (nothing, nothing))
                best = merged(best, tile_best(scores, half_hbm, lax.rem(before, 1), config))

                def tile_step(tile: Any, best: Any) -> Any:
                    scores, *_ = ring.contract(before + tile * steps, scale, None)
                    return merged(best, tile_best(scores, half_hbm, tile, config))

                if tiles > 1:
                    best = lax.fori_loop(1, tiles, tile_step, best)
                error = error_bound(squares, lost, best[0][0], bounds_hbm, width, COLUMN_BITS)
                threshold = best[0][0] - 2 * error
                number = nobody
                for value in best[0]:
                    # Not below: what cannot be compared counts too.
                    number = number + jnp.where(value < threshold, 0, 1).astype(jnp.int32)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for place, vector in enumerate(packed((*best[1], number), count)):
                    found_smem[warpgroup, place] = vector
                plgpu.commit_smem()
                start = row_tile * PROGRAM_ROWS + warpgroup * ROWS
                for place in range(words_of(kept, count)):
                    plgpu.copy_smem_to_gmem(found_smem.at[warpgroup, place], out_hbm.at[place, pl.ds(start, ROWS)])

            each_row_tile(compute)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Ring:
    """A computing warpgroup's side of the ring."""

    def __init__(
        self, x_smem: Any, codes_smem: Any, centre_hbm: Any, filled: Any, drained: Any, warpgroup: Any, steps: int
    ) -> None:
        self.x_smem, self.codes_smem, self.filled, self.drained = x_smem, codes_smem, filled, drained
        self.centre_hbm = centre_hbm
        self.warpgroup, self.steps = warpgroup, steps
        self.stages = codes_smem.shape[0]

    def rounded(self, turn: Any, scale: Any, norms: Any) -> tuple[Any, Any]:
        """A step's rows as 16-bit numbers in registers, and the squares of the rows and of what rounding took."""
        slot = lax.rem(turn, self.stages)
        plgpu.barrier_wait(self.filled.at[slot])
        raw = load(self.x_smem.at[slot, self.warpgroup], LAYOUT)
        if self.x_smem.dtype == self.codes_smem.dtype:
            narrow = raw
            if norms is not None:
                wide = raw.astype(jnp.float32) * scale  # the codes have it twice: for themselves and for the rows
                norms = norms[0] + (wide * wide).sum(axis=1), norms[1]
            return narrow, norms
        wide = (raw - across(self.centre_hbm, lax.rem(turn, self.steps) * DEPTH, (ROWS, DEPTH))) * scale
        narrow = wide.astype(self.codes_smem.dtype)
        if norms is not None:
            lost = wide - narrow.astype(jnp.float32)
            norms = norms[0] + (wide * wide).sum(axis=1), norms[1] + (lost * lost).sum(axis=1)
        return narrow, norms

    def contract(self, before: Any, scale: Any, norms: Any) -> tuple[Any, Any, Any]:
        """The products of this warpgroup's rows and a tile of codes; with `norms`, the squares added to them."""
        tile = self.codes_smem.shape[1]
        carried = norms is not None

        def products(accumulator: Any) -> Any:
            narrow, first = self.rounded(before, scale, norms)

            def multiply(step: Any, narrow: Any) -> Any:
                slot = lax.rem(before + step, self.stages)
                plgpu.wgmma(accumulator, narrow, plgpu.transpose_ref(self.codes_smem.at[slot], (1, 0)))
                return slot

            def step(number: Any, carry: Any) -> Any:
                narrow, norms = carry if carried else (carry, None)
                slot = multiply(number, narrow)
                # The next rows are rounded while these are multiplied.
                following, norms = self.rounded(before + number + 1, scale, norms)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.drained.at[slot])
                return (following, norms) if carried else following

            carry: Any = (narrow, first) if carried else narrow
            if self.steps > 1:
                carry = lax.fori_loop(0, self.steps - 1, step, carry)
            last: Any
            narrow, last = carry if carried else (carry, None)
            slot = multiply(self.steps - 1, narrow)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.drained.at[slot])
            return (accumulator[...],) if last is None else (accumulator[...], *last)

        made = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((ROWS, tile), jnp.float32))
        return made if carried else (*made, None, None)


def tile_best(scores: Any, half_hbm: Any, tile: Any, config: SearchConfig) -> tuple[list[Any], list[Any]]:
    """The best `kept` scores of a tile and their indices, by row.

    The low bits of a score are replaced by its column, so that one maximum finds both; the bound on the error knows.
    """
    keys = []
    for start in range(0, config.tile, PIECE):
        half = across(half_hbm, tile * config.tile + start, (ROWS, PIECE))
        score = scores[:, start : start + PIECE] - half
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, PIECE), 1, layout=LAYOUT) + start
        bits = (lax.bitcast_convert_type(score, jnp.int32) & OTHER_BITS) | column
        keys.append(lax.bitcast_convert_type(bits, jnp.float32))
    values, indices = [], []
    for turn in range(config.kept):
        highest = functools.reduce(jnp.maximum, keys).max(axis=1)
        values.append(highest)
        column = lax.bitcast_convert_type(highest, jnp.int32) & COLUMN_BITS
        indices.append(column + tile * config.tile)
        if turn + 1 < config.kept:
            spread = lax.broadcast_in_dim(highest, (ROWS, PIECE), (0,))
            keys = [jnp.where(key == spread, LOWEST, key) for key in keys]
    return values, indices


def across(ref: Any, first: Any, shape: tuple[int, int]) -> Any:
    """Some numbers of `ref` [n], one a column, in all rows of `shape`."""
    line = load(ref.at[pl.ds(first, shape[1])], COLUMN_LAYOUT, optimized=False)
    return lax.broadcast_in_dim(line, shape, (1,))


def merged(best: Any, new: Any) -> Any:
    """Both lists as one, the best first, as long as the first. Both are in order."""
    values, indices = list(best[0]), list(best[1])
    for number, (value, index) in enumerate(zip(*new, strict=True)):
        for place in range(number, len(values)):  # as many are ahead of it at the least
            better = value > values[place]
            values[place], value = jnp.where(better, value, values[place]), jnp.where(better, values[place], value)
            indices[place], index = jnp.where(better, index, indices[place]), jnp.where(better, indices[place], index)
    return tuple(values), tuple(indices)


def error_bound(squares: Any, lost: Any, highest: Any, bounds: Any, width: int, column_bits: int) -> Any:
    """How far a score may be from the true one, for those near the best.

    With x̂ = x - δx and ĉ = c - δc: |x·c - x̂·ĉ| ≤ |x||δc| + |δx||ĉ| by Cauchy-Schwarz. The tensor cores add 16 products
    at a time and cut, not round, what does not fit a float32: two units a step of the largest sum, and a margin. The
    codes' half norms are rounded sums. The column took the score's low bits: of 8 bits that is 2⁻¹⁵ of it at the most.
    """
    largest, rounded_off = bounds[1], bounds[2]

    def root(x: Any) -> Any:
        return x * lax.rsqrt(jnp.maximum(x, TINY))

    row, row_lost = root(squares), root(lost)
    added = (width / 8 + 16) * 2.0**-22
    error = row * rounded_off + row_lost * largest + row * (largest * added) + largest * largest * 2.0**-20
    return 1.01 * (error + jnp.abs(highest) * (column_bits * 2.0**-23))
