"""What the Hopper kernels of nearest_code share: the config, a warpgroup's tile, the scores' bound, a row's list."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.pallas.hopper import REDUCTION_BYTES, SMEM_BYTES, load, smem_bytes, store_to_memory

THREADS = 128  # of a warpgroup
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT, COLUMN_LAYOUT = LAYOUT.reduce(1), LAYOUT.reduce(0)
FETCH_REGISTERS, COMPUTE_REGISTERS = 40, 232
BLOCK_M = 64  # rows of a warpgroup
PROGRAM_M = 2 * BLOCK_M
BLOCK_K = 64  # of the contraction a step
PIECE = 64  # columns of a tile that are looked at together
LOWEST = -1e30  # a score that no code has
LARGEST_USABLE = 1e29  # half norms of codes that cannot be used are beyond
LARGEST_SCALED = 8.0  # of the scaled codes, roughly: rows may have 8,000 times as large ones before float16 ends
LARGEST_NARROW = 65000.0
COLUMN_BITS = 0xFF  # of a score, replaced by the column: a tile has 256 at most
OTHER_BITS = ~COLUMN_BITS
TINY = 1e-35
MOST_PARTS = 1024


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Codes of a tile, stages of the ring, how many codes are kept for every row; and whether rows stay in SMEM.

    With `resident` they do, and a stage is a block of 64 x 64 numbers of the codes, see `search_resident`.

    With several `parts` the codes are divided, for rows that are too few for all multiprocessors, and a program has
    some rows and a part. With `resident` that is `search_resident`; else `search_parts`, where what stays are the rows
    too, and the programs round the codes themselves.
    """

    tile: int
    stages: int
    kept: int = 4
    resident: bool = False
    parts: int = 1
    direct: int = 0

    def __post_init__(self) -> None:
        if self.tile not in (64, 128, 192, 256):
            raise rule_error("tile is 64, 128, 192 or 256", self.tile, "use 256")
        if self.stages < 2:
            raise rule_error("stages is 2 or more", self.stages, "use 3")
        if not 2 <= self.kept <= 8:
            raise rule_error("kept is from 2 to 8", self.kept, "use 4")
        if self.resident and self.tile != 256:
            raise rule_error("tile is 256 where rows stay in shared memory", self.tile, "use 256")
        if not 1 <= self.parts <= MOST_PARTS:
            raise rule_error(f"parts is from 1 to {MOST_PARTS}", self.parts, "use 1")
        if self.direct not in (0, 1, 2, 4):
            raise rule_error("direct is 0, 1, 2 or 4 rows a thread", self.direct, "use 0")
        if self.parts > 1 and not self.direct and self.tile != (256 if self.resident else 128):
            raise rule_error("tile is 256 for parts of codes beside rows that stay, else 128", self.tile, "use parts=1")


def fits(scratch: Any) -> bool:
    return smem_bytes(scratch, REDUCTION_BYTES) <= SMEM_BYTES


def narrow_type(dtype: Any) -> Any:
    """What numbers are multiplied as: 16-bit ones as they are, float32 rounded to float16."""
    return jnp.dtype(jnp.float16) if dtype == jnp.float32 else jnp.dtype(dtype)


def row_full(value: Any, dtype: Any, rows: int = BLOCK_M) -> Any:
    """A number for every row of a warpgroup."""
    return plgpu.layout_cast(jnp.full((rows,), value, dtype), ROW_LAYOUT)


