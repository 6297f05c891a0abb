"""What XLA prepares for the Hopper backward kernel where operands decide who sees whom, or dropout draws.

The kernel's tiles are keys by queries. A mask of pairs is packed along the queries, 32 to a word: one number a key
then holds what a step of 32 queries may see of it, it is read as it lies, and it takes an eighth of the mask's memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention import pallas_gpu_blocks as blocks
from capibara.kernels.ops.attention.masking import both, expand_blocks
from capibara.kernels.ops.attention.pallas_gpu_config import round_up
from capibara.kernels.ops.attention.pallas_gpu_grad_steps import HopperGradConfig
from capibara.kernels.pallas import prng

WORD = 32  # queries a word of the packed mask
UNIT = 1024  # bytes of shared memory: every array starts at a multiple
COUNTS = 3  # the table's first entries: how many steps are whole, how many are live, whether there are unseen keys


def divides(block_size: tuple[int, int], block_q: int, tile: int) -> bool:
    """Whether every tile of the kernel lies inside one block of the caller's block mask."""
    return block_size[0] % block_q == 0 and block_size[1] % tile == 0


def smem_bytes(call: Call, config: HopperGradConfig, tile: int) -> int:
    """Shared memory of what `prepared` adds: lines of single numbers, in every stage."""
    mask, size = call["mask"], call.params["block_size"]
    sizes = []
    if call["q_segments"] is not None:
        sizes += [4 * config.stages * config.block_q, 4 * tile]
    if call.params["dropout_rate"]:
        sizes.append(2 * 4 * config.stages * config.block_q)
    cut = call["block_mask"] is not None and not divides(size, config.block_q, tile)  # type: ignore[arg-type]
    if mask is not None or cut:
        sizes.append(4 * config.stages * tile * (config.block_q // WORD))
    return sum(round_up(size, UNIT) for size in sizes)


def prepared(
    grid: blocks.Grid, heads: tuple[int, int], mask: Any, q_segments: Any, kv_segments: Any, block_mask: Any,
    block_size: Any, params: dict[str, Any],
) -> dict[str, jax.Array]:  # fmt: skip
    """The kernel's operands beside the usual ones, by name; none where position alone decides.

    `heads` are those of the queries and of the keys. Positions are in `params`, as the op has them.
    """
    if block_mask is not None and not divides(block_size, grid.tile, grid.block_k):
        # Blocks that cut through a tile: from here on it is a mask of pairs.
        pairs = expand_blocks(block_mask, jnp.arange(grid.rows), jnp.arange(grid.band.columns), block_size)
        mask, block_mask = both(mask, pairs), None
    if all(x is None for x in (mask, q_segments, block_mask)):
        return {}
    visible = blocks.visible_keys(grid, mask, q_segments, kv_segments, params)
    if visible is not None and visible.shape[1] > 1:  # a key is seen when one of the heads that share it sees it
        visible = visible.reshape(visible.shape[0], heads[1], -1, visible.shape[-1]).any(2)
    kinds = blocks.pair_kinds(grid, mask, q_segments, kv_segments, block_mask, block_size)
    given = {"table": _table(grid, heads, kinds, visible)}
    if visible is not None:
        given["visible"] = blocks.in_blocks(visible.astype(jnp.int32), grid.block_k)
    if q_segments is not None:
        given["q_segments"] = blocks.in_blocks(q_segments, grid.tile)
        given["kv_segments"] = blocks.in_blocks(kv_segments, grid.block_k)
    if mask is not None:
        given["mask"] = packed(mask, grid)
    return given


def _table(grid: blocks.Grid, heads: tuple[int, int], kinds: jax.Array, visible: Any) -> jax.Array:
    """The live steps of each tile of keys, int32 [B|1, Hkv|1, tiles of keys, COUNTS + steps of all members + 1].

    First the counts, then `member * steps + step` for each live step of the query heads that share the key head,
    those that see all of the tile's keys first. One entry more than steps: the kernel reads one ahead. Tiles start
    at different steps, so that their sums into dq do not meet in the same rows.
    """
    query_heads, kv_heads = heads
    group = query_heads // kv_heads
    batch, per_head, steps, tiles = kinds.shape
    kinds = jnp.swapaxes(kinds, 2, 3).reshape(batch, -1, 1 if per_head == 1 else group, tiles, steps)
    kinds = jnp.broadcast_to(jnp.swapaxes(kinds, 2, 3), (batch, kinds.shape[1], tiles, group, steps))
    start = jnp.arange(tiles)[:, None, None] * grid.block_k // grid.tile
    turn = jnp.arange(group)[:, None] * steps + (jnp.arange(steps) - start) % steps
    flat = (*kinds.shape[:3], group * steps)
    kinds, turn = kinds.reshape(flat), jnp.broadcast_to(turn, kinds.shape).reshape(flat)
    order = jnp.argsort(kinds * (group * steps) + turn, axis=-1)
    counts = [(kinds == blocks.WHOLE).sum(-1, keepdims=True), (kinds != blocks.DEAD).sum(-1, keepdims=True)]
    unseen = jnp.zeros_like(counts[0])
    if visible is not None:
        per_tile = jnp.pad(visible, ((0, 0), (0, 0), (0, -visible.shape[-1] % grid.block_k)), constant_values=True)
        unseen = ~per_tile.reshape(*visible.shape[:2], tiles, grid.block_k).all(-1, keepdims=True)
    made = [x.astype(jnp.int32) for x in (*counts, unseen, order, jnp.zeros_like(counts[0]))]
    lead = jnp.broadcast_shapes(*(x.shape[:3] for x in made))
    return jnp.concatenate([jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in made], axis=-1)


def packed(mask: jax.Array, grid: blocks.Grid) -> jax.Array:
    """A mask [B|1, H|1, T, S] as int32 [B|1, H|1, T / 32, S] in whole tiles, bit i of a word for its query i.

    One row for all queries stays one line of zeros and ones.
    """
    batch, heads, rows, keys = mask.shape
    widths = ((0, 0), (0, 0), (0, 0 if rows == 1 else -rows % grid.tile), (0, -keys % grid.block_k))
    mask = jnp.pad(mask, widths)
    if rows == 1:
        return mask.astype(jnp.int32)
    bits = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))[:, None]
    words = mask.reshape(batch, heads, -1, WORD, mask.shape[-1])
    return jax.lax.bitcast_convert_type(jnp.where(words, bits, jnp.uint32(0)).sum(3, dtype=jnp.uint32), jnp.int32)


def row_keys(seed: jax.Array, batch: int, heads: int, rows: int, block_q: int) -> jax.Array:
    """The part of dropout's generator that is computed once a query, int32 [2, B, H, T] in whole steps.

    A transposed tile has each query in 32 threads, so it is cheaper made here once and streamed.
    """
    flat = jnp.arange(batch * heads * rows, dtype=jnp.uint32).reshape(batch, heads, rows)
    words = jnp.stack(prng.row_keys(seed, flat))
    return blocks.in_blocks(jax.lax.bitcast_convert_type(words, jnp.int32), block_q)


def hide_unseen(grid: blocks.Grid, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Keys or values [B, H, S, D], zero where position hides them from every query: zero times NaN would be NaN."""
    first, end = grid.seen
    if (first, end) == (0, grid.band.columns):
        return arrays
    number = jnp.arange(grid.band.columns)[:, None]
    return tuple(jnp.where((number >= first) & (number < end), x, jnp.zeros_like(x)) for x in arrays)
