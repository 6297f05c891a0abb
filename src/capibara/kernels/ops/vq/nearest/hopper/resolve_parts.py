"""The nearest code of every row from the lists of several parts of the codes.

A part matters whose best score may be the highest of all; mostly that is one, with one code that may be the nearest.
Else the codes of all parts that matter are compared in float32, as `resolve` does, by a program for each row or for
few. Where one of their lists may not be complete, all codes of these parts are, 64 at a time: a tile of differences
needs no exchange between warps. No other program shares them: there are few rows, and a launch is longer.
"""

from __future__ import annotations

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
    LAYOUT,
    PartLists,
    SearchConfig,
    across,
    row_full,
    row_numbers,
)
from capibara.kernels.ops.vq.nearest.hopper.resolve import Row, nearest_listed, twice_if_small
from capibara.kernels.pallas.hopper import LANE, load, named

MOST_PROGRAMS = 2048  # that an H200 has at a time; more rows are several a program
MOST_ROWS = 4
ONE_PART = 1 << 16  # in a sum of places it counts them


def resolve_parts(x: jax.Array, codebook: jax.Array, lists: jax.Array, length: int, config: SearchConfig) -> jax.Array:
    """Indices [N] from the `PartLists` of x's rows [N]; a part has `length` codes, and there are 64 or more."""
    rows = x.shape[0]
    together = min(MOST_ROWS, -(-rows // MOST_PROGRAMS))
    (indices,) = plgpu.kernel(
        named("nearest_code_resolve", _program, config=config, length=length, together=together),
        out_type=[out_struct((rows,), jnp.int32, x)],
        grid=(-(-rows // together),),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE),
    )(x, codebook, lists)
    return indices


def _program(
    x_hbm: Any, codes_hbm: Any, lists_hbm: Any, out_hbm: Any, *, config: SearchConfig, length: int, together: int
) -> None:
    parts, lists = config.parts, PartLists(config.parts, config.kept)
    # The last starts early: it finds some rows' codes again.
    first = jnp.minimum(lax.axis_index("program") * together, x_hbm.shape[0] - together)
    layout = plgpu.Layout.WG_STRIDED((lists.vector,), vec_size=1)
    place = plgpu.broadcasted_iota(jnp.int32, (lists.vector,), 0, layout=layout)

    def which_matter(bits: Any) -> Any:
        """[vector] int32: parts + part there, where that part may have the nearest code, else zero."""
        scores = lax.bitcast_convert_type(bits, jnp.float32)
        highest = jnp.max(jnp.where(place < parts, scores, np.float32(-np.inf)))
        # Not those below: what cannot be compared matters.
        return jnp.where((place >= parts) & (place < 2 * parts) & ~(scores < highest), place, np.int32(0))

    # All of them are asked for before the first is looked at.
    vectors = [load(lists_hbm.at[first + number, pl.ds(0, lists.vector)], layout) for number in range(together)]
    for number, bits in enumerate(vectors):
        row, places = first + number, which_matter(bits)
        found = jnp.sum(jnp.where(places > 0, place + (ONE_PART - parts), np.int32(0)))
        # Of several the sum is no place, but it is more.
        part = jnp.minimum(found - ONE_PART, parts - 1)
        best, count = (lists_hbm[row, lists.place(part, entry)] for entry in (0, config.kept))
        certain = (found < 2 * ONE_PART) & (count == 1)

        @pl.when(certain)
        def _(row: Any = row, best: Any = best) -> None:
            out_hbm[row] = best

        @pl.when(jnp.logical_not(certain))
        def _(row: Any = row, places: Any = places) -> None:
            _compare(x_hbm, codes_hbm, lists_hbm, out_hbm, row, places, config, length)


def _compare(
    x_hbm: Any, codes_hbm: Any, lists_hbm: Any, out_hbm: Any, row: Any, places: Any, config: SearchConfig, length: int
) -> None:
    """Write the nearest code of a row, -1 where it has none; parts that matter are at `places`, others at zero."""
    lists = PartLists(config.parts, config.kept)
    codes, kept, parts = codes_hbm.shape[0], config.kept, config.parts
    values = Row(x_hbm, codes_hbm, row)
    matter = jnp.sum(jnp.where(places > 0, np.int32(1), np.int32(0)))
    # A row that is no number has no code, though all parts seem to matter.
    matter = jnp.where(values.is_finite(), matter, 0)
    nothing = np.float32(np.inf), np.int32(codes)

    def over_parts(visit: Any, start: Any) -> Any:
        """visit(part, carry) of those that matter, from the last to the first: threads agree on a largest number."""

        def step(_: Any, state: Any) -> Any:
            after, carry = state
            this = jnp.max(jnp.where(places < after, places, np.int32(0)))
            return this, visit(this - parts, carry)

        return lax.fori_loop(0, matter, step, (np.int32(2 * parts), start))[1]

    def entry_of(part: Any) -> Any:
        return lambda place: lists_hbm[row, lists.place(part, place)]

    def listed(part: Any, best: Any, by: Any) -> Any:
        entry = entry_of(part)
        count = entry(kept)
        # What is past the count may be no code.
        known = [entry(place) for place in range(kept - 1)]
        known = [known[0], *(jnp.where(place < count, known[place], known[0]) for place in range(1, kept - 1))]
        return nearest_listed(values, entry, known, count, codes, length if config.resident else 0, best, by)

    def all_of(part: Any, best: Any, by: Any) -> Any:
        first = part * length
        blocks = lax.div(jnp.minimum(codes - first, length) + (BLOCK_M - 1), BLOCK_M)
        return lax.fori_loop(
            0, blocks, lambda block, best: _nearer(x_hbm, codes_hbm, row, first + block * BLOCK_M, best, by), best
        )

    def by_lists(by: Any) -> Any:
        return over_parts(lambda part, best: listed(part, best, by), nothing)

    def by_all(by: Any) -> Any:
        start = row_full(np.inf, jnp.float32), row_full(codes, jnp.int32)
        least, index = over_parts(lambda part, best: all_of(part, best, by), start)
        nearest = -jnp.max(-least)
        return nearest, -jnp.max(-jnp.where(least == nearest, index, codes))

    longest = over_parts(lambda part, most: jnp.maximum(most, entry_of(part)(kept)), np.int32(0))

    @pl.when(longest < kept)
    def _lists() -> None:
        index = twice_if_small(by_lists)
        # No part was looked at of a row that is no number.
        out_hbm[row] = jnp.where(index < codes, index, np.int32(-1))

    @pl.when(longest >= kept)
    def _all() -> None:
        index = twice_if_small(by_all)
        out_hbm[row] = jnp.where(index < codes, index, np.int32(-1))


def _nearer(x_hbm: Any, codes_hbm: Any, row: Any, first: Any, best: Any, by: Any) -> Any:
    """(the least distances, their codes) of `best` [64] and 64 codes, each of one and one."""
    codes, width = codes_hbm.shape
    least, index = best
    # The last block starts early: it compares some codes again.
    first = jnp.minimum(first, codes - BLOCK_M)
    zeros = row_full(0, jnp.float32)

    def k_step(step: Any, carry: Any) -> Any:
        squares, norms = carry
        tile = codes_hbm.at[pl.ds(first, BLOCK_M), pl.ds(step * BLOCK_K, BLOCK_K)]
        code = load(tile, LAYOUT, optimized=False).astype(jnp.float32)
        values = across(x_hbm.at[row], step * BLOCK_K, (BLOCK_M, BLOCK_K)).astype(jnp.float32)
        difference = (values - code) * by
        return squares + (difference * difference).sum(axis=1), norms + (code * code).sum(axis=1)

    squares, norms = lax.fori_loop(0, width // BLOCK_K, k_step, (zeros, zeros))
    code = row_numbers() + first
    # Where every distance overflows, the first that can be used is as near as any.
    better = (norms < np.inf) & ((squares < least) | ((squares == least) & (code < index)))
    return jnp.where(better, squares, least), jnp.where(better, code, index)
