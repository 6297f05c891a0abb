"""Tiles of scores in a warpgroup's registers: where their pairs lie, who may see whom, what dropout keeps.

Rows count queries and columns count keys, whichever way round the tile is held: [queries, keys] as the forward pass
multiplies it, or transposed, [keys, queries], as a backward pass may. Every function takes the tile's place in the
operands as its first row and first column, values of the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention.masking import FAR
from capibara.kernels.pallas import hopper, prng

LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Band:
    """Row i sees columns i + below to i + above (FAR: no limit), of `columns` that exist.

    `rows` is None where rows past the end do no harm, because nothing is summed over rows.
    """

    below: int
    above: int
    columns: int
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """The shape of a tile: `rows` queries by `columns` keys, held as [keys, queries] when transposed."""

    rows: int
    columns: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    @property
    def _axes(self) -> tuple[int, int]:
        """The axis of the queries, and of the keys."""
        return (1, 0) if self.transposed else (0, 1)

    @property
    def row_layout(self) -> Any:
        """How one number a query lies in registers, to be spread over the tile without moving."""
        return LAYOUT.reduce(self._axes[1])

    @property
    def column_layout(self) -> Any:
        return LAYOUT.reduce(self._axes[0])

    def row_numbers(self, first: Any, dtype: Any = jnp.int32) -> Any:
        """The row of each pair."""
        return plgpu.broadcasted_iota(dtype, self.shape, self._axes[0], layout=LAYOUT) + first

    def column_numbers(self, first: Any, dtype: Any = jnp.int32) -> Any:
        return plgpu.broadcasted_iota(dtype, self.shape, self._axes[1], layout=LAYOUT) + first

    def spread_rows(self, x: Any) -> Any:
        """One value a query, over the tile."""
        return lax.broadcast_in_dim(x, self.shape, [self._axes[0]])

    def spread_columns(self, x: Any) -> Any:
        return lax.broadcast_in_dim(x, self.shape, [self._axes[1]])


load = functools.partial(hopper.load, optimized=False)  # most of what is loaded here is bytes and single numbers


def in_band(tile: Tile, first_row: Any, first_column: Any, band: Band) -> Any:
    """Which pairs position allows, as a boolean tile; None where it rules nothing out in any tile."""
    found = []
    column = tile.column_numbers(first_column)
    if band.columns % tile.columns:
        found.append(column < band.columns)
    if band.rows is not None and band.rows % tile.rows:
        found.append(tile.row_numbers(first_row) < band.rows)
    if band.above != FAR:
        found.append(column <= tile.row_numbers(first_row + band.above))
    if band.below != -FAR:
        found.append(column >= tile.row_numbers(first_row + band.below))
    return conjunction(found)


def conjunction(found: list[Any]) -> Any:
    """All of these boolean tiles at once; None of an empty list: everything is allowed."""
    made = None
    for each in found:
        made = each if made is None else made & each
    return made


def same_segment(tile: Tile, of_queries: Any, of_keys: Any) -> Any:
    """Whether the segment of the query [rows] is the key's [columns]."""
    return tile.spread_rows(of_queries) == tile.spread_columns(of_keys)


def dropout_row_keys(tile: Tile, seed: Any, first_row: Any) -> Any:
    """The part of the generator that is computed once a row; `first_row` counts over batch, heads and queries."""
    rows = plgpu.broadcasted_iota(jnp.int32, (tile.rows,), 0, layout=tile.row_layout) + first_row
    return prng.row_keys((seed[0], seed[1]), rows)


def dropout_keeps(tile: Tile, row_keys: Any, first_column: Any, rate: float) -> Any:
    """Which pairs dropout keeps: the bits of every other implementation."""
    columns = plgpu.broadcasted_iota(jnp.int32, (tile.columns,), 0, layout=tile.column_layout) + first_column
    keys = tuple(tile.spread_rows(word) for word in row_keys)
    return prng.kept(prng.random_bits(keys, tile.spread_columns(columns)), rate)


def zero_unseen(values: Any, seen: Any) -> None:
    """Put rows of a block of values [keys, head_dim] in shared memory to zero where nobody sees the key.

    A probability of zero times NaN is NaN. `seen(start, rows, layout)` tells for `rows` keys from `start` of the block
    on. Two warpgroups may do this to one block at once: both write the same.
    """
    keys, depth = values.shape
    for start in range(0, keys, 64):
        rows = slice(start, start + 64)
        allowed = lax.broadcast_in_dim(seen(start, 64, LAYOUT.reduce(1)), (64, 64), [0])
        for column in range(0, depth, 64):
            piece = values.at[rows, slice(column, column + 64)]
            x = load(piece, LAYOUT, optimized=True)
            piece[...] = jnp.where(allowed, x, jnp.zeros_like(x))
    plgpu.commit_smem()
