"""Where a program of the Hopper attention kernel is, and the blocks of keys it goes through."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from capibara.kernels.ops.attention.masking import FAR
from capibara.kernels.ops.attention.pallas_gpu_blocks import COUNTS, Grid
from capibara.kernels.ops.attention.pallas_gpu_config import HopperConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static that the body knows of a call."""

    config: HopperConfig
    grid: Grid
    batch: int
    heads: int
    group: int  # query heads of one key head
    scale: float
    softcap: float | None
    dropout_rate: float
    heads_first: bool  # [batch, heads, length, head_dim] in memory; else the length comes before the heads
    folded: bool  # a bias of minus infinity stands for a mask

    @property
    def tiles(self) -> int:
        """Tiles of queries of all heads."""
        return self.batch * self.grid.counts[0] * self.heads

    @property
    def launch(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The kernel's grid: a program for each tile, or as many as run at a time, which go over the tiles."""
        if self.config.programs:
            return (min(self.config.programs, self.tiles),), ("program",)
        names = tuple(self.config.order.split())
        return tuple(self.sizes[name] for name in names), names

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch": self.batch, "head": self.heads, "tile": self.grid.counts[0]}

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """(batch, head, tile) of the number-th tile."""
        found = {}
        for name in reversed(self.config.order.split()):
            rest = lax.div(number, number * 0 + self.sizes[name])
            found[name] = number - rest * self.sizes[name]
            number = rest
        return found["batch"], found["head"], found["tile"]


class Walk:
    """A tile's place, and its steps: `begin` to `end` of a range of blocks, or of a table of them.

    `done` counts the blocks that the program has fetched for the tiles before this one.
    """

    def __init__(self, plan: Plan, refs: dict[str, Any], place: tuple[Any, Any, Any], done: Any = 0) -> None:
        self.plan, self.done = plan, done
        grid, block_k, band = plan.grid, plan.config.block_k, plan.grid.band
        self.batch, self.head, tile = place
        if band.above != FAR:  # later rows see more keys: the longest programs go first
            tile = grid.counts[0] - 1 - tile
        self.tile = tile
        self.first_row = tile * plan.config.tile
        # Bounds are values of the kernel even where they are constants: newer Mosaic refuses loops over literals.
        self.zero = tile * 0
        self.table: Any = refs.get("table")
        if self.table is not None:
            self.begin = self.zero
            self.end = self._read(1)
            return
        # Blocks of keys that some row of the program sees.
        columns = band.columns
        self.begin = self.zero if band.below == -FAR else lax.max(self.first_row + band.below, 0) // block_k
        end_key = self.zero + columns
        if band.above != FAR:
            end_key = lax.min(self.first_row + plan.config.tile + band.above, columns)
        self.end = lax.max(lax.div(end_key + block_k - 1, block_k), self.begin)

    def shared(self, ref: Any) -> tuple[Any, Any]:
        """The batch and head of an operand that may have one of either for all."""
        return self.batch if ref.shape[0] > 1 else 0, self.head if ref.shape[1] > 1 else 0

    def at(self, head: Any, rows: Any) -> tuple[Any, ...]:
        """Rows of one head in an operand that lies as the queries do."""
        return (self.batch, head, rows) if self.plan.heads_first else (self.batch, rows, head)

    def _read(self, place: Any) -> Any:
        return self.table[(*self.shared(self.table), self.tile, place)]

    def entry(self, step: Any) -> Any:
        """What `block` and `unseen` read: the table's entry, or the step itself."""
        return step if self.table is None else self._read(COUNTS + step)

    def block(self, entry: Any) -> Any:
        return entry if self.table is None else lax.shift_right_logical(entry, jnp.ones_like(entry))

    def count(self, step: Any) -> Any:
        """How many blocks the program has fetched before this step."""
        return self.done + step - self.begin

    def slot(self, step: Any) -> Any:
        return lax.rem(self.count(step), self.plan.config.stages)

    def whole(self, start: Any) -> tuple[Any, Any]:
        """The steps (first, end) whose blocks every row of the warpgroup from `start` on sees whole."""
        if self.table is not None:
            return self.begin, self._read(0)
        config, band = self.plan.config, self.plan.grid.band
        first, end = self.begin, self.zero + band.columns // config.block_k
        if band.above != FAR:
            end = lax.min(end, lax.max(start + band.above + 1, 0) // config.block_k)
        if band.below != -FAR:
            last_row_edge = lax.max(start + config.block_q - 1 + band.below, 0)
            first = lax.div(last_row_edge + config.block_k - 1, config.block_k)
        first = lax.clamp(self.begin, first, self.end)
        return first, lax.clamp(first, end, self.end)
