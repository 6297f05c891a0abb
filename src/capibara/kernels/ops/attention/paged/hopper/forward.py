"""Paged attention for Hopper, in Pallas (Mosaic GPU): decoding is a stream of pages, and this keeps it full.

An item of work is one tile of tokens, one head of the cache and one part of its keys. Each multiprocessor has one or
two pairs of warpgroups, and each pair takes its items one after another: one looks pages up in the table, a block
ahead, and fetches them by TMA into a ring, on into the next item while the last one is still computed; the other
computes scores, softmax and products on the tensor cores. One pair's computing does not keep up with the memory when
items are short; two do. Long items are taken first, in turns that run forth and back over the pairs, so that all end at
about the same time.

A product has 64 rows, of which an item uses the few that share its head: the others cost no memory traffic, which is
what bounds the kernel. So one token's query is read as it lies, eight heads or more together, and each item writes the
rows of its own. Where the keys are cut into several parts, they are joined by their log-sum-exps afterwards.

A head that is no multiple of 64 columns is fetched, multiplied and written panel by panel (see attention's panels): its
columns begin anywhere in a row of the pool, which only panels are fetched from. Panels begin at any row of the query
too, so there an item's own rows are the first that it fetches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.trusting import trusted
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.attention.hopper.panels import (
    CONTRACTED,
    TILE_ROWS,
    Columns,
    WholeColumns,
    columns_of,
    contract,
    multiply,
)
from capibara.kernels.ops.attention.paged import tiles as work
from capibara.kernels.ops.attention.paged.hopper.join import join, takes
from capibara.kernels.ops.attention.paged.rules import Sizes, scale_of, sizes, sizes_of
from capibara.kernels.pallas import hopper
from capibara.kernels.pallas.hopper import (
    LOG2E,
    SMEM_BYTES,
    load,
    multiprocessors,
    named,
    refuses_chip,
    smem_bytes,
    store_to_memory,
    swizzled,
)
from capibara.kernels.pallas.overlap import await_previous, let_next_start, overlaps

# What a row's maximum starts from: low enough for any score, and finite, so that a row that has seen no key yet
# subtracts it without making a NaN.
LOWEST = -1e30
ROWS = 64  # of a tensor-core product
TIMED_DEPTHS = (64, 80, 96, 128, 192, 256)  # beside XLA's form, on an H200
LONG_PART = 2048  # keys of a sequence that are no part of their own yet, where there are many sequences
LEAST_DEPTH, MOST_DEPTH = 64, 256
WIDE = 128  # columns of an accumulator beside which few registers are left
LEAST_ROWS = 16  # of a tile of a prompt
COMPUTE_REGISTERS = {1: 240, 2: 208}  # by pairs of warpgroups
FETCH_REGISTERS = {1: 64, 2: 40}
# Rows are reduced within the threads of a warp, which need no shared memory for it.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How the work is cut.

    Attributes:
      tokens: of a tile (1 where the call has no query_starts); times the query heads of a key head, 64 at most.
      keys: of a block: whole pages, or a part of one.
      stages: blocks in the ring of each pair of warpgroups.
      pairs: of warpgroups, each with items and a ring of its own; 1 or 2.
      splits: parts along the keys at most, where the call does not say.
      least: blocks of a part: a tile of fewer has one part.
    """

    tokens: int = 1
    keys: int = 64
    stages: int = 4
    pairs: int = 1
    splits: int = 1
    least: int = 1

    def __post_init__(self) -> None:
        if min(self.tokens, self.splits, self.least) < 1:
            raise rule_error("tokens, splits and least are 1 or more", self, "raise them")
        if self.keys not in (64, 128, 192, 256):
            raise rule_error("keys is a multiple of 64 up to 256", self.keys, "use 64")
        if self.pairs not in (1, 2):
            raise rule_error("pairs is 1 or 2", self.pairs, "use 2")
        if self.stages < 2:
            raise rule_error("stages is 2 or more", self.stages, "use 3")


