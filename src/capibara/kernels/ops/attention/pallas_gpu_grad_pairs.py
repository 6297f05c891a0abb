"""Pairs of key and query in the Hopper backward kernel: who sees whom, what dropout leaves, and their gradients.

What a call does not ask for leaves no trace in its program: every form is a branch taken while tracing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention import pallas_gpu_tile as tiles
from capibara.kernels.ops.attention.pallas_gpu_grad_operands import WORD
from capibara.kernels.ops.attention.pallas_gpu_grad_steps import Steps
from capibara.kernels.ops.attention.pallas_gpu_grad_walk import Walk
from capibara.kernels.ops.attention.pallas_gpu_tile import Tile
from capibara.kernels.pallas.hopper import load

ROWS = 64  # keys of a tile of pairs: the rows of one wgmma


def scratch(steps: Steps, refs: dict[str, Any]) -> dict[str, Any]:
    """Shared memory for lines that a plain call does not have, by name."""
    stages, block_q = steps.config.stages, steps.block_q
    made = {}
    if "q_segments" in refs:
        made["q_segments"] = plgpu.SMEM((stages, block_q), jnp.int32)
        made["kv_segments"] = plgpu.SMEM((steps.tile,), jnp.int32)
    if "row_keys" in refs:
        made["row_keys"] = plgpu.SMEM((stages, 2, block_q), jnp.int32)
    if "mask" in refs:
        made["mask"] = plgpu.SMEM((stages, mask_lines(steps, refs), steps.tile), jnp.int32)
    return made


def mask_lines(steps: Steps, refs: dict[str, Any]) -> int:
    """Numbers a key that hold what a step of queries may see of it."""
    return 1 if refs["mask"].shape[2] == 1 else steps.block_q // WORD


def arrivals(steps: Steps, refs: dict[str, Any]) -> tuple[int, int]:
    """How many lines come once for a program's keys, and how many with each step's queries, beyond a plain call's."""
    segments = int("q_segments" in refs)
    row_keys = 2 if "row_keys" in refs else 0
    return segments, segments + row_keys + (mask_lines(steps, refs) if "mask" in refs else 0)


class Pairs:
    """A tile of a warpgroup's 64 keys, from `my_first_key` on, by a step's queries."""

    def __init__(self, walk: Walk, refs: dict[str, Any], smem: dict[str, Any]) -> None:
        self.walk, self.steps, self.refs, self.smem = walk, walk.steps, refs, smem
        self.tile = Tile(self.steps.block_q, ROWS, transposed=True)

    @property
    def masks(self) -> bool:
        """Whether some step may see the program's keys in part."""
        steps = self.steps
        by_position = steps.left is not None or steps.right is not None or steps.keys % steps.tile != 0
        return by_position or "q_segments" in self.refs or "mask" in self.refs

    def fetch_keys(self, arrived: Any) -> None:
        if "q_segments" in self.refs:
            line = self.refs["kv_segments"].at[self.walk.batch, pl.ds(self.walk.first_key, self.steps.tile)]
            plgpu.copy_gmem_to_smem(line, self.smem["kv_segments"], arrived)

    def lines(self, rows: Any, head: Any, slot: Any) -> list[tuple[Any, Any]]:
        """(from, to) of the lines that come with a step's queries, beyond a plain call's."""
        refs, smem, walk = self.refs, self.smem, self.walk
        made = []
        if "q_segments" in refs:
            made.append((refs["q_segments"].at[walk.batch, rows], smem["q_segments"].at[slot]))
        if "row_keys" in refs:
            made += [(refs["row_keys"].at[n, walk.batch, head, rows], smem["row_keys"].at[slot, n]) for n in range(2)]
        if "mask" in refs:
            at, keys = walk.shared(refs["mask"], head), pl.ds(walk.first_key, self.steps.tile)
            count = mask_lines(self.steps, refs)
            first = 0 if refs["mask"].shape[2] == 1 else lax.div(rows.start, WORD)
            made += [(refs["mask"].at[(*at, first + n, keys)], smem["mask"].at[slot, n]) for n in range(count)]
        return made

    def hide_unseen(self, my_first_key: Any, *blocks: Any) -> None:
        """Clear what nobody may see in a block of keys or values; the table says whether the program has any."""
        if "visible" not in self.refs:
            return
        visible, walk = self.refs["visible"], self.walk

        def seen(start: int, size: int, layout: Any) -> Any:
            at = (*walk.shared(visible, walk.kv_head), pl.ds(my_first_key + start, size))
            return tiles.load(visible.at[at], layout) != 0

        @pl.when(walk.read(2) != 0)
        def _() -> None:
            for block in blocks:
                tiles.zero_unseen(block, seen)

    def allowed(self, my_first_key: Any, first_row: Any, slot: Any) -> Any:
        """Which pairs see each other, keys by queries."""
        tile, smem = self.tile, self.smem
        seen = self.steps.visible(my_first_key, first_row, tile.shape)
        if not self.smem:
            return seen
        own = pl.ds(my_first_key - self.walk.first_key, ROWS)
        if "q_segments" in self.refs:
            of_queries = load(smem["q_segments"].at[slot], tile.row_layout)
            of_keys = load(smem["kv_segments"].at[own], tile.column_layout)
            seen = seen & tiles.same_segment(tile, of_queries, of_keys)
        if "mask" in self.refs:
            count = mask_lines(self.steps, self.refs)
            words = [tile.spread_columns(load(smem["mask"].at[slot, n, own], tile.column_layout)) for n in range(count)]
            bits = words[0]
            if self.refs["mask"].shape[2] > 1:
                query = tile.row_numbers(0)
                for n in range(1, count):
                    bits = jnp.where(query >= n * WORD, words[n], bits)
                bits = lax.shift_right_logical(bits, query & (WORD - 1)) & 1
            seen = seen & (bits != 0)
        return seen

    def dropped(self, p: Any, my_first_key: Any, slot: Any) -> Any:
        """Probabilities with a minus before those that dropout drops: one number tells both."""
        if not self.steps.dropout_rate:
            return p
        words = tuple(load(self.smem["row_keys"].at[slot, n], self.tile.row_layout) for n in range(2))
        kept = tiles.dropout_keeps(self.tile, words, my_first_key, self.steps.dropout_rate)
        return jnp.where(kept, p, -p)

    def weights(self, p: Any) -> Any:
        """What multiplies the values, but for the factor that makes up for dropout; from `dropped`."""
        return jnp.maximum(p, 0.0) if self.steps.dropout_rate else p

    def d_scores(self, p: Any, dp: Any, delta: Any) -> Any:
        """p (dp keep / (1 - rate) - delta), from `dropped`."""
        delta = lax.broadcast_in_dim(delta, p.shape, [1])
        if not self.steps.dropout_rate:
            return p * (dp - delta)
        return p * jnp.where(p > 0, dp * self.steps.upscale - delta, delta)

    def d_values(self, dv: Any) -> Any:
        return dv * self.steps.upscale if self.steps.dropout_rate else dv
