"""From raw products to exponents of two: bias, soft cap, masks and dropout on a tile of the Hopper attention kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention import pallas_gpu_tile as tiles
from capibara.kernels.ops.attention.masking import FAR
from capibara.kernels.ops.attention.pallas_gpu_blocks import UNSEEN
from capibara.kernels.ops.attention.pallas_gpu_tile import Tile, load
from capibara.kernels.ops.attention.pallas_gpu_walk import Plan, Walk
from capibara.kernels.pallas.hopper import LOG2E


class Scores:
    """From raw products to exponents of two: bias, soft cap, masks, dropout, for one warpgroup's rows."""

    def __init__(self, plan: Plan, refs: dict[str, Any], walk: Walk, start: Any) -> None:
        self.plan, self.refs, self.walk, self.start = plan, refs, walk, start
        self.tile = Tile(plan.config.block_q, plan.config.block_k)
        if "q_segments" in refs:
            own = refs["q_segments"].at[walk.batch, pl.ds(start, self.tile.rows)]
            self.segments = load(own, self.tile.row_layout)
        if plan.dropout_rate:
            first = (walk.batch * plan.heads + walk.head) * plan.grid.rows + start
            self.row_keys = tiles.dropout_row_keys(self.tile, refs["seed"], first)

    @property
    def masks_last(self) -> bool:
        """Whether blocks that are seen in part may come after the whole ones."""
        band = self.plan.grid.band
        if self.walk.table is not None and band.below != -FAR:
            return True
        by_pairs = any(name in self.refs for name in ("q_segments", "mask_tile", "mask_row"))
        return by_pairs or band.above != FAR or band.columns % self.tile.columns != 0

    def _row(self, name: str, block: Any) -> Any:
        """One number a key of the block, over the tile."""
        ref = self.refs[name]
        at = (*self.walk.shared(ref), pl.ds(block * self.tile.columns, self.tile.columns))
        return self.tile.spread_columns(load(ref.at[at], self.tile.column_layout))

    def exponents(self, s: Any, block: Any, found: dict[str, Any], masked: bool) -> tuple[Any, float]:
        """(x, unit), unit > 0: x * unit are the exponents of two; `found` holds the mask's and the bias's tiles."""
        scale, softcap = self.plan.scale, self.plan.softcap
        if "bias_tile" in found or "bias_row" in self.refs:
            bias = found["bias_tile"] if "bias_tile" in found else self._row("bias_row", block)
            s, scale = s * scale + bias.astype(jnp.float32), 1.0
        unit = scale * LOG2E
        if softcap is not None:
            # tanh from an exponential, which the hardware has.
            s = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * scale * LOG2E / softcap)))
            unit = softcap * LOG2E
        if unit <= 0:  # the maximum is taken before the unit is applied, and minus infinity must stay what it is
            s, unit = s * unit, 1.0
        if masked:
            allowed = self._allowed(block, found)
            s = s if allowed is None else jnp.where(allowed, s, -jnp.inf)
        return s, unit

    def _allowed(self, block: Any, found: dict[str, Any]) -> Any:
        tile, first_column = self.tile, block * self.tile.columns
        placed = tiles.in_band(tile, self.start, first_column, self.plan.grid.band)
        rules = [] if placed is None else [placed]
        if "q_segments" in self.refs:
            others = self.refs["kv_segments"].at[self.walk.batch, pl.ds(first_column, tile.columns)]
            rules.append(tiles.same_segment(tile, self.segments, load(others, tile.column_layout)))
        if "mask_tile" in found:
            rules.append(found["mask_tile"] != 0)
        if self.plan.folded:  # by the bias itself: a soft cap has made its minus infinity finite
            rules.append(found["bias_tile"].astype(jnp.float32) != -jnp.inf)
        if "mask_row" in self.refs:
            rules.append(self._row("mask_row", block) != 0)
        return tiles.conjunction(rules)

    def dropped(self, p: Any, block: Any) -> Any:
        """The probabilities that dropout leaves; the rows' sums are taken before."""
        if not self.plan.dropout_rate:
            return p
        kept = tiles.dropout_keeps(self.tile, self.row_keys, block * self.tile.columns, self.plan.dropout_rate)
        return jnp.where(kept, p, 0.0)

    def zero_unseen(self, values: Any, entry: Any, block: Any) -> None:
        """Clear the values of keys that no query may see, in a block that has some."""
        grid, walk = self.plan.grid, self.walk
        first_column = block * self.tile.columns
        if "visible" in self.refs:
            visible = self.refs["visible"]

            def seen(start: int, size: int, layout: Any) -> Any:
                return load(visible.at[(*walk.shared(visible), pl.ds(first_column + start, size))], layout) != 0

            pl.when((entry & UNSEEN) != 0)(lambda: tiles.zero_unseen(values, seen))
        elif grid.splits_a_block:
            first, end = grid.seen

            def by_position(start: int, size: int, layout: Any) -> Any:
                column = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + (first_column + start)
                return (column >= first) & (column < end)

            unseen = (first_column < first) | (first_column + self.tile.columns > end)
            pl.when(unseen)(lambda: tiles.zero_unseen(values, by_position))
