"""The work lists of the grouped products: which group each tile of rows belongs to.

Two lists, both of a length known when tracing and filled on the device, without a word to the host. In `row_tiles`
every tile starts at a row of its group's own, so none spans two groups. In `aligned_tiles` every tile starts at a
multiple of the block, so a tile on a boundary is visited once for each group that has rows in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.varying import vary_alike, vary_like

MOST_SQUARED = 1025  # groups and the rest: a square of a million numbers


class RowTiles(NamedTuple):
    """Tiles that belong to one group each: int32 arrays of one length, an entry more than `tile_limit` tiles."""

    group_of_tile: jax.Array
    bounds: jax.Array
    """The tile's first row. It ends where the next one starts; one past the last tile has no rows."""
    group_start: jax.Array
    """The first row of the tile's group; unspecified past the last tile."""
    tile_count: jax.Array
    """How many tiles there are, in every entry: a scalar of its own would be one more program on a GPU."""


class AlignedTiles(NamedTuple):
    """Visits of tiles that start at multiples of the block, ordered by group, hence by tile."""

    group_of_visit: jax.Array
    tile_of_visit: jax.Array
    visit_count: jax.Array
    """How many visits there are, a scalar. The rest of the list repeats the last one."""
    group_ends: jax.Array
    """The row after each group's last; a group starts where the one before ends."""


def tile_limit(groups: int, rows: int, block: int) -> int:
    """The most tiles that `row_tiles` can list: every group may waste a part of one."""
    return -(-rows // block) + groups


def group_spans(group_sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Each group's first row and the row after its last, int32 [groups]. See `group_ends`."""
    sizes = _counted(group_sizes, rows)
    (starts,) = _sums_before(sizes)
    return jnp.minimum(starts, rows), jnp.minimum(starts + sizes, rows)


def group_ends(group_sizes: jax.Array, rows: int) -> jax.Array:
    """The row after each group's last, int32 [groups]. Sizes below 0 count as 0; nothing goes past the rows."""
    return group_spans(group_sizes, rows)[1]


def with_rest(group_sizes: jax.Array, rows: int) -> jax.Array:
    """The sizes and one more group: the rows that no group has. The sizes then sum to `rows`."""
    ends = group_ends(group_sizes, rows)
    return jnp.diff(ends, prepend=0, append=rows).astype(jnp.int32)


def row_tiles(group_sizes: jax.Array, rows: int, block: int, *, rest: bool = False) -> RowTiles:
    """The tiles of `block` rows, each group's starting at its first row.

    A group of 5 rows at a block of 4 has a tile of 4 rows and one of 1; an empty group has none. Rows past the last
    group are in no tile, or with `rest` are one more group. The lists are for `tile_limit` tiles of that many groups.

    Written to be two fused programs: sums before each group, then sums over the groups for each tile. A group adds to
    a tile's start what it has of the rows before it, so nothing is searched, and nothing gathered.
    """
    sizes = _counted(group_sizes, rows)
    if rest:
        # As long as all rows: what is too much is not kept, as of all sizes.
        sizes = jnp.pad(sizes, (0, 1), constant_values=rows)
    groups = sizes.shape[0]
    tiles = -(-sizes // block)
    starts, first_tile = _sums_before(sizes, tiles)
    tile = jnp.arange(tile_limit(groups, rows, block) + 1, dtype=jnp.int32)[:, None]
    number = jnp.arange(groups, dtype=jnp.int32)
    done = jnp.clip(tile - first_tile, 0, tiles)  # tiles of each group before this one
    kept = jnp.maximum(jnp.minimum(sizes, rows - starts), 0)
    return RowTiles(
        *_sums(
            (first_tile <= tile) & (number > 0),
            jnp.minimum(done * block, kept),
            jnp.where(done == tiles, kept, 0),
            -(-kept // block),
        )
    )


def aligned_tiles(group_sizes: jax.Array, rows: int, block: int, *, visit_empty: bool = False) -> AlignedTiles:
    """Every (group, tile) pair that shares rows, where tiles start at multiples of `block`.

    `visit_empty` gives an empty group one visit (of a tile that has none of its rows): a kernel that writes one
    result a group then writes that one too.
    """
    groups = group_sizes.shape[0]
    starts, ends = group_spans(group_sizes, rows)
    last_tile = max(-(-rows // block) - 1, 0)
    first = jnp.minimum(starts // block, last_tile)
    visits = jnp.where(ends > starts, -(-ends // block) - first, int(visit_empty))
    visit_ends = jnp.cumsum(visits).astype(jnp.int32)
    visit = jnp.minimum(jnp.arange(tile_limit(groups, rows, block), dtype=jnp.int32), visit_ends[-1] - 1)
    visit = jnp.maximum(visit, 0)
    group = jnp.minimum(_first_above(visit_ends, visit), groups - 1)
    tile = first[group] + visit - jnp.where(group > 0, visit_ends[group - 1], 0)
    return AlignedTiles(group, tile.astype(jnp.int32), visit_ends[-1], ends)


def longest_first(steps: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """The groups by falling steps, and in that order their steps and other numbers of theirs, all int32.

    By counting and by sums of one number each, two fused programs: sorting, and each gather, would be one more.
    """
    number = jnp.arange(steps.shape[0], dtype=jnp.int32)
    before = (steps > steps[:, None]) | ((steps == steps[:, None]) & (number < number[:, None]))
    (place,) = _sums(before)
    return _sums(*(jnp.where(place == number[:, None], x, 0) for x in (number, steps, *others)))


def _first_above(ordered: jax.Array, values: Any) -> jax.Array:
    """For each value, the index of the first entry above it: a sum of comparisons, which fuses, and no search loop."""
    return jnp.sum(ordered[None, :] <= values[:, None], axis=1, dtype=jnp.int32)


def _counted(group_sizes: jax.Array, rows: int) -> jax.Array:
    return jnp.clip(group_sizes.astype(jnp.int32), 0, rows)


def _sums_before(*numbers: jax.Array) -> tuple[jax.Array, ...]:
    """For each entry the sum of those before it: all in one reduction of a square, where that is not large."""
    length = numbers[0].shape[0]
    if length > MOST_SQUARED:
        return tuple(jnp.cumsum(x, dtype=jnp.int32) - x for x in numbers)
    place = jnp.arange(length)
    return _sums(*(jnp.where(place < place[:, None], x, 0) for x in numbers))


def _sums(*terms: jax.Array) -> tuple[jax.Array, ...]:
    """Int32 sums over the last axis of several arrays, in one pass: sums apart may be a program each."""
    shape = jnp.broadcast_shapes(*(x.shape for x in terms))
    whole = vary_alike(tuple(jnp.broadcast_to(x, shape).astype(jnp.int32) for x in terms))
    zeros = tuple(vary_like(jnp.int32(0), x) for x in whole)
    return lax.reduce(whole, zeros, lambda some, more: tuple(map(lax.add, some, more)), (1,))
