"""What XLA prepares for the Hopper attention kernel: operands in whole tiles, and the table of live blocks.

Where operands decide which blocks are live (a block mask, segments, a mask), the kernel walks a table instead of a
range. For each tile of queries it names the blocks of keys to compute, those that every query sees whole first: so
the kernel runs one loop without a mask and then one with it. Dead blocks are not in the table, and cost nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.attention.masking import FAR, both, by_position
from capibara.kernels.ops.attention.pallas_gpu_config import HopperConfig, round_up
from capibara.kernels.ops.attention.pallas_gpu_tile import Band

WHOLE, PARTIAL, DEAD = 0, 1, 2  # in the order in which the table lists them
COUNTS = 2  # the table's first entries: how many blocks are whole, and how many are live
UNSEEN = 1  # the entry's flag for a block with keys that no query may see


@dataclasses.dataclass(frozen=True)
class Grid:
    """The kernel's tiles over the scores of one head."""

    rows: int
    band: Band
    tile: int
    block_k: int

    @property
    def counts(self) -> tuple[int, int]:
        return -(-self.rows // self.tile), -(-self.band.columns // self.block_k)

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

    def kinds(self) -> jax.Array:
        """WHOLE, PARTIAL or DEAD for each tile and block by position, [tiles, blocks]."""
        tiles, blocks = (jnp.arange(n) for n in self.counts)
        band = self.band
        first_row, first = tiles[:, None] * self.tile, blocks[None, :] * self.block_k
        last_row = jnp.minimum(first_row + self.tile, self.rows) - 1
        last = jnp.minimum(first + self.block_k, band.columns) - 1
        # The least and greatest column - row inside the tile, against the band that may be seen.
        least, most = first - last_row, last - first_row
        dead = (least > band.above) | (most < band.below)
        whole = (most <= band.above) & (least >= band.below) & (first + self.block_k <= band.columns)
        return jnp.where(dead, DEAD, jnp.where(whole, WHOLE, PARTIAL))


def pair_kinds(grid: Grid, mask: Any, q_segments: Any, kv_segments: Any, block_mask: Any, block_size: Any) -> jax.Array:
    """WHOLE, PARTIAL or DEAD for each tile and block by every rule at once, [B|1, H|1, tiles, blocks]."""
    kinds = grid.kinds()[None, None]
    if q_segments is not None:
        q_low, q_high = (x[:, None, :, None] for x in _block_range(q_segments, grid.tile))
        kv_low, kv_high = (x[:, None, None, :] for x in _block_range(kv_segments, grid.block_k))
        apart = (q_low > kv_high) | (kv_low > q_high)
        same = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
        kinds = _refine(kinds, dead=apart, whole=same)
    if mask is not None:
        some, every = _reduced(mask, (grid.tile if mask.shape[2] > 1 else 1, grid.block_k))
        kinds = _refine(kinds, dead=~some, whole=every)
    if block_mask is not None:
        tiles, blocks = grid.counts
        at = jnp.arange(tiles) * grid.tile // block_size[0], jnp.arange(blocks) * grid.block_k // block_size[1]
        alive = jnp.take(jnp.take(block_mask, at[0], axis=2), at[1], axis=3)
        kinds = jnp.where(alive, kinds, DEAD)
    return kinds


def table(
    grid: Grid, mask: Any, q_segments: Any, kv_segments: Any, block_mask: Any, block_size: Any, visible: Any
) -> jax.Array:
    """The live blocks of each tile of queries, int32 [B|1, H|1, tiles, COUNTS + blocks + 1].

    First the counts, then `block * 2 + flag` for each live block. One entry more than blocks: the kernel reads one
    ahead. `visible` [B|1, H|1, keys] is what flags the blocks with unseen keys.
    """
    kinds = pair_kinds(grid, mask, q_segments, kv_segments, block_mask, block_size)
    order = jnp.argsort(kinds, axis=-1, stable=True)
    entries = order * 2
    if visible is not None:
        _, every = _reduced(visible[:, :, None], (1, grid.block_k))
        flags = jnp.broadcast_to((~every).astype(order.dtype), jnp.broadcast_shapes(every.shape, order.shape))
        order = jnp.broadcast_to(order, flags.shape)
        entries = order * 2 + jnp.take_along_axis(flags, order, axis=-1) * UNSEEN
        kinds = jnp.broadcast_to(kinds, flags.shape)
    counts = [(kinds == WHOLE).sum(-1, keepdims=True), (kinds != DEAD).sum(-1, keepdims=True)]
    return jnp.concatenate([*counts, entries, jnp.zeros_like(counts[0])], axis=-1).astype(jnp.int32)


def _refine(kinds: jax.Array, *, dead: jax.Array, whole: jax.Array) -> jax.Array:
    return jnp.where(dead, DEAD, jnp.where(whole | (kinds == DEAD), kinds, PARTIAL))


def _block_range(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest segment of each block, [B, blocks]; the last block may be short."""
    batch, length = segments.shape
    padded = jnp.pad(segments, ((0, 0), (0, round_up(length, block) - length)), mode="edge")
    grouped = padded.reshape(batch, -1, block)
    return grouped.min(-1), grouped.max(-1)


def _reduced(mask: jax.Array, size: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Whether some and whether every pair of each block of a mask [B|1, H|1, T|1, S] is allowed."""
    batch, heads, rows, columns = mask.shape
    blocks = round_up(rows, size[0]), round_up(columns, size[1])
    widths = ((0, 0), (0, 0), (0, blocks[0] - rows), (0, blocks[1] - columns))

    def grouped(fill: bool) -> jax.Array:
        made = jnp.pad(mask, widths, constant_values=fill)
        return made.reshape(batch, heads, blocks[0] // size[0], size[0], blocks[1] // size[1], size[1])

    return grouped(False).any((3, 5)), grouped(True).all((3, 5))


def visible_keys(grid: Grid, mask: Any, q_segments: Any, kv_segments: Any, params: Any) -> jax.Array | None:
    """[B|1, H|1, keys]: whether some query of the head may see the key; None where position alone decides.

    A mask is taken together with position and segments. Without one, a key is seen that lies in some row's band and
    whose segment some query has.
    """
    if mask is None and q_segments is None:
        return None
    columns = jnp.arange(grid.band.columns)
    first, end = grid.seen
    if mask is not None and mask.shape[2] > 1:
        rows = jnp.arange(grid.rows)[:, None]
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


def swizzle_of(block_k: int, itemsize: int) -> int:
    """Bytes of the swizzle of a tile whose rows have `block_k` elements."""
    return 128 if block_k * itemsize % 128 == 0 else 64


def in_tiles(x: jax.Array, config: HopperConfig) -> jax.Array:
    """A mask or bias [B|1, H|1, T, S] padded, where it must be, so that TMA takes it in tiles and clips at its end."""
    minor = swizzle_of(config.block_k, x.dtype.itemsize) // x.dtype.itemsize
    return padded(
        x, (0, 0, max(round_up(x.shape[2], 8), config.tile), max(round_up(x.shape[3], minor), config.block_k))
    )


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """One number a query or a key, [..., length], padded to whole blocks: plain loads do not stop at the end."""
    return padded(x, (*(0,) * (x.ndim - 1), round_up(x.shape[-1], block)))


def padded(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Zeros at the end of each axis up to `sizes` (0: as it is)."""
    widths = [(0, max(size - n, 0)) for n, size in zip(x.shape, sizes, strict=True)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x
