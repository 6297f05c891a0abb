"""Who sees whom, for the Hopper kernels: tables of live blocks that XLA makes, and rules on tiles in registers.

Where operands decide which blocks are live (a block mask, segments, a mask), a kernel walks a table instead of a
range. The table names the blocks to compute, those that are seen whole first: so the kernel runs one loop without a
mask and then one with it. Dead blocks are not in the table, and cost nothing.

Rows count queries and columns count keys, whichever way round a tile is held: [queries, keys] as the forward pass
multiplies it, or transposed, [keys, queries], as the backward pass does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention.masking import FAR, both, by_position
from capibara.kernels.pallas import hopper, prng

LAYOUT = plgpu.Layout.WGMMA
WHOLE, PARTIAL, DEAD = 0, 1, 2  # kinds of blocks, in the order in which a table lists them

load = functools.partial(hopper.load, optimized=False)  # most of what is loaded here is bytes and single numbers


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


# Blocks of a head's scores: what XLA prepares.


@dataclasses.dataclass(frozen=True)
class Band:
    """Row i sees columns i + below to i + above (FAR: no limit), of `columns` that exist."""

    below: int
    above: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Grid:
    """The scores of one head cut into blocks of block_q queries by block_k keys."""

    rows: int
    band: Band
    block_q: int
    block_k: int

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks of queries, and of keys."""
        return -(-self.rows // self.block_q), -(-self.band.columns // self.block_k)

    @property
    def seen(self) -> tuple[int, int]:
        """The columns (first, end) that some row may see by position."""
        band = self.band
        first = 0 if band.below == -FAR else min(max(band.below, 0), band.columns)
        end = band.columns if band.above == FAR else min(max(self.rows + band.above, 0), band.columns)
        return first, max(first, end)

    @property
    def splits_a_block(self) -> bool:
        """Whether position alone leaves keys that nobody sees in a block with keys that somebody sees."""
        first, end = self.seen
        return bool(first % self.block_k or (end < self.band.columns and end % self.block_k))

    def kinds_by_position(self) -> jax.Array:
        """WHOLE, PARTIAL or DEAD for each block, [blocks of queries, blocks of keys]."""
        q_blocks, k_blocks = (jnp.arange(n) for n in self.counts)
        band = self.band
        first_row, first = q_blocks[:, None] * self.block_q, k_blocks[None, :] * self.block_k
        last_row = jnp.minimum(first_row + self.block_q, self.rows) - 1
        last = jnp.minimum(first + self.block_k, band.columns) - 1
        # The least and greatest column - row inside the block, against the band that may be seen.
        least, most = first - last_row, last - first_row
        dead = (least > band.above) | (most < band.below)
        whole = (most <= band.above) & (least >= band.below) & (first + self.block_k <= band.columns)
        return jnp.where(dead, DEAD, jnp.where(whole, WHOLE, PARTIAL))

    def kinds(self, mask: Any, q_segments: Any, kv_segments: Any, block_mask: Any, block_size: Any) -> jax.Array:
        """The same by every rule at once, [B|1, H|1, blocks of queries, blocks of keys]."""

        def refine(kinds: jax.Array, *, dead: jax.Array, whole: jax.Array) -> jax.Array:
            return jnp.where(dead, DEAD, jnp.where(whole | (kinds == DEAD), kinds, PARTIAL))

        kinds = self.kinds_by_position()[None, None]
        if q_segments is not None:
            q_low, q_high = (x[:, None, :, None] for x in _segment_range(q_segments, self.block_q))
            kv_low, kv_high = (x[:, None, None, :] for x in _segment_range(kv_segments, self.block_k))
            apart = (q_low > kv_high) | (kv_low > q_high)
            same = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
            kinds = refine(kinds, dead=apart, whole=same)
        if mask is not None:
            some, every = some_and_every(mask, (self.block_q if mask.shape[2] > 1 else 1, self.block_k))
            kinds = refine(kinds, dead=~some, whole=every)
        if block_mask is not None:
            q_blocks, k_blocks = self.counts
            at = (
                jnp.arange(q_blocks) * self.block_q // block_size[0],
                jnp.arange(k_blocks) * self.block_k // block_size[1],
            )
            alive = jnp.take(jnp.take(block_mask, at[0], axis=2), at[1], axis=3)
            kinds = jnp.where(alive, kinds, DEAD)
        return kinds

    def visible_keys(self, mask: Any, q_segments: Any, kv_segments: Any, params: Any) -> jax.Array | None:
        """[B|1, H|1, keys]: whether some query of the head may see the key; None where position alone decides.

        A mask is taken together with position and segments. Without one, a key is seen that lies in some row's band
        and whose segment some query has.
        """
        if mask is None and q_segments is None:
            return None
        columns = jnp.arange(self.band.columns)
        first, end = self.seen
        if mask is not None and mask.shape[2] > 1:
            rows = jnp.arange(self.rows)[:, None]
            allowed = both(
                mask, by_position(rows, columns[None, :], params["causal"], params["q_offset"], params["window"])
            )
            if q_segments is not None:
                allowed = allowed & (q_segments[:, None, :, None] == kv_segments[:, None, None, :])
            return allowed.any(2)
        seen = ((columns >= first) & (columns < end))[None, None]
        if mask is not None:
            seen = seen & mask[:, :, 0]
        if q_segments is not None:
            # Every pair is compared, but once for all heads and without being stored.
            seen = seen & (kv_segments[:, :, None] == q_segments[:, None, :]).any(-1)[:, None]
        return seen


def _segment_range(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest segment of each block, [B, blocks]; the last block may be short."""
    batch, length = segments.shape
    padded = jnp.pad(segments, ((0, 0), (0, round_up(length, block) - length)), mode="edge")
    blocks = padded.reshape(batch, -1, block)
    return blocks.min(-1), blocks.max(-1)


def some_and_every(mask: jax.Array, size: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Whether some and whether every pair of each block of a mask [B|1, H|1, T|1, S] is allowed."""
    batch, heads, rows, columns = mask.shape
    long = round_up(rows, size[0]), round_up(columns, size[1])
    widths = ((0, 0), (0, 0), (0, long[0] - rows), (0, long[1] - columns))

    def in_blocks(fill: bool) -> jax.Array:
        padded = jnp.pad(mask, widths, constant_values=fill)
        return padded.reshape(batch, heads, long[0] // size[0], size[0], long[1] // size[1], size[1])

    return in_blocks(False).any((3, 5)), in_blocks(True).all((3, 5))


def pad_to(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Zeros at the end of each axis up to `sizes` (0: as it is)."""
    widths = [(0, max(size - n, 0)) for n, size in zip(x.shape, sizes, strict=True)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def pad_to_blocks(x: jax.Array, block: int) -> jax.Array:
    """One number a query or a key, [..., length], padded to whole blocks: plain loads do not stop at the end."""
    return pad_to(x, (*(0,) * (x.ndim - 1), round_up(x.shape[-1], block)))


def laid_out(x: jax.Array, physical: str) -> jax.Array:
    """[B, H, T, D] as it lies in memory, and back again."""
    return x if physical == "bhtd" else x.swapaxes(1, 2)


# Tiles of scores in a warpgroup's registers. A tile's place in the operands is its first row and first column, values
# of the kernel.


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

    def row_numbers(self, first: Any) -> Any:
        """The row of each pair."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, self._axes[0], layout=LAYOUT) + first

    def column_numbers(self, first: Any) -> Any:
        return plgpu.broadcasted_iota(jnp.int32, self.shape, self._axes[1], layout=LAYOUT) + first

    def spread_rows(self, x: Any) -> Any:
        """One value a query, over the tile."""
        return lax.broadcast_in_dim(x, self.shape, [self._axes[0]])

    def spread_columns(self, x: Any) -> Any:
        return lax.broadcast_in_dim(x, self.shape, [self._axes[1]])

    def same_segment(self, of_queries: Any, of_keys: Any) -> Any:
        """Whether the segment of the query [rows] is the key's [columns]."""
        return self.spread_rows(of_queries) == self.spread_columns(of_keys)

    def dropout_keeps(self, row_keys: Any, first_column: Any, rate: float) -> Any:
        """Which pairs dropout keeps: the bits of every other implementation."""
        columns = plgpu.broadcasted_iota(jnp.int32, (self.columns,), 0, layout=self.column_layout) + first_column
        keys = tuple(self.spread_rows(word) for word in row_keys)
        return prng.kept(prng.random_bits(keys, self.spread_columns(columns)), rate)


def zero_unseen(panels: Sequence[Any], seen: Callable[[int, int, Any], Any]) -> None:
    """Put rows of a block of values in shared memory, panels of [keys, columns], to zero where nobody sees the key.

    A probability of zero times NaN is NaN. `seen(start, rows, layout)` tells for `rows` keys from `start` of the block
    on. Two warpgroups may do this to one block at once: both write the same.
    """
    for start in range(0, panels[0].shape[0], 64):
        rows = seen(start, 64, LAYOUT.reduce(1))
        for panel in panels:
            width = min(panel.shape[1], 64)  # at a time: few registers are free
            for column in range(0, panel.shape[1], width):
                piece = panel.at[start : start + 64, column : column + width]
                x = load(piece, LAYOUT, optimized=True)
                piece[...] = jnp.where(lax.broadcast_in_dim(rows, x.shape, [0]), x, jnp.zeros_like(x))
    plgpu.commit_smem()