def columns(n: Sizes, dtype: Any) -> Columns:
    """Of a head: in one panel, or in several of them."""
    return columns_of(n.depth, dtype, lengths=())  # rows are fetched in whole tiles, whatever the pool's length


def _passes(dtype: Any, out_dtype: Any) -> int:
    """How often a result is stored and sent: of wider numbers, a panel has room for half of its columns at a time."""
    return jnp.dtype(out_dtype).itemsize // jnp.dtype(dtype).itemsize


def _result_views(head: Columns, pairs: int, dtype: Any, out_dtype: Any) -> list[list[Any]]:
    """A result's panels as they are sent and, where that differs, as they are stored.

    A panel lies where the query's did, in as many bytes, so that a pair does not write over another's query.
    """
    passes, size = _passes(dtype, out_dtype), jnp.dtype(out_dtype).itemsize
    widths = [panel.width // passes for panel in head.panels(dtype)]
    if isinstance(head, WholeColumns):
        # Not tiled, so that it is sent from any row on. It is stored from the first row on: JAX from 0.11 on takes a
        # swizzle for such an array, which TMA counts by the address, and a store from where it begins.
        return [[plgpu.SMEM((pairs, ROWS, width), out_dtype) for width in widths]]
    by_rows = [(plgpu.SwizzleTransform(width * size),) for width in widths]
    by_tiles = [swizzled(out_dtype, width * size) for width in widths]
    return [
        [plgpu.SMEM((pairs, ROWS, width), out_dtype, transforms=how) for width, how in zip(widths, view, strict=True)]
        for view in (by_rows, by_tiles)
    ]


def scratch(config: StreamConfig, n: Sizes, dtype: Any, out_dtype: Any) -> dict[str, Any]:
    """A program's shared memory: each pair's query rows, ring of keys and values, and result."""
    block_k, num_stages, pairs = config.keys, config.stages, config.pairs
    head = columns(n, dtype)
    copies = head.copies(dtype)
    fetched = copies * max(1, block_k // n.page_size)  # for a block
    return {
        "q_out": plgpu.RefUnion(*head.views((pairs,), ROWS, dtype), *_result_views(head, pairs, dtype, out_dtype)),
        "k": head.scratch((pairs, num_stages), block_k, dtype),
        "v": head.scratch((pairs, num_stages), block_k, dtype),
        "lse": plgpu.SMEM((pairs, ROWS), jnp.float32),
        "q_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=pairs),
        "q_drained": plgpu.Barrier(num_barriers=pairs),
        "k_arrived": plgpu.Barrier(num_arrivals=fetched, num_barriers=pairs * num_stages),
        "v_arrived": plgpu.Barrier(num_arrivals=fetched, num_barriers=pairs * num_stages),
        "k_drained": plgpu.Barrier(num_barriers=pairs * num_stages),
        "v_drained": plgpu.Barrier(num_barriers=pairs * num_stages),
    }


def _fits(config: StreamConfig, n: Sizes, dtype: Any) -> bool:
    if config.keys % n.page_size and n.page_size % config.keys:
        return False
    used = smem_bytes(scratch(config, n, dtype, jnp.float32), COMPILER_PARAMS.reduction_scratch_bytes)
    registers = (ROWS * (n.depth + config.keys) + ROWS * config.keys // 2) // 128
    return used <= SMEM_BYTES and registers <= 192


def candidates(call: Call) -> Sequence[StreamConfig]:
    """Rings that fit shared memory, the deepest of each block first."""
    n, dtype = sizes(call), call.need("query").dtype
    tokens = 1
    if call["query_starts"] is not None and n.group & (n.group - 1) == 0:
        while tokens * n.sequences < n.tokens and 2 * tokens * n.group <= ROWS:
            tokens *= 2
        # In a step of many sequences with a token each, the one prompt among them would be cut into tiles as small as
        # theirs, each of which reads all of its keys.
        if n.tokens > n.sequences:
            tokens = max(tokens, LEAST_ROWS // n.group)
    configs = []
    items, cores = work.most_tiles(n.tokens, n.sequences, tokens) * n.kv_heads, work.cores_of(call)
    # Two pairs of warpgroups where there is work for both; else each item has a multiprocessor to itself.
    cuts = ((64, 2), (64, 1), (128, 1), (256, 1)) if items > cores else ((64, 1), (64, 2), (128, 1), (256, 1))
    for keys, pairs in cuts:
        fitting = (StreamConfig(tokens, keys, stages, pairs) for stages in (6, 5, 4, 3, 2))
        deepest = next((c for c in fitting if _fits(c, n, dtype)), None)
        if deepest is not None:
            blocks, takers = math.ceil(n.capacity / keys), pairs * cores
            splits, least = work.choose_splits(items, blocks, takers), 1
            if splits == 1 and call["query_starts"] is None:
                # Enough items for all; but one long sequence among many would be waited for.
                splits, least = math.ceil(blocks * keys / LONG_PART), LONG_PART // keys
            configs.append(dataclasses.replace(deepest, splits=splits, least=least))
    return configs


def refuses(call: Call) -> str | None:
    n = sizes(call)
    dtype = np.dtype(call.need("query").dtype).name
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if dtype not in ("bfloat16", "float16"):
        return f"its tensor-core form takes bfloat16 or float16, not {dtype}"
    if 0 in (n.tokens, n.heads, n.pages, n.sequences, n.max_pages):
        return "an operand is empty"
    if n.depth % CONTRACTED or not LEAST_DEPTH <= n.depth <= MOST_DEPTH:
        return f"head_dim is a multiple of {CONTRACTED} from {LEAST_DEPTH} to {MOST_DEPTH} here, not {n.depth}"
    if n.group > ROWS:
        return f"{ROWS} query heads at most share a key head here, not {n.group}"
    if n.page_size % 8:
        return f"a page holds a multiple of 8 keys here, not {n.page_size}"
    if n.kv_heads * n.depth <= 64 or n.pages * n.page_size < 16:
        # An axis of a single tile is dropped from the TMA descriptor.
        return f"the pool is {n.pages * n.page_size} keys by {n.kv_heads * n.depth}, and TMA needs 16 by more than 64"
    return None if candidates(call) else f"no block of whole pages of {n.page_size} keys fits shared memory"


def hopper_forward(
    query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, page_table: jax.Array, context_lengths: jax.Array,
    query_starts: jax.Array | None = None, *, config: StreamConfig, window: int | None, scale: float | None,
    softcap: float | None, key_splits: int | None, return_lse: bool,
) -> Any:  # fmt: skip
    """One kernel over (parts, tiles, heads of the cache); see the module's text."""
    n = sizes_of(query, key_pages, page_table)
    per_tile = 1 if query_starts is None else config.tokens
    if per_tile * n.group > ROWS:
        raise rule_error(f"tokens times query heads a key head is {ROWS} at most", config, "use fewer tokens")
    splits, least = (config.splits, config.least) if key_splits is None else (key_splits, 1)
    tiles = work.work_list(n.tokens, context_lengths, query_starts, per_tile, window=window, capacity=n.capacity)
    count = tiles.token.shape[0]
    rows = _QueryRows.of(n, per_tile, columns(n, query.dtype).row_step, ragged=query_starts is not None)
    q = rows.laid_out(query, tiles)
    wants_lse = return_lse or splits > 1
    items = splits * count * n.kv_heads
    programs = min(-(-items // config.pairs), multiprocessors(current_target().device_kind))
    parts, live = _described(tiles, config.keys, splits, least)
    # Whatever is read before the first page is waited for: not how many items there are, where all are taken at once,
    # and not which page it is.
    todo: tuple[jax.Array, ...] = ()
    if items > programs * config.pairs:
        parts, todo = _longest_first(parts, live), (live.sum(dtype=jnp.int32).reshape(1),)
    parts = jnp.concatenate([parts, _first_pages(parts, page_table, n, config.keys)], axis=1)
    out_types = [
        out_struct((count, splits, n.kv_heads * rows.each, n.depth), query.dtype if splits == 1 else jnp.float32, query)
    ]
    if wants_lse:
        out_types.append(out_struct((count, splits, n.kv_heads, rows.fetched), jnp.float32, query))
    kernel = plgpu.kernel(
        named(
            "paged_attention", _kernel, n=n, config=config, programs=programs, per_tile=per_tile, rows=rows,
            parts=None if todo else live.size, wants_lse=wants_lse, window=window, scale=scale_of(scale, n.depth),
            softcap=softcap, early=overlaps(),
        ),
        out_type=out_types,
        grid=(programs,),
        grid_names=("program",),
        num_threads=2 * config.pairs,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )  # fmt: skip
    # Every key of every page as a row, every head as columns of it: the same bytes.
    pools = [x.reshape(n.pages * n.page_size, n.kv_heads * n.depth) for x in (key_pages, value_pages)]
    made = kernel(q, *pools, page_table, parts, *todo)
    # One kernel for three passes of XLA's: on an H200 an engine of one sequence was 3 % faster with it.
    if splits > 1 and not return_lse and takes(splits, n.depth):
        joined = join(made[0], made[1], live, (rows.each, rows.together), query.dtype)
        return rows.by_token(joined, tiles, query_starts, 0.0)
    out, lse = made[0], rows.own(made[1]) if wants_lse else None
    if lse is None:
        out = out[:, 0]
    elif splits == 1:
        out, lse = out[:, 0], lse[:, 0]
    else:
        written = live[:, :, None]
        out, lse = jnp.where(written[..., None], out, 0), jnp.where(written, lse, -jnp.inf)
        out, lse = work.join_splits(out, lse, axis=1)
    out = rows.by_token(out.astype(query.dtype), tiles, query_starts, 0.0)
    if lse is None or not return_lse:
        return out
    return out, rows.by_token(lse, tiles, query_starts, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _QueryRows:
    """Where the rows of a tile's query lie, [tiles, kv_heads * each, depth], and which of them an item fetches."""

    n: Sizes
    per_tile: int
    each: int
    """Rows of a head of the cache."""
    as_it_lies: bool
    """Whether a tile is a token, in the order of the tokens, and nothing is to be padded."""
    step: int
    """Rows are fetched from a multiple of it on."""

    @classmethod
    def of(cls, n: Sizes, per_tile: int, step: int, *, ragged: bool) -> _QueryRows:
        used = per_tile * n.group
        whole = not used % TILE_ROWS or (not TILE_ROWS % used and not n.heads % TILE_ROWS)
        as_it_lies = whole and not ragged
        return cls(n, per_tile, used if as_it_lies else -(-used // TILE_ROWS) * TILE_ROWS, as_it_lies, step)

    @property
    def fetched(self) -> int:
        return max(self.each, TILE_ROWS)

    @property
    def together(self) -> int:
        """Heads whose rows are fetched from the same row on."""
        return max(self.step // self.each, 1)

    def first(self, head: Any) -> tuple[Any, Any]:
        """(the first row that is fetched, a head's own first row among those) of a head of the cache."""
        own = head * self.each
        if self.step == 1:
            return own, 0
        inside = lax.rem(own, self.step)
        return pl.multiple_of(own - inside, self.step), inside

    def laid_out(self, query: jax.Array, tiles: work.Tiles) -> jax.Array:
        n, used = self.n, self.per_tile * self.n.group
        if self.as_it_lies:
            return query
        count = tiles.token.shape[0]
        q = query.at[tiles.rows(self.per_tile, n.tokens)].get(mode="fill", fill_value=0)
        q = q.reshape(count, self.per_tile, n.kv_heads, n.group, n.depth).swapaxes(1, 2)
        q = q.reshape(count, n.kv_heads, used, n.depth)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, self.each - used), (0, 0)))
        return q.reshape(count, -1, n.depth)

    def own(self, lse: jax.Array) -> jax.Array:
        """Every head's own of the rows that it fetched: [tiles, parts, kv_heads * each]."""
        count, parts = lse.shape[:2]
        if self.together > 1:
            head = jnp.arange(self.together)
            lse = lse.reshape(count, parts, -1, self.together, self.together, self.each)[:, :, :, head, head]
            return lse.reshape(count, parts, -1)
        return lse[..., : self.each].reshape(count, parts, -1)

    def by_token(self, x: jax.Array, tiles: work.Tiles, query_starts: jax.Array | None, missing: float) -> jax.Array:
        """[tokens, heads, ...] of what each tile has; `missing` for tokens that are padding."""
        n, used, rest = self.n, self.per_tile * self.n.group, x.shape[2:]
        x = x.reshape(-1, n.kv_heads, self.each, *rest)[:, :, :used]
        x = x.reshape(-1, n.kv_heads, self.per_tile, n.group, *rest)
        if query_starts is None:
            return x.reshape(-1, n.heads, *rest)
        # Each token fetches its rows: a scatter of the tiles' rows took six times as long on an H200.
        tile, row = work.tile_of_tokens(n.tokens, query_starts, self.per_tile)
        taken = x.at[tile, :, row].get(mode="fill", fill_value=missing)
        return taken.reshape(n.tokens, n.heads, *rest)


def _described(tiles: work.Tiles, block: int, splits: int, least: int) -> tuple[jax.Array, jax.Array]:
    """The numbers of `_Item` of every part of every tile, and which parts there are, [tiles, splits].

    Every tile has a first part, if only to write that it saw nothing; others have blocks.
    """
    first, last = work.split_blocks(tiles, block, splits, least)
    tile, part = (x.reshape(-1) for x in jnp.indices(first.shape, jnp.int32))
    of_tile = [x[tile] for x in (tiles.sequence, tiles.position, tiles.begin, tiles.end)]
    live = (last > first) | (jnp.arange(splits) == 0)
    return jnp.stack([tile, part, *of_tile, first.reshape(-1), last.reshape(-1)], axis=1), live


def _first_pages(parts: jax.Array, page_table: jax.Array, n: Sizes, block: int) -> jax.Array:
    """The pages of every part's first block, [parts, pages of a block]: the kernel fetches them without looking."""
    item = _Item._make([*parts.T, None, ()])
    return jnp.stack([_page_of(item, item.first, at, page_table, n, block) for at in _pieces(n, block)], axis=1)


def _pieces(n: Sizes, block: int) -> range:
    """Where the pieces of a block that lie in one page begin: whole pages, or one part of one."""
    return range(0, block, min(block, n.page_size))


def _page_of(item: _Item, block: Any, at: int, table: Any, n: Sizes, block_k: int) -> Any:
    """The page of a piece of a block. Of those in sight only: past the last, it is named again, and masked."""
    first = lax.div(item.begin, n.page_size)
    last = lax.max(lax.div(item.end - 1, n.page_size), first)
    return table[item.sequence, lax.clamp(first, lax.div(block * block_k + at, n.page_size), last)]


def _longest_first(parts: jax.Array, live: jax.Array) -> jax.Array:
    """Those with most blocks first, and those that there are not at the end, where nobody takes them."""
    first, last = (parts[:, _Item._fields.index(name)] for name in ("first", "last"))
    return parts[jnp.argsort(jnp.where(live.reshape(-1), first - last, 1))]


def _ceil_div(x: Any, by: int) -> Any:
    return lax.div(lax.max(x, x * 0) + (by - 1), by)


class _Item(NamedTuple):
    """A part of a tile, as the kernel reads it, and a head of the cache."""

    tile: Any
    part: Any
    sequence: Any
    position: Any
    begin: Any
    end: Any
    first: Any
    last: Any
    head: Any
    first_pages: tuple[Any, ...]
    """Of its first block."""


def _kernel(
    q_hbm: Any, k_hbm: Any, v_hbm: Any, table_hbm: Any, parts_hbm: Any, *todo_and_out: Any, n: Sizes,
    config: StreamConfig, programs: int, per_tile: int, rows: _QueryRows, parts: int | None, wants_lse: bool,
    window: int | None, scale: float, softcap: float | None, early: bool,
) -> None:  # fmt: skip
    block_k, num_stages, takers = config.keys, config.stages, programs * config.pairs
    depth, dtype = n.depth, q_hbm.dtype
    pieces = _pieces(n, block_k)  # fetched for a block
    head_columns = columns(n, dtype)
    out_hbm, lse_hbm = todo_and_out[-2:] if wants_lse else (todo_and_out[-1], None)

    def run_warpgroups(smem: dict[str, Any]) -> None:
        if early:
            let_next_start()
            await_previous()
        warpgroup = lax.axis_index("warpgroup")
        pair = lax.rem(warpgroup, config.pairs)
        taker = pair * programs + lax.axis_index("program")
        zero = taker * 0
        views = tuple(smem["q_out"])
        q_views, out_views = views[: len(views) // 2], views[len(views) // 2 :]
        queries = head_columns.tiles_of_views(q_views)
        q_smem = queries.at(pair)
        sent, stored = ([panel.at[pair] for panel in out_views[i]] for i in (0, -1))
        ring = {name: head_columns.tiles(smem[name]) for name in ("k", "v")}

        def item_number(turn: Any) -> Any:
            # Forth and back over the pairs: who had the longest of one round has the shortest of the next.
            return turn * takers + taker + lax.rem(turn, 2) * (takers - 1 - 2 * taker)

        items = (todo_and_out[0][0] if parts is None else zero + parts) * n.kv_heads

        def described(turn: Any) -> _Item:
            number = lax.min(item_number(turn), items - 1)
            place = lax.div(number, n.kv_heads)
            read = [parts_hbm[place, i] for i in range(parts_hbm.shape[1])]
            known = _Item._fields.index("head")
            return _Item._make([*read[:known], lax.rem(number, n.kv_heads), tuple(read[known:])])

        def each_item(body: Any) -> None:
            """Each of this pair's items, with how many blocks went before. The next one's numbers are read ahead."""
            whole = lax.div(items - 1, takers)  # rounds in which every pair has an item
            turns = jnp.where(item_number(whole) < items, whole + 1, whole)

            def run(turn: Any, carry: tuple[Any, _Item]) -> tuple[Any, _Item]:
                before, item = carry
                following = described(turn + 1)
                body(turn, before, item)
                return before + item.last - item.first, following

            _steps(zero, turns, run, (zero, described(zero)))

        @pl.when(warpgroup >= config.pairs)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS[config.pairs], action="decrease")

            def fetch_item(turn: Any, before: Any, item: _Item) -> None:
                @pl.when(turn > 0)
                def _() -> None:
                    plgpu.barrier_wait(smem["q_drained"].at[pair])

                taken = pl.ds(rows.first(item.head)[0], rows.fetched)
                q_smem.rows(0, rows.fetched).fetch(q_hbm, (item.tile, taken), smem["q_arrived"].at[pair])
                first_column = item.head * depth

                def fetch(block: Any, ahead: tuple[Any, ...]) -> tuple[Any, ...]:
                    so_far = before + block - item.first
                    slot = lax.rem(so_far, num_stages)
                    barrier = pair * num_stages + slot
                    # The table is read a block ahead, while the ring is waited for.
                    following = tuple(_page_of(item, block + 1, at, table_hbm, n, block_k) for at in pieces)
                    inside = lax.rem(block * block_k, n.page_size) if len(pieces) == 1 else 0
                    for name, source in (("k", k_hbm), ("v", v_hbm)):

                        @pl.when(so_far >= num_stages)
                        def _(name: str = name) -> None:
                            plgpu.barrier_wait(smem[f"{name}_drained"].at[barrier])

                        for at, page in zip(pieces, ahead, strict=True):
                            # Never outside the pool. Not where it is read: that would wait for it.
                            inside_pool = lax.clamp(page * 0, page, page * 0 + (n.pages - 1))
                            keys = pl.ds(inside_pool * n.page_size + inside, pieces.step)
                            target = ring[name].at(pair, slot)
                            if len(pieces) > 1:
                                target = target.rows(at, pieces.step)
                            target.fetch(source, (keys,), smem[f"{name}_arrived"].at[barrier], first_column)
                    return following

                @pl.when(item.first < item.last)
                def _() -> None:
                    _steps(item.first, item.last, fetch, item.first_pages)

            each_item(fetch_item)

        @pl.when(warpgroup < config.pairs)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS[config.pairs], action="increase")
            layout = plgpu.Layout.WGMMA

            def compute_item(turn: Any, before: Any, item: _Item) -> None:
                del turn

                def visible(start: Any) -> Any:
                    """Which pairs of a row and a key of the block at `start` see each other."""
                    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, block_k), 0, layout=layout)
                    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, block_k), 1, layout=layout) + start
                    if per_tile == 1:
                        row = row * 0
                    else:
                        row = lax.shift_right_logical(row, int(math.log2(n.group)))
                    row = row + item.position
                    seen = key <= row
                    return seen if window is None else seen & (key > row - window)

                def blank(slot: Any, start: Any) -> None:
                    """Zeros for the values of a block that no row sees: a product with zero would keep a NaN alive."""

                    def clear(part: Any, at: int) -> None:
                        key = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=layout) + (start + at)
                        value = load(part, layout)
                        in_sight = (key >= item.begin) & (key < item.end)
                        part[...] = jnp.where(in_sight, value, jnp.zeros_like(value))

                    def clear_piece(number: Any, _: None, ref: Any, at: int, width: int) -> None:
                        column = pl.multiple_of(number * width, width)
                        clear(ref.at[pl.ds(at, 64), pl.ds(column, width)], at)

                    for at, (panel, ref) in itertools.product(range(0, block_k, 64), ring["v"].at(pair, slot).whole()):
                        if panel.width <= WIDE:
                            clear(ref.at[pl.ds(at, 64)], at)
                        else:
                            # A loop, or a compiler fetches several pieces at once, for which there are no registers.
                            piece = functools.partial(clear_piece, ref=ref, at=at, width=panel.swizzled)
                            lax.fori_loop(zero, zero + panel.width // panel.swizzled, piece, None)
                    plgpu.commit_smem()

                def step(block: Any, carry: Any, masked: bool) -> Any:
                    acc, m_i, l_i = carry
                    slot = lax.rem(before + block - item.first, num_stages)
                    barrier = pair * num_stages + slot
                    if masked and depth > WIDE:  # before there are scores in registers
                        plgpu.barrier_wait(smem["v_arrived"].at[barrier])
                        blank(slot, block * block_k)
                    plgpu.barrier_wait(smem["k_arrived"].at[barrier])

                    def scores(ref: Any) -> Any:
                        left = q_smem if depth <= WIDE else queries.at(pair + hopper.hidden_zero(block, 0))
                        contract(ref, left.whole(), ring["k"].at(pair, slot).whole())
                        return ref[...]

                    s = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((ROWS, block_k), jnp.float32))
                    plgpu.barrier_arrive(smem["k_drained"].at[barrier])
                    unit = scale * LOG2E
                    if softcap is not None:
                        # tanh from an exponential, which the hardware has.
                        s = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * scale * LOG2E / softcap)))
                        unit = softcap * LOG2E
                    s = s * unit
                    shown = visible(block * block_k) if masked else None
                    highest = (s if shown is None else jnp.where(shown, s, -jnp.inf)).max(axis=1)
                    m_next = jnp.maximum(m_i, highest)
                    alpha = jnp.exp2(m_i - m_next)
                    # Hidden keys are taken out after the exponential, not before: a compiler makes one instruction of
                    # the scale and the subtraction, with one rounding, where nothing stands between them. A key's bits
                    # would hang on whether another of its block is hidden, which is so for a token alone and not for
                    # the same token in a prompt's piece (serve/invariance.py).
                    p = jnp.exp2(s - lax.broadcast_in_dim(m_next, s.shape, [0]))
                    if shown is not None:
                        p = jnp.where(shown, p, jnp.zeros_like(p))
                    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                    l_i = l_i * alpha + p.sum(axis=1)
                    p16 = p.astype(dtype)
                    if not masked or depth <= WIDE:
                        plgpu.barrier_wait(smem["v_arrived"].at[barrier])
                    if masked and depth <= WIDE:
                        blank(slot, block * block_k)

                    def add_values(ref: Any) -> None:
                        multiply(ref, p16, ring["v"].at(pair, slot).whole())

                    acc = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc))
                    plgpu.barrier_arrive(smem["v_drained"].at[barrier])
                    return acc, m_next, l_i

                # The blocks in the middle, which every row sees whole, need no mask.
                whole_end = lax.div(lax.max(item.position + 1, item.position * 0), block_k)
                stop = lax.max(lax.min(whole_end, item.last), item.first)
                start = item.first
                if window is not None:
                    whole_begin = _ceil_div(item.end - window, block_k)
                    start = lax.max(lax.min(whole_begin, item.last), item.first)
                    stop = lax.max(stop, start)
                plgpu.barrier_wait(smem["q_arrived"].at[pair])
                carry = (
                    plgpu.layout_cast(jnp.full((ROWS, depth), 0, jnp.float32), layout),
                    plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), layout.reduce(1)),
                    plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), layout.reduce(1)),
                )
                if window is not None:
                    carry = _steps(item.first, start, functools.partial(step, masked=True), carry)
                carry = _steps(start, stop, functools.partial(step, masked=False), carry)
                acc, m_i, l_i = _steps(stop, item.last, functools.partial(step, masked=True), carry)

                alive = l_i != 0  # a NaN among the keys in sight is not nothing, and stays
                inverse = jnp.where(alive, 1.0 / jnp.where(alive, l_i, 1.0), 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
                own = pl.ds(rows.first(item.head)[1], rows.each)
                kept = pl.ds(item.head * rows.each, rows.each)
                for half in range(_passes(dtype, out_hbm.dtype)):
                    spans = [
                        (panel.first + half * ref.shape[-1], ref.shape[-1])
                        for panel, ref in zip(head_columns.panels(dtype), sent, strict=True)
                    ]
                    for (first, width), ref in zip(spans, stored, strict=True):
                        store_to_memory(ref, acc[:, first : first + width].astype(out_hbm.dtype))
                    if lse_hbm is not None and not half:
                        lse = (m_i + jnp.log2(jnp.where(alive, l_i, 1.0))) / LOG2E
                        smem["lse"][pair] = jnp.where(alive, lse, -jnp.inf)
                    plgpu.commit_smem()
                    for (first, width), ref in zip(spans, sent, strict=True):
                        target = out_hbm.at[item.tile, item.part, kept, pl.ds(first, width)]
                        plgpu.copy_smem_to_gmem(ref.at[own], target)
                    if lse_hbm is not None and not half:
                        fetched = smem["lse"].at[pair, pl.ds(0, rows.fetched)]
                        plgpu.copy_smem_to_gmem(fetched, lse_hbm.at[item.tile, item.part, item.head])
                    # What comes next, the rest of it or another query, is written over it.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(smem["q_drained"].at[pair])

            each_item(compute_item)
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(run_warpgroups, scratch(config, n, dtype, out_hbm.dtype), collective_axes="warpgroup")


def _steps(first: Any, last: Any, body: Any, carry: Any) -> Any:
    """fori_loop, counted from zero: in shard_map a count that starts from what was read from an operand varies over the
    mesh, and one that is added to does not."""
    zero = lax.axis_index("warpgroup") * 0
    return lax.fori_loop(zero, last - first, lambda n, carry: body(first + n, carry), carry)


def beyond_evidence(call: Call) -> str | None:
    """Heads of other sizes than TIMED_DEPTHS may be right on a chip; whether they are faster there is not known."""
    depth = sizes(call).depth
    if depth in TIMED_DEPTHS or trusted() == "predicted":
        return None
    return f'head_dim {depth} has not been timed on a chip: capibara.kernels.trust("predicted") takes it'


IMPLEMENTATION = Implementation(
    "hopper",
    hopper_forward,
    platforms=("gpu",),
    refuses=refuses,
    beyond_evidence=beyond_evidence,
    kernel=True,
    config_type=StreamConfig,
    candidates=candidates,
)
