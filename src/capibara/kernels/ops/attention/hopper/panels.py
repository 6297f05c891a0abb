"""Heads in shared memory: their columns in panels, which TMA fills from arrays of any length and head size.

A panel is as wide as a swizzle: 128, 64 or 32 bytes. It has the same bytes in it whether its rows are taken one by
one, as TMA copies them, or in tiles of 8, as wgmma reads them; only the tiles would ask an array for a length that is
a multiple of 8. Copies are clipped at the ends of the array, rows and columns: what lies past them is read as zeros,
and is not written. So no array is padded, but for rows that do not start at multiples of 16 bytes, which TMA does not
take.

Each panel is a copy, and a product of its own. Where the head is made of the widest panels alone and the lengths of
the arrays are multiples of 8, one copy takes all columns in tiles of 8 and one product goes over them: `WholeColumns`.
On an H200 panels cost 3 % of the forward and 5 to 10 % of the backward pass there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention.hopper.masking import round_up
from capibara.kernels.pallas.hopper import SWIZZLE, swizzled

CONTRACTED = 16  # columns that a wgmma contracts at a time: panels of a head are so wide, or a multiple
TILE_ROWS = 8  # of a swizzled tile
SWIZZLES = (SWIZZLE, SWIZZLE // 2, SWIZZLE // 4)  # bytes


def aligned(head_dim: int, dtype: Any) -> int:
    """The columns of an array whose rows start where TMA takes them."""
    return round_up(head_dim, 16 // jnp.dtype(dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Panel:
    """Columns `first` to `first + width` of a part, of which each `swizzled` lie together."""

    first: int
    width: int
    swizzled: int

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.width)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a head, in `parts` that are alike, so that a warpgroup may have one by its number.

    `width` is what they take in shared memory, registers and products: at the least `head_dim`. What is left beside
    the widest panels is made of one or more panels alike if there may be no more than `two_widths`.
    """

    head_dim: int
    parts: int = 1
    two_widths: bool = False

    @property
    def width(self) -> int:
        return round_up(self.head_dim, CONTRACTED * self.parts)

    @property
    def part_width(self) -> int:
        return self.width // self.parts

    def narrowed(self, width: int) -> Columns:
        """So many columns that lie in the same manner."""
        return dataclasses.replace(self, head_dim=width, parts=1)

    def panels(self, dtype: Any) -> tuple[Panel, ...]:
        """Those of a part: as many of the widest as there is room for, and what is left in narrower ones."""
        made, first = [], 0
        for width in self._widths(jnp.dtype(dtype).itemsize):
            while self.part_width - first >= width:
                made.append(Panel(first, width, swizzled=width))
                first += width
        return tuple(made)

    def _widths(self, itemsize: int) -> list[int]:
        widths = [swizzle // itemsize for swizzle in SWIZZLES]
        left = self.part_width % widths[0]
        return [widths[0], next(w for w in widths if left % w == 0)] if self.two_widths else widths

    @property
    def row_step(self) -> int:
        """Copies begin at a row of an array that is a multiple of it."""
        return 1

    def copies(self, dtype: Any) -> int:
        """How many copies make a tile: each is an arrival."""
        return self.parts * len(self.panels(dtype))

    def scratch(self, lead: Sequence[int], rows: int, dtype: Any) -> Any:
        """Shared memory for `lead` tiles of `rows` rows, panel by panel: as TMA takes it, and as wgmma does."""
        return [plgpu.RefUnion(*views) for views in zip(*self.views(lead, rows, dtype), strict=True)]

    def views(self, lead: Sequence[int], rows: int, dtype: Any) -> list[Any]:
        """What `scratch` is a union of: for a union with something else, whose refs go to `tiles_of_views`."""
        by_rows, by_tiles = [], []
        for panel in self.panels(dtype):
            shape, swizzle = (*lead, self.parts, rows, panel.width), panel.width * jnp.dtype(dtype).itemsize
            by_rows.append(plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(swizzle),)))
            by_tiles.append(plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, swizzle)))
        return [by_rows, by_tiles]

    def place(self, part: Any) -> Any:
        """Of a part, as tiles want it."""
        return part

    def tiles(self, refs: Any) -> Tiles | WholeTiles:
        """What `scratch` has been given."""
        return Tiles(self, tuple(refs))

    def tiles_of_views(self, refs: Sequence[Any]) -> Tiles | WholeTiles:
        """What `views` have been given."""
        return self.tiles(zip(*refs, strict=True))


