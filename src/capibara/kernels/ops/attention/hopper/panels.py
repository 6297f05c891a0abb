"""Heads in shared memory: their columns in panels, which TMA fills from arrays of any length and head size.

A panel is as wide as a swizzle: 128, 64 or 32 bytes. It has the same bytes in it whether its rows are taken one by
one, as TMA copies them, or in tiles of 8, as wgmma reads them; only the tiles would ask an array for a length that is
a multiple of 8. Copies are clipped at the ends of the array, rows and columns: what lies past them is read as zeros,
and is not written. So no array is padded, but for rows that do not start at multiples of 16 bytes, which TMA does not
take.
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
SWIZZLES = (SWIZZLE, SWIZZLE // 2, SWIZZLE // 4)  # bytes


def aligned(head_dim: int, dtype: Any) -> int:
    """The columns of an array whose rows start where TMA takes them."""
    return round_up(head_dim, 16 // jnp.dtype(dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Panel:
    """Columns `first` to `first + width` of a part."""

    first: int
    width: int

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

    def panels(self, dtype: Any) -> tuple[Panel, ...]:
        """Those of a part: as many of the widest as there is room for, and what is left in narrower ones."""
        made, first = [], 0
        for width in self._widths(jnp.dtype(dtype).itemsize):
            while self.part_width - first >= width:
                made.append(Panel(first, width))
                first += width
        return tuple(made)

    def _widths(self, itemsize: int) -> list[int]:
        widths = [swizzle // itemsize for swizzle in SWIZZLES]
        left = self.part_width % widths[0]
        return [widths[0], next(w for w in widths if left % w == 0)] if self.two_widths else widths

    def copies(self, dtype: Any) -> int:
        """How many copies make a tile: each is an arrival."""
        return self.parts * len(self.panels(dtype))

    def scratch(self, lead: Sequence[int], rows: int, dtype: Any) -> list[Any]:
        """Shared memory for `lead` tiles of `rows` rows, panel by panel: as TMA takes it, and as wgmma does."""
        specs = []
        for panel in self.panels(dtype):
            shape, swizzle = (*lead, self.parts, rows, panel.width), panel.width * jnp.dtype(dtype).itemsize
            by_rows = plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(swizzle),))
            specs.append(plgpu.RefUnion(by_rows, plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, swizzle))))
        return specs

    def tiles(self, refs: Sequence[tuple[Any, Any]]) -> Tiles:
        """What `scratch` has been given."""
        return Tiles(self, tuple(refs))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of a head in shared memory, [..., rows, head_dim]: for each panel of a part, by rows and by tiles of 8."""

    of: Columns
    refs: tuple[tuple[Any, Any], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return self.of.panels(self.refs[0][0].dtype)

    def at(self, *index: Any) -> Tiles:
        return dataclasses.replace(self, refs=tuple((rows.at[index], tiles.at[index]) for rows, tiles in self.refs))

    def part(self, number: Any) -> list[tuple[Panel, Any]]:
        """The panels of a part, of a single tile, as wgmma reads them and registers are stored."""
        return [(panel, tiles.at[number]) for panel, (_, tiles) in zip(self.panels, self.refs, strict=True)]

    def whole(self) -> list[tuple[Panel, Any]]:
        """All panels of a single tile, with their place in the whole head."""
        placed = [(part * self.of.part_width, *panel) for part in range(self.of.parts) for panel in self.part(part)]
        return [(Panel(first + panel.first, panel.width), ref) for first, panel, ref in placed]

    def _copies(self, array: Any, at: tuple[Any, ...], part: Any, first_column: Any) -> list[tuple[Any, Any]]:
        # Where columns begin is a value of the kernel: if it were known, they would have to end inside the array.
        start = at[0] * 0 + first_column + part * self.of.part_width
        pairs = zip(self.panels, self.refs, strict=True)
        return [(array.at[(*at, pl.ds(start + p.first, p.width))], rows.at[part]) for p, (rows, _) in pairs]

    def fetch(self, array: Any, at: tuple[Any, ...], arrived: Any) -> None:
        """Copy rows of an array to a single tile. `at` is where they lie, but for the columns."""
        for part in range(self.of.parts):
            for source, panel in self._copies(array, at, part, 0):
                plgpu.copy_gmem_to_smem(source, panel, arrived)

    def store(self, value: Any, part: Any = 0) -> None:
        """What a warpgroup has in registers, [rows, part_width], to a part of a single tile."""
        for panel, ref in self.part(part):
            ref[...] = value[:, panel.columns]

    def store_whole(self, value: Any) -> None:
        for panel, ref in self.whole():
            ref[...] = value[:, panel.columns]

    def send(self, array: Any, at: tuple[Any, ...], part: Any = 0, first_column: Any = 0, **how: Any) -> None:
        """Copy a part of a single tile to rows of an array, whose columns there begin at `first_column`."""
        for target, panel in self._copies(array, at, part, first_column):
            plgpu.copy_smem_to_gmem(panel, target, **how)


def multiply(acc: Any, left: Any, panels: Sequence[tuple[Panel, Any]]) -> None:
    """acc[:, columns] += left @ panel, for panels that make up the columns of `acc`.

    What is on the left is in registers, or in shared memory once for every width of a panel, in a dictionary: both
    sides of a product are swizzled alike.
    """
    for panel, right in panels:
        whole = panel.width == acc.shape[1]
        a = left[panel.width] if isinstance(left, dict) else left
        plgpu.wgmma(acc if whole else acc.at[:, panel.columns], a, right)


def contract(acc: Any, left: Sequence[tuple[Panel, Any]], right: Sequence[tuple[Panel, Any]]) -> None:
    """acc += left @ right.T, over the columns of both."""
    for (_, a), (_, b) in zip(left, right, strict=True):
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