def row_numbers(rows: int = BLOCK_M) -> Any:
    """0, 1, 2, ... for the rows of a warpgroup."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, 8), 0, layout=LAYOUT).max(axis=1)


def across(ref: Any, first: Any, shape: tuple[int, int]) -> Any:
    """Some numbers of `ref` [n], one a column, in all rows of `shape`."""
    line = load(ref.at[pl.ds(first, shape[1])], COLUMN_LAYOUT, optimized=False)
    return lax.broadcast_in_dim(line, shape, (1,))


def safe_sqrt(x: Any) -> Any:
    return x * lax.rsqrt(jnp.maximum(x, TINY))


def enlargement(largest: Any) -> Any:
    """A power of two for bfloat16 codes of such numbers: 1, but where products of them would be none of float32.

    Times it they are between 2^-26 and 2^15, and times its square, which is what rows meet, 2^100 at the most.
    """
    scale: Any = np.float32(1)
    for below, power in ((-30, 45), (-60, 75), (-90, 100)):
        scale = jnp.where(largest < np.float32(2.0**below), np.float32(2.0**power), scale)
    return jnp.where(largest > 0, scale, np.float32(1))


def tile_best(scores: Any, half_ref: Any, tile: Any, config: SearchConfig) -> tuple[list[Any], list[Any]]:
    """The best `kept` scores of a tile and their indices, by row.

    The low bits of a score are replaced by its column, so that one maximum finds both; the bound on the error knows.
    """
    keys = []
    for start in range(0, config.tile, PIECE):
        half = across(half_ref, tile * config.tile + start, (BLOCK_M, PIECE))
        score = scores[:, start : start + PIECE] - half
        column = plgpu.broadcasted_iota(jnp.int32, (BLOCK_M, PIECE), 1, layout=LAYOUT) + start
        bits = (lax.bitcast_convert_type(score, jnp.int32) & OTHER_BITS) | column
        keys.append(lax.bitcast_convert_type(bits, jnp.float32))
    values, indices = [], []
    for turn in range(config.kept):
        highest = functools.reduce(jnp.maximum, keys).max(axis=1)
        values.append(highest)
        column = lax.bitcast_convert_type(highest, jnp.int32) & COLUMN_BITS
        indices.append(column + tile * config.tile)
        if turn + 1 < config.kept:
            spread = lax.broadcast_in_dim(highest, (BLOCK_M, PIECE), (0,))
            keys = [jnp.where(key == spread, LOWEST, key) for key in keys]
    return values, indices


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
    codes' half norms are rounded sums. The column took the score's low bits: of 8 bits that is 2⁻¹⁵ of it at the most,
    and of a score of zero, where codes are all alike, a number below TINY.
    """
    largest, rounded_off = bounds[1], bounds[2]
    row, row_lost = safe_sqrt(squares), safe_sqrt(lost)
    added = (width / 8 + 16) * 2.0**-22
    error = row * rounded_off + row_lost * largest + row * (largest * added) + largest * largest * 2.0**-20
    return 1.01 * (error + jnp.abs(highest) * (column_bits * 2.0**-23)) + TINY


def count_close(values: Sequence[Any], threshold: Any, zero: Any) -> Any:
    """How many of a row's best scores may be the highest. Not below the threshold: what cannot be compared counts."""
    count = zero
    for value in values:
        count = count + jnp.where(value < threshold, 0, 1).astype(jnp.int32)
    return count


# Between the search and what reads them the rows' lists lie as [words, rows] int32. A list is `kept` codes, the best
# first, and how many of them may be the nearest: a word each, or a byte each where there are so few codes that words
# would be much beside a table of rows by codes.
MOST_PACKED = 128  # codes whose indices are bytes
BYTES = 4  # of a word
BYTE = 256


def words_of(kept: int, codes: int) -> int:
    """Of a row's list; codes are as many as the search has."""
    return kept + 1 if codes > MOST_PACKED else -(-(kept + 1) // BYTES)


def packed(entries: Sequence[Any], codes: int) -> list[Any]:
    """The words of lists whose entries are vectors of int32."""
    if codes > MOST_PACKED:
        return list(entries)
    words = []
    for first in range(0, len(entries), BYTES):
        word, *others = entries[first : first + BYTES]
        for place, entry in enumerate(others, 1):
            word = word + entry * BYTE**place
        words.append(word)
    return words


def entry_of(lists: Any, row: Any, kept: int) -> Callable[[Any], Any]:
    """The entries of a row's list, by their place; the `kept`-th is how many may be the nearest."""
    if lists.shape[0] == kept + 1:
        return lambda place: lists[place, row]

    def entry(place: Any) -> Any:
        word, byte = divmod(place, BYTES) if isinstance(place, int) else (lax.div(place, BYTES), lax.rem(place, BYTES))
        return lax.shift_right_logical(lists[word, row], np.int32(8) * byte) & (BYTE - 1)

    return entry


class PartLists(NamedTuple):
    """How the lists of several parts of the codes lie, [rows, words] int32: all words of a row together.

    First those that tell which parts matter, a vector for the threads of a program: the least and then the most that
    the highest score of each part may truly be. Then the lists of the parts, one after another.
    """

    parts: int
    kept: int

    @property
    def vector(self) -> int:
        return -(-2 * self.parts // THREADS) * THREADS

    @property
    def words(self) -> int:
        return max(self.vector, self.place(self.parts, 0))

    def place(self, part: Any, entry: Any) -> Any:
        """Of an entry of a part's list; the `kept`-th is how many may be the nearest."""
        return 2 * self.parts + part * (self.kept + 1) + entry

    def write(self, lists: Any, start: Any, part: Any, best: Any, error: Any, zero: Any) -> None:
        """By a warpgroup: the best scores and their codes of BLOCK_M rows, whose scores are this far from true."""
        values, indices = best
        low, high = values[0] - error, values[0] + error
        rows = pl.ds(start, BLOCK_M)
        store_to_memory(lists.at[rows, part], lax.bitcast_convert_type(low, jnp.int32))
        store_to_memory(lists.at[rows, self.parts + part], lax.bitcast_convert_type(high, jnp.int32))
        for entry, numbers in enumerate((*indices, count_close(values, values[0] - 2 * error, zero))):
            store_to_memory(lists.at[rows, self.place(part, entry)], numbers)
