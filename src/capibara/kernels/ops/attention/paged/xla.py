"""Paged attention in plain XLA: a softmax carried along blocks of pages, for a group of tiles at a time.

A step gathers one block of pages for each tile of its group and no more, so memory does not grow with the context;
a group walks as many blocks as its longest part has. What a laptop runs, and what takes any call.

A GPU waits for the host at every step of a loop whose end is data. There a step gathers all that a table can name, or
a quarter where that is much, for all tiles together: what lies past the longest context is still not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from capibara import hardware
from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.attention.chunks import dot
from capibara.kernels.ops.attention.paged import tiles as work
from capibara.kernels.ops.attention.paged.rules import Sizes, scale_of, sizes, sizes_of

# Numbers that one step may gather from each pool.
GATHERED = 1 << 22
# On a GPU: how many take about as long as starting a step does, into how many steps more of them are cut, and what a
# step may hold of keys, values and scores: a part of the memory, and bytes where the GPU has no row.
GATHERED_AT_ONCE = 1 << 25
GPU_STEPS = 4
MEMORY_PART = 64
UNKNOWN_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """How the work is cut.

    Attributes:
      tokens: of a tile (1 where the call has no query_starts).
      keys: of a step, cut to whole pages.
      tiles: of a group.
      splits: parts along the keys, where the call does not say.
      upcast: whether products run in float32.
      whole: whether all of a tile's keys are gathered in one step, whatever `keys` says, with no loop around it: also
        those that lie past the longest context.
    """

    tokens: int = 1
    keys: int = 512
    tiles: int = 16
    splits: int = 1
    upcast: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "keys", "tiles", "splits"):
            if getattr(self, name) < 1:
                raise rule_error(f"{name} is 1 or more", getattr(self, name), f"raise {name}")


def default_config(call: Call) -> GroupConfig:
    """Tiles as long as the average sequence has tokens; as many together as the gathered pages allow."""
    n = sizes(call)
    tokens = 1
    if call["query_starts"] is not None:
        while tokens < 128 and tokens * n.sequences < n.tokens:
            tokens *= 2
    count = work.most_tiles(n.tokens, n.sequences, tokens)
    keys = min(max(512, n.page_size), max(n.capacity, 1))
    splits = work.choose_splits(count, -(-n.capacity // keys), work.cores_of(call))
    if call.target.platform == "gpu":
        return _for_gpu(call, n, GroupConfig(tokens, splits=splits), count)
    return GroupConfig(
        tokens,
        keys,
        tiles=max(1, GATHERED // (keys * max(n.kv_heads * n.depth, 1) * splits)),
        splits=splits,
        # A CPU has no products of 16-bit numbers, and converts them one by one.
        upcast=call.target.platform == "cpu",
    )


def _for_gpu(call: Call, n: Sizes, config: GroupConfig, count: int) -> GroupConfig:
    """In few steps, of all tiles where there is room for them."""
    splits = cast("int | None", call.params["key_splits"]) or config.splits
    steps = 1 if count * n.capacity * n.kv_heads * n.depth <= GATHERED_AT_ONCE else GPU_STEPS
    pages = max(1, -(-n.max_pages // (splits * steps)))
    chip = hardware.chip_for(call.target.device_kind)
    room = UNKNOWN_BYTES if chip is None else chip.hbm_bytes // MEMORY_PART
    of_a_key = 2 * n.kv_heads * n.depth * np.dtype(call.need("query").dtype).itemsize + 8 * config.tokens * n.heads
    tiles = room // max(splits * pages * n.page_size * of_a_key, 1)
    return dataclasses.replace(config, keys=pages * n.page_size, tiles=max(1, min(tiles, count)))


def candidates(call: Call) -> Sequence[GroupConfig]:
    first = default_config(call)
    lengths = {first.tokens} if call["query_starts"] is None else {first.tokens, 1, 16, 64}
    configs = [
        dataclasses.replace(first, tokens=t, keys=k, tiles=max(1, first.tiles * first.keys // k))
        for t in sorted(lengths)
        for k in (first.keys, 128, 2048)
    ]
    if call.target.platform == "gpu":
        configs.append(dataclasses.replace(first, splits=1, whole=True))
    return list(dict.fromkeys([first, *configs]))


def xla(
    query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, page_table: jax.Array, context_lengths: jax.Array,
    query_starts: jax.Array | None = None, *, config: GroupConfig, window: int | None, scale: float | None,
    softcap: float | None, key_splits: int | None, return_lse: bool,
) -> Any:  # fmt: skip
    """The op, group after group; see the module's text."""
    tokens, heads, depth = query.shape
    kv_heads = sizes_of(query, key_pages, page_table).kv_heads
    pages, page_size = key_pages.shape[:2]
    sequences, max_pages = page_table.shape
    wide = jnp.promote_types(jnp.float32, query.dtype)
    if 0 in query.shape or 0 in key_pages.shape or 0 in page_table.shape:
        out, lse = jnp.zeros_like(query), jnp.full((tokens, heads), -jnp.inf, wide)
        return (out, lse) if return_lse else out
    product = wide if config.upcast else query.dtype
    group, per_tile = heads // kv_heads, 1 if query_starts is None else config.tokens
    block_pages = max_pages if config.whole else max(1, min(config.keys // page_size, max_pages))
    block = block_pages * page_size
    tiles = work.work_list(
        tokens, context_lengths, query_starts, per_tile, window=window, capacity=max_pages * page_size
    )
    count = tiles.token.shape[0]
    splits = key_splits or config.splits
    first, last = work.split_blocks(tiles, block, splits)
    rows = tiles.rows(per_tile, tokens)
    # In plain decoding a tile is a token: nothing is moved, which also leaves a mesh's split of it alone.
    q = query if query_starts is None else query.at[rows].get(mode="fill", fill_value=0)
    q = q.reshape(count, per_tile, kv_heads, group, depth)

    def one_group(operands: Any) -> tuple[jax.Array, jax.Array]:
        q, tiles, first, last = operands
        table = page_table if tiles.sequence.shape[0] == sequences == tokens else page_table[tiles.sequence]
        position = tiles.position[:, None] + jnp.arange(per_tile)  # [tiles, tokens]
        shape = (q.shape[0], splits, kv_heads, group, per_tile)
        zeros = vary_like(jnp.zeros(shape, wide), query)
        start = (zeros - jnp.inf, zeros, jnp.broadcast_to(zeros[..., None], (*shape, depth)))
        q = q.astype(product)

        def step(number: Any, carry: Any) -> Any:
            m_i, l_i, acc = carry
            at = first + number  # the block that each part of each tile is at, [tiles, splits]
            column = at[..., None] * block_pages + jnp.arange(block_pages)
            live = (at < last)[..., None] & (column * page_size < tiles.end[:, None, None])
            live &= (column + 1) * page_size > tiles.begin[:, None, None]
            named = jnp.take_along_axis(table[:, None], jnp.clip(column, 0, max_pages - 1), axis=2, mode="clip")
            page = jnp.where(live, jnp.clip(named, 0, pages - 1), 0)
            key, value = (
                pool.at[page].get(mode="promise_in_bounds").reshape(*at.shape, block, kv_heads, depth).astype(product)
                for pool in (key_pages, value_pages)
            )
            place = at[..., None] * block + jnp.arange(block)  # [tiles, splits, keys]
            here = (at < last)[..., None] & (place >= tiles.begin[:, None, None]) & (place < tiles.end[:, None, None])
            # A product with zero would keep a NaN alive: what no token of the tile sees is put to zero.
            value = jnp.where(here[..., None, None], value, 0)
            scores = dot("wtkgd,wpskd->wpkgts", q, key, wide) * scale_of(scale, depth)
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            seen = here[:, :, None] & (place[:, :, None] <= position[:, None, :, None])
            if window is not None:
                seen &= place[:, :, None] > position[:, None, :, None] - window
            scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
            m_next = jnp.maximum(m_i, scores.max(-1))
            base = jnp.where(jnp.isneginf(m_next), 0, m_next)
            p = jnp.exp(scores - base[..., None])
            alpha = jnp.exp(m_i - base)
            part = dot("wpkgts,wpskd->wpkgtd", p.astype(product), value, wide)
            return m_next, l_i * alpha + p.sum(-1), acc * alpha[..., None] + part

        m_i, l_i, acc = step(0, start) if config.whole else jax.lax.fori_loop(0, (last - first).max(), step, start)
        alive = l_i != 0  # a NaN among the keys in sight is not nothing, and stays
        safe = jnp.where(alive, l_i, 1)
        lse = jnp.where(alive, m_i + jnp.log(safe), -jnp.inf)
        out, lse = work.join_splits(jnp.where(alive[..., None], acc / safe[..., None], 0), lse, axis=1)
        return out.astype(query.dtype), lse  # [tiles, kv_heads, group, tokens, ...]

    operands = (q, tiles, first, last)
    together = min(config.tiles, count)
    if together == count:
        out, lse = one_group(operands)
    else:
        spare = -count % together
        grouped = jax.tree.map(
            lambda x: jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, together, *x.shape[1:]), operands
        )
        out, lse = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], jax.lax.map(one_group, grouped))
    out, lse = jnp.moveaxis(out, 3, 1), jnp.moveaxis(lse, 3, 1)
    out, lse = out.reshape(count, per_tile, heads, depth), lse.reshape(count, per_tile, heads)
    if query_starts is None:
        out, lse = out.reshape(query.shape), lse.reshape(tokens, heads)
    else:
        out = vary_like(jnp.zeros_like(query), query).at[rows].set(out, mode="drop")
        lse = vary_like(jnp.full((tokens, heads), -jnp.inf, wide), query).at[rows].set(lse, mode="drop")
    return (out, lse) if return_lse else out


IMPLEMENTATION = Implementation(
    "xla",
    xla,
    own_gradient=True,  # a loop as long as the contexts are has no derivative in reverse
    config_type=GroupConfig,
    default_config=default_config,
    candidates=candidates,
)
