"""Rows whose search left several codes: their distances in float32, and the nearest.

One row against some codes at a time, by all 128 threads of a program or warpgroup, and by differences, so that near
codes are told apart. Equal codes have equal distances, to the bit: each is computed by the same additions in the same
order. Where the least distance is so small that squares may have vanished, all are computed again of differences that
are enlarged by a power of two.

Where a list may not be complete, all codes are compared: many programs a row, a slice of the codes each (`by_slices`).
Such rows are rare, a few of a batch, and the rest of the chip would wait for the one program that has one: 8192 codes
of 768 numbers, four at a time, are 2.3 ms of waiting for memory. Most programs find no such row and end.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.hopper.common import LARGEST_USABLE, THREADS, entry_of
from capibara.kernels.ops.vq.nearest.hopper.search_resident import stream_of
from capibara.kernels.pallas.hopper import LANE, load, named

ROWS = 8  # of a program: few, so that those with several codes are spread over the chip
TOGETHER = 4  # codes that are compared at a time, where there are many: a wait for memory and four sums, about 1.1 us
# A least distance below this may be a sum of squares that float32 has not. Enlarged, it is 2^68 at the most; a code
# whose distance overflows then is farther.
SMALLEST_DISTANCE = 2.0**-60
ENLARGED = 2.0**64
SHORTEST = 128  # codes of a slice: their best are then compared again, as many as there are slices
MOST_SLICES = 64
MOST_PARTS = 8  # of THREADS rows each: those of a program


def resolve(
    x: jax.Array, codebook: jax.Array, lists: jax.Array, half: jax.Array, kept: int, *, streams: bool = False
) -> jax.Array:
    """Indices [N] from the lists of `search` [words, N or more]: the nearest of those that may be it.

    With `streams`, lists of `search_resident`: two codes of a stream stand for all of it. A row whose list of `kept`
    is full is compared with all codes whose `half` norm [K or more] says that they can be used. N is a multiple of
    ROWS.
    """
    # One program compares a row with so few fast enough.
    sliced = [by_slices(x, codebook, lists, half, kept)] if codebook.shape[0] > SHORTEST else []
    (indices,) = plgpu.kernel(
        named("nearest_code_resolve", _resolve_program, kept=kept, streams=streams),
        out_type=[out_struct((x.shape[0],), jnp.int32, x)],
        grid=(x.shape[0] // ROWS,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE),
    )(x, codebook, lists, half, *sliced)
    return indices


def _resolve_program(
    x_hbm: Any, codes_hbm: Any, lists_hbm: Any, half_hbm: Any, *refs: Any, kept: int, streams: bool
) -> None:
    *sliced, out_hbm = refs
    first = lax.axis_index("program") * ROWS
    entries = [entry_of(lists_hbm, first + number, kept) for number in range(ROWS)]
    # All of them are asked for before the first is looked at: one wait for memory, not one a row.
    counts = [entry(kept) for entry in entries]
    best = [entry(0) for entry in entries]
    for number in range(ROWS):
        out_hbm[first + number] = best[number]

    def resolve_row(number: Any, carry: None) -> None:
        row = first + number
        slices = [lambda at: sliced[0][at, row], sliced[0].shape[0]] if sliced else None
        look_again(
            x_hbm, codes_hbm, out_hbm, row, entry_of(lists_hbm, row, kept), kept, half_hbm, streams=streams,
            slices=slices,
        )  # fmt: skip
        return carry

    most = functools.reduce(jnp.maximum, counts)

    @pl.when(most > 1)
    def _some_are_not_certain() -> None:
        lax.fori_loop(0, ROWS, resolve_row, None)


def look_again(
    x_hbm: Any, codes_hbm: Any, out_hbm: Any, row: Any, entry: Callable[[Any], Any], kept: int, half: Any, *,
    streams: bool = False, slices: Any = None,
) -> None:  # fmt: skip
    """Write the nearest code of a row, if its list `entry(place)`, whose length is the `kept`-th, has more than one.

    slices is (the best code of each, how many), where all codes were compared before.
    """
    codes = codes_hbm.shape[0]
    count = entry(kept)

    @pl.when((count > 1) & (count < kept))
    def _few() -> None:
        out_hbm[row] = _of_a_few(Row(x_hbm, codes_hbm, row), entry, kept, codes, streams)

    def best_of_slice(at: Any) -> tuple[Any, Any]:
        code = slices[0](at)
        return jnp.maximum(code, 0), code >= 0

    @pl.when(count == kept)
    def _all() -> None:
        values = Row(x_hbm, codes_hbm, row)
        if slices is None:
            index = values.nearest(lambda at: usable(half, at), codes)
        else:
            index = values.nearest(best_of_slice, slices[1])
        out_hbm[row] = jnp.where(values.is_finite(), index, np.int32(-1))


def _of_a_few(row: Row, entry: Any, kept: int, codes: int, streams: bool) -> Any:
    listed, count = [entry(place) for place in range(kept - 1)], entry(kept)
    start = np.float32(np.inf), np.int32(codes)
    spanned = codes if streams else 0
    return twice_if_small(lambda by: nearest_listed(row, entry, listed, count, codes, spanned, start, by))


def nearest_listed(
    row: Row, entry: Any, listed: list[Any], count: Any, codes: int, spanned: int, best: Any, by: Any
) -> Any:
    """(the least distance, its index) of `best` and `count` codes `entry(place)`, the first of which are `listed`.

    With `spanned`, that many codes were searched together: two codes of a stream stand for all of it.
    """

    def nearer(best: Any, others: list[Any]) -> Any:
        least, index = best
        for there, other in zip(row.distances(others, by), others, strict=True):
            better = (there < least) | ((there == least) & (other < index))
            least, index = jnp.where(better, there, least), jnp.where(better, other, index)
        return least, index

    best = nearer(best, listed[:2])
    best = lax.fori_loop(2, count, lambda place, best: nearer(best, [entry(place)]), best)
    if not spanned or len(listed) < 2:  # a list of two that is not full has one code
        return best
    starts = [stream_of(code, spanned)[0] for code in listed]
    _, apart, length = stream_of(listed[0], spanned)

    def look_at_stream(place: Any, best: Any) -> Any:
        start = starts[1]
        for number in range(2, len(starts)):
            start = jnp.where(place == number, starts[number], start)
        alike = [(place > number) & (start == starts[number]) for number in range(len(starts) - 1)]
        # Where the list has another of its stream, all of it.
        repeated = functools.reduce(operator.or_, alike)

        def look(turn: Any, best: Any) -> Any:
            several = [start + (turn * TOGETHER + number) * apart for number in range(TOGETHER)]
            # Past the last code there is none: the first again.
            return nearer(best, [jnp.where(code < codes, code, start) for code in several])

        return lax.fori_loop(0, jnp.where(repeated, length // TOGETHER, 0), look, best)

    return lax.fori_loop(1, count, look_at_stream, best)


class Row:
    """A row of x in registers, and its distances to codes."""

    def __init__(self, x_hbm: Any, codes_hbm: Any, row: Any) -> None:
        self.codes_hbm = codes_hbm
        width = x_hbm.shape[1]
        vector = math.gcd(width // THREADS, 16 // max(x_hbm.dtype.itemsize, codes_hbm.dtype.itemsize))
        self.layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
        self.values = load(x_hbm.at[row], self.layout).astype(jnp.float32)

    def distances(self, indices: list[Any], by: Any) -> list[Any]:
        # All are on the way from memory before the first is added up.
        several = [load(self.codes_hbm.at[index], self.layout).astype(jnp.float32) for index in indices]
        differences = [(self.values - code) * by for code in several]
        return [jnp.sum(difference * difference) for difference in differences]

    def is_finite(self) -> Any:
        return jnp.sum(self.values * self.values) < np.inf

    def nearest(self, code: Callable[[Any], tuple[Any, Any]], count: int) -> Any:
        """The nearest of `count` codes, the first of equals; -1 where none counts.

        code(number) is (a code, whether it counts), in the order of their indices.
        """

        def look(turn: Any, best: Any, by: Any) -> Any:
            least, index = best
            # Whether they count is asked for with them: sums wait for all threads, and nothing is fetched across one.
            several = [code(jnp.minimum(turn * TOGETHER + number, count - 1)) for number in range(TOGETHER)]
            for there, (this, counts) in zip(self.distances([this for this, _ in several], by), several, strict=True):
                # The first that counts is as near as any where every distance overflows.
                nearer = counts & ((there < least) | (index < 0))
                least, index = jnp.where(nearer, there, least), jnp.where(nearer, this, index)
            return least, index

        def search(by: Any) -> Any:
            start = (np.float32(np.inf), np.int32(-1))
            return lax.fori_loop(0, -(-count // TOGETHER), lambda turn, best: look(turn, best, by), start)

        return twice_if_small(search)


def twice_if_small(search: Callable[[Any], tuple[Any, Any]]) -> Any:
    """The index of (the least distance, its index) that `search(by)` finds of differences by 1, or enlarged."""

    def turn(state: Any) -> Any:
        by = state[0]
        least, index = search(by)
        return np.float32(ENLARGED), index, (least < SMALLEST_DISTANCE) & (by == 1)

    # One program for both: by 1 a difference is what it was.
    return lax.while_loop(lambda state: state[2], turn, (np.float32(1), np.int32(0), np.bool_(True)))[1]


def usable(half: Any, code: Any) -> tuple[Any, Any]:
    """(a code, whether its half norm says that it can be used)."""
    return code, half[code] < LARGEST_USABLE


def slice_length(codes: int) -> int:
    return max(SHORTEST, -(-codes // MOST_SLICES))


def by_slices(x: jax.Array, codebook: jax.Array, lists: jax.Array, half: jax.Array, kept: int) -> jax.Array:
    """[slices, N] int32: the nearest code of each slice, -1 where none can be used, of rows whose list is full.

    What it says of other rows is nothing: they were not written. lists are [kept + 1, N or more and 128 at the least].
    """
    rows, codes = x.shape[0], codebook.shape[0]
    slices, parts = -(-codes // slice_length(codes)), -(-rows // THREADS)
    together = min(parts, MOST_PARTS)
    (nearest,) = plgpu.kernel(
        named("nearest_code_slices", _slice_program, kept=kept, together=together),
        out_type=[out_struct((slices, rows), jnp.int32, x)],
        grid=(-(-parts // together), slices),
        grid_names=("rows", "slice"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE),
    )(x, codebook, lists, half)
    return nearest


def _slice_program(
    x_hbm: Any, codes_hbm: Any, lists_hbm: Any, half_hbm: Any, out_hbm: Any, *, kept: int, together: int
) -> None:
    rows, codes, length = x_hbm.shape[0], codes_hbm.shape[0], slice_length(codes_hbm.shape[0])
    group, number = lax.axis_index("rows"), lax.axis_index("slice")
    first = number * length
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    place = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=layout)

    def look(start: Any, read: Any, count: Any) -> None:
        row = place + read
        full = (count >= kept) & (row >= start) & (row < rows)

        def full_row(_: Any, after: Any) -> Any:
            # From the last to the first: the threads agree on a largest number.
            this = jnp.max(jnp.where(full & (row < after), row, np.int32(-1)))
            values = Row(x_hbm, codes_hbm, this)
            out_hbm[number, this] = values.nearest(
                lambda at: usable(half_hbm, jnp.minimum(first + at, codes - 1)), length
            )
            return this

        lax.fori_loop(0, jnp.sum(jnp.where(full, np.int32(1), np.int32(0))), full_row, np.int32(rows))

    def span(part: Any) -> tuple[Any, Any]:
        """(the first row of a part, the first whose count is read for it)."""
        start = (group * together + part) * THREADS
        # The last rows' counts are read with some before them, which are then another part's.
        return start, jnp.minimum(start, lists_hbm.shape[1] - THREADS)

    def counts(read: Any) -> Any:
        return load(lists_hbm.at[kept, pl.ds(read, THREADS)], layout)

    # All of them are asked for before the first is looked at.
    every = [counts(span(part)[1]) for part in range(together)]

    @pl.when(jnp.max(functools.reduce(jnp.maximum, every)) >= kept)
    def _some_are_full() -> None:
        # One program for all parts, an eighth of one for each: those few that come here read their counts again.
        def look_at(part: Any, carry: None) -> None:
            start, read = span(part)
            look(start, read, counts(read))
            return carry

        lax.fori_loop(0, together, look_at, None)