@dataclasses.dataclass(frozen=True)
class WholeColumns(Columns):
    """The columns of a head that a single copy takes and a single product goes over."""

    def panels(self, dtype: Any) -> tuple[Panel, ...]:
        return (Panel(0, self.part_width, self._swizzle(dtype) // jnp.dtype(dtype).itemsize),)

    def _swizzle(self, dtype: Any) -> int:
        return min(SWIZZLE, self.part_width * jnp.dtype(dtype).itemsize)

    @property
    def row_step(self) -> int:
        return TILE_ROWS

    def copies(self, dtype: Any) -> int:
        return 1

    def scratch(self, lead: Sequence[int], rows: int, dtype: Any) -> Any:
        return plgpu.SMEM((*lead, rows, self.width), dtype, transforms=swizzled(dtype, self._swizzle(dtype)))

    def views(self, lead: Sequence[int], rows: int, dtype: Any) -> list[Any]:
        return [self.scratch(lead, rows, dtype)]

    def place(self, part: Any) -> Any:
        return pl.ds(part * self.part_width, self.part_width) if self.parts > 1 else slice(None)

    def tiles(self, refs: Any) -> WholeTiles:
        return WholeTiles(self, refs)

    def tiles_of_views(self, refs: Sequence[Any]) -> WholeTiles:
        return self.tiles(refs[0])


def columns_of(
    head_dim: int, dtype: Any, lengths: Sequence[tuple[int, int]], parts: int = 1, two_widths: bool = False
) -> Columns:
    """Of arrays with `lengths`: how many rows each has, and how many a program takes.

    An axis of a single tile is dropped from TMA's descriptor, and copies past its end would not be clipped: there is
    room for a program's rows in an array whose columns are whole.
    """
    divided = head_dim * jnp.dtype(dtype).itemsize % (SWIZZLE * parts) == 0
    whole = divided and all(length % 8 == 0 and length >= rows for length, rows in lengths)
    return WholeColumns(head_dim, parts) if whole else Columns(head_dim, parts, two_widths)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of a head in shared memory, [..., rows, head_dim]: for each panel of a part, by rows and by tiles of 8."""

    of: Columns
    refs: tuple[tuple[Any, Any], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return self.of.panels(self.refs[0][0].dtype)

    @property
    def lead(self) -> tuple[int, ...]:
        return self.refs[0][0].shape[:-3]

    def at(self, *index: Any) -> Tiles:
        return dataclasses.replace(self, refs=tuple((rows.at[index], tiles.at[index]) for rows, tiles in self.refs))

    def rows(self, start: int, size: int) -> Tiles:
        """Some rows of a single tile: from a multiple of 8 on, where a swizzle begins."""
        return self.at(slice(None), pl.ds(start, size))

    def part(self, place: Any) -> list[tuple[Panel, Any]]:
        """The panels of a part, of a single tile, as wgmma reads them and registers are stored."""
        return [(panel, tiles.at[place]) for panel, (_, tiles) in zip(self.panels, self.refs, strict=True)]

    def whole(self) -> list[tuple[Panel, Any]]:
        """All panels of a single tile, with their place in the whole head."""
        placed = [(part * self.of.part_width, *panel) for part in range(self.of.parts) for panel in self.part(part)]
        return [(dataclasses.replace(panel, first=first + panel.first), ref) for first, panel, ref in placed]

    def _copies(self, array: Any, at: tuple[Any, ...], start: Any) -> list[tuple[Any, Any]]:
        # Where columns begin is a value of the kernel: if it were known, they would have to end inside the array.
        parts = [(start + part * self.of.part_width, part) for part in range(self.of.parts)]
        panels = [(first + p.first, p.width, rows.at[part]) for first, part in parts for p, rows in self._by_rows()]
        return [(array.at[(*at, pl.ds(first, width))], ref) for first, width, ref in panels]

    def _by_rows(self) -> list[tuple[Panel, Any]]:
        return [(panel, rows) for panel, (rows, _) in zip(self.panels, self.refs, strict=True)]

    def fetch(self, array: Any, at: tuple[Any, ...], arrived: Any, first_column: Any = None) -> None:
        """Copy rows of an array to a single tile. `at` is where they lie, but for the columns.

        These are the array's, or begin at `first_column`, a value of the kernel.
        """
        for source, panel in self._copies(array, at, at[0] * 0 if first_column is None else first_column):
            plgpu.copy_gmem_to_smem(source, panel, arrived)

    def store(self, value: Any, place: Any = 0) -> None:
        """What a warpgroup has in registers, [rows, part_width], to a part of a single tile."""
        for panel, ref in self.part(place):
            ref[...] = value[:, panel.columns]

    def store_whole(self, value: Any) -> None:
        for panel, ref in self.whole():
            ref[...] = value[:, panel.columns]

    def send(self, array: Any, at: tuple[Any, ...], first_column: Any = 0, **how: Any) -> None:
        """Copy a single tile to rows of an array, whose columns there begin at `first_column`."""
        for target, panel in self._copies(array, at, at[0] * 0 + first_column):
            plgpu.copy_smem_to_gmem(panel, target, **how)


@dataclasses.dataclass(frozen=True)
class WholeTiles:
    """The same with all columns in one panel, which lies in tiles of 8 rows for TMA too."""

    of: Columns
    ref: Any

    @property
    def lead(self) -> tuple[int, ...]:
        return self.ref.shape[:-2]

    def at(self, *index: Any) -> WholeTiles:
        return dataclasses.replace(self, ref=self.ref.at[index])

    def rows(self, start: int, size: int) -> WholeTiles:
        return self.at(pl.ds(start, size))

    def part(self, place: Any) -> list[tuple[Panel, Any]]:
        mine = self.ref if self.of.parts == 1 else self.ref.at[:, place]
        return [(panel, mine) for panel in self.of.panels(self.ref.dtype)]

    def whole(self) -> list[tuple[Panel, Any]]:
        return [(dataclasses.replace(p, width=self.of.width), self.ref) for p in self.of.panels(self.ref.dtype)]

    def fetch(self, array: Any, at: tuple[Any, ...], arrived: Any, first_column: Any = None) -> None:
        columns = () if first_column is None else (pl.ds(first_column, self.of.width),)
        plgpu.copy_gmem_to_smem(array.at[(*at, *columns)], self.ref, arrived)

    def store(self, value: Any, place: Any = 0) -> None:
        ((_, ref),) = self.part(place)
        ref[...] = value

    def store_whole(self, value: Any) -> None:
        self.ref[...] = value

    def send(self, array: Any, at: tuple[Any, ...], first_column: Any = 0, **how: Any) -> None:
        plgpu.copy_smem_to_gmem(self.ref, array.at[(*at, pl.ds(first_column, self.of.width))], **how)


def multiply(acc: Any, left: Any, panels: Sequence[tuple[Panel, Any]]) -> None:
    """acc[:, columns] += left @ panel, for panels that make up the columns of `acc`.

    What is on the left is in registers, or in shared memory once for every swizzle of a panel, in a dictionary: both
    sides of a product are swizzled alike.
    """
    for panel, right in panels:
        whole = panel.width == acc.shape[1]
        a = left[panel.swizzled] if isinstance(left, dict) else left
        plgpu.wgmma(acc if whole else acc.at[:, panel.columns], a, right)


def contract(acc: Any, left: Sequence[tuple[Panel, Any]], right: Sequence[tuple[Panel, Any]]) -> None:
    """acc += left @ right.T, over the columns of both."""
    for (_, a), (_, b) in zip(left, right, strict=True):
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
