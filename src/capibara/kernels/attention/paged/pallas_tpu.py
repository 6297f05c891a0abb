"""Paged attention for the TPU's matrix units, in Pallas (Mosaic): prompts and single tokens in one kernel.

A page is fetched whole, with all of its heads, as one contiguous copy, and its keys and heads are rows of one matrix.
The scores of a tile's query heads against all of these rows take as many passes of the matrix unit as those against
their own head's rows alone, because a decoding token has far fewer query heads than the unit has rows; pairs of
different heads are masked. So no head is ever picked out of a page, which the packed layout would make slow. Tiles of
a prompt pay for it: their products are kv_heads times the least.

The page table, the lengths and the work list are read ahead (scalar prefetch). Pages of the next step, or of the next
tile's first, are fetched while this step is computed; pages without a key in sight are not fetched. The first axis of
the grid is the chip's cores, the second the tiles and parts of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels import vmem
from capibara.kernels.attention.paged import tiles as work
from capibara.kernels.attention.paged.rules import Sizes, scale_of, sizes
from capibara.kernels.attention.pallas_tpu_common import FLOOR, LOG2_E, MASKED, matrix_precision, round_up
from capibara.kernels.attention.pallas_tpu_config import TABLE_BYTES, tile_bytes
from capibara.kernels.context import current_interpret, matmul_precision
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct, vary_alike

SLOTS = 2


@dataclasses.dataclass(frozen=True)
class PagesConfig:
    """How the work is cut.

    Attributes:
      tokens: of a tile (1 where the call has no query_starts).
      pages: fetched in one step.
      chunk: pages whose scores are in registers together; it divides `pages`.
      splits: parts along the keys, where the call does not say.
      cores: of the chip, that the tiles are dealt out to.
    """

    tokens: int = 1
    pages: int = 8
    chunk: int = 2
    splits: int = 1
    cores: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "pages", "chunk", "splits", "cores"):
            if getattr(self, name) < 1:
                raise rule_error(f"{name} is 1 or more", getattr(self, name), f"raise {name}")
        if self.pages % self.chunk:
            raise rule_error("chunk divides pages", self, "make pages a multiple of chunk")


def _rows(tokens: int, heads: int) -> int:
    return round_up(tokens * heads, 16)


def vmem_bytes(n: Sizes, dtype: Any, config: PagesConfig) -> int:
    """Two slots of keys and values, two of the query's and the output's blocks, the scratch, a chunk's temporaries."""
    rows, width = _rows(config.tokens, n.heads), n.page_size * n.kv_heads
    used = 2 * SLOTS * tile_bytes(config.pages * width, n.depth, dtype)
    used += 2 * tile_bytes(rows, n.depth, dtype) + 2 * tile_bytes(rows, n.depth, np.float32)
    used += 8 * tile_bytes(rows, 1, np.float32) + tile_bytes(rows, n.depth, np.float32)
    chunk = config.chunk * width
    return used + 6 * tile_bytes(rows, chunk, np.float32) + 3 * tile_bytes(chunk, n.depth, np.float32)


def candidates(call: Call) -> Sequence[PagesConfig]:
    """Tiles and steps that fit VMEM, those with the most keys a step and the most tokens a tile first."""
    n = sizes(call)
    cores = work.cores_of(call)
    dtype = call.need("query").dtype
    most = 1
    if call["query_starts"] is not None:
        while most * n.sequences < n.tokens and 2 * most * n.heads <= 256:
            most *= 2
    lengths = [most >> shift for shift in range(most.bit_length())]
    made = []
    for tokens in lengths:
        for pages in (64, 32, 16, 8, 4, 2, 1):
            for chunk in (8, 4, 2, 1):
                if (
                    pages % chunk
                    or (pages * n.page_size > 2048 and pages > 1)
                    or (pages > 1 and pages // 2 >= n.max_pages)
                ):
                    continue
                if chunk > 1 and chunk * n.page_size * n.kv_heads * _rows(tokens, n.heads) > 1 << 16:
                    continue  # scores beyond a few dozen registers are spilled
                programs = work.most_tiles(n.tokens, n.sequences, tokens)
                splits = work.choose_splits(programs, math.ceil(n.max_pages / pages), cores, most=2 * cores)
                config = PagesConfig(tokens, pages, chunk, splits, cores)
                if vmem_bytes(n, dtype, config) <= vmem.limit(call):
                    made.append(config)
    return made


def refuses(call: Call) -> str | None:
    n = sizes(call)
    dtype = call.need("query").dtype
    if np.dtype(dtype).name not in ("bfloat16", "float32"):
        return f"the v4 matrix units take bfloat16 and float32, not {dtype}"
    if 0 in (n.tokens, n.heads, n.pages, n.sequences, n.max_pages):
        return "an operand is empty"
    if not 8 <= n.depth <= 256:
        return f"it takes a head_dim from 8 to 256, not {n.depth}"
    packed = 32 // np.dtype(dtype).itemsize
    if n.page_size * n.kv_heads % packed:
        return f"a page's keys times heads is a multiple of {packed} here, not {n.page_size} x {n.kv_heads}"
    if dtype == jnp.float32 and matmul_precision() in ("high", "tensorfloat32", "bfloat16_3x"):
        return f"Mosaic has no {matmul_precision()!r} precision between one pass and the full six"
    table = 4 * n.sequences * n.max_pages + 7 * 4 * n.tokens
    if table > TABLE_BYTES:
        return f"the page table and the work list take {table} bytes of a core's scalar memory, of {TABLE_BYTES}"
    return None if candidates(call) else "no step of it fits the core's VMEM"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the body is specialised by."""

    n: Sizes
    config: PagesConfig
    per_core: int
    window: int | None
    scale: float
    softcap: float | None
    precision: jax.lax.Precision | None

    @property
    def width(self) -> int:
        """Rows of one page: its keys times its heads."""
        return self.n.page_size * self.n.kv_heads

    @property
    def step_keys(self) -> int:
        return self.config.pages * self.n.page_size


NAMES = (
    "table", "sequence", "position", "begin", "end", "first", "last",  # prefetched scalars
    "q", "row_head", "row_token", "column_head", "k", "v",  # operands
    "out", "lse",
    "k_slots", "v_slots", "acc", "highest", "total", "arrived", "done",  # scratch
)  # fmt: skip


def _body(*given: Any, plan: _Plan) -> None:
    refs = dict(zip(NAMES, given, strict=True))
    first, last, done = refs["first"], refs["last"], refs["done"]
    core, turn = pl.program_id(0), pl.program_id(1)
    cores = plan.config.cores
    item = turn * cores + core
    steps = last[item] - first[item]

    @pl.when(turn == 0)
    def _() -> None:
        done[0] = 0

    before = done[0]
    # The tile before fetched this one's first pages, if both have any.
    previous = jnp.maximum(item - cores, 0)
    fetched = (turn > 0) & (last[previous] > first[previous])
    following = jnp.minimum(item + cores, plan.per_core * cores - 1)
    follows = (turn + 1 < plan.per_core) & (last[following] > first[following])
    for name, start in (("acc", 0.0), ("highest", FLOOR), ("total", 0.0)):
        refs[name][...] = jnp.full_like(refs[name], start)

    @pl.when((steps > 0) & ~fetched)
    def _() -> None:
        _fetch(plan, refs, item, first[item], jax.lax.rem(before, SLOTS))

    @pl.loop(0, steps)
    def _step(step: Any) -> None:
        slot = jax.lax.rem(before + step, SLOTS)
        block = first[item] + step

        @pl.when(step + 1 < steps)
        def _() -> None:
            _fetch(plan, refs, item, block + 1, 1 - slot)

        @pl.when((step + 1 == steps) & follows)
        def _() -> None:
            _fetch(plan, refs, following, first[following], 1 - slot)

        _fetch(plan, refs, item, block, slot, wait=True)
        start, end = block * plan.step_keys, refs["end"][item]
        whole = start + plan.step_keys <= refs["position"][item] + 1
        if plan.window is not None:
            whole = whole & (start > end - 1 - plan.window)
        pl.when(whole)(lambda: _compute(plan, refs, item, block, slot, partial=False))
        pl.when(~whole)(lambda: _compute(plan, refs, item, block, slot, partial=True))

    done[0] = before + steps
    total = refs["total"][...]
    seen = total != 0.0  # a NaN among the keys in sight is not nothing, and stays
    safe = jnp.where(seen, total, 1.0)
    refs["out"][...] = (refs["acc"][...] * jnp.where(seen, 1.0 / safe, 0.0)).astype(refs["out"].dtype)
    refs["lse"][...] = jnp.where(seen, refs["highest"][...] * math.log(2) + jnp.log(safe), -jnp.inf)


def _fetch(plan: _Plan, refs: dict[str, Any], item: Any, block: Any, slot: Any, wait: bool = False) -> None:
    """Start, or wait for, the copies of a block's pages that hold a key in sight; of no other entry of the table."""
    # lax.div and lax.rem: `//` and `%` round towards minus infinity, which nothing here needs and which costs a sign.
    size, pages, width = plan.n.page_size, plan.config.pages, plan.width
    low = jnp.maximum(block * pages, jax.lax.div(refs["begin"][item], size))
    high = jnp.minimum((block + 1) * pages, jax.lax.div(refs["end"][item] + size - 1, size))
    row = refs["sequence"][item] * plan.n.max_pages

    @pl.loop(low, high)
    def _page(column: Any) -> None:
        page = jnp.clip(refs["table"][row + column], 0, plan.n.pages - 1)
        at = pl.ds(pl.multiple_of((column - block * pages) * width, width), width)
        for pool, slots, number in (("k", "k_slots", 0), ("v", "v_slots", 1)):
            copy = pltpu.make_async_copy(
                refs[pool].at[page], refs[slots].at[slot, at], refs["arrived"].at[slot, number]
            )
            copy.wait() if wait else copy.start()


def _compute(plan: _Plan, refs: dict[str, Any], item: Any, block: Any, slot: Any, partial: bool) -> None:
    """One step of the online softmax, a chunk of pages at a time. `partial`: some token does not see some key."""
    kv_heads, columns = plan.n.kv_heads, plan.config.chunk * plan.width
    q = refs["q"][...]
    own_head = refs["row_head"][...] == refs["column_head"][...]
    for chunk in range(plan.config.pages // plan.config.chunk):
        at = pl.ds(chunk * columns, columns)
        start = block * plan.step_keys + chunk * plan.config.chunk * plan.n.page_size
        keys, values = refs["k_slots"][slot, at, :], refs["v_slots"][slot, at, :]
        x = jax.lax.dot_general(
            q, keys, (((1,), (1,)), ((), ())), precision=plan.precision, preferred_element_type=jnp.float32
        )
        if plan.softcap is None:
            x = x * (plan.scale * LOG2_E)
        else:
            x = jnp.tanh(x * (plan.scale / plan.softcap)) * (plan.softcap * LOG2_E)
        allowed = own_head
        if partial:
            # Column c is key start + c // kv_heads; comparing c itself with multiples of kv_heads needs no division.
            column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            position = refs["row_token"][...] + (refs["position"][item] - start)
            allowed = allowed & (column < (position + 1) * kv_heads)
            if plan.window is not None:
                allowed = allowed & (column >= (position + 1 - plan.window) * kv_heads)
            # A product with zero would keep a NaN alive: rows that no token sees are put to zero.
            row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
            low, high = (refs[name][item] - start for name in ("begin", "end"))
            inside = (row >= low * kv_heads) & (row < high * kv_heads)
            values = jnp.where(inside, values.astype(jnp.float32), 0.0).astype(values.dtype)
        x = jnp.where(allowed, x, MASKED)
        highest = refs["highest"][...]
        higher = jnp.maximum(highest, jnp.max(x, axis=1, keepdims=True))
        p = jnp.exp2(x - higher)
        shrink = jnp.exp2(highest - higher)
        refs["highest"][...] = higher
        refs["total"][...] = refs["total"][...] * shrink + jnp.sum(p, axis=1, keepdims=True)
        refs["acc"][...] = refs["acc"][...] * shrink + jax.lax.dot(
            p.astype(values.dtype), values, precision=plan.precision, preferred_element_type=jnp.float32
        )


def pallas_tpu(
    query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, page_table: jax.Array, context_lengths: jax.Array,
    query_starts: jax.Array | None = None, *, config: PagesConfig, window: int | None, scale: float | None,
    softcap: float | None, key_splits: int | None, return_lse: bool,
) -> Any:  # fmt: skip
    """One Pallas call over the work list; see the module's text."""
    n = Sizes(*query.shape, *key_pages.shape[:3], *page_table.shape)
    per_tile = 1 if query_starts is None else config.tokens
    splits, cores = key_splits or config.splits, config.cores
    tiles = work.work_list(n.tokens, context_lengths, query_starts, per_tile, window=window, capacity=n.capacity)
    count = tiles.token.shape[0]
    first, last = work.split_blocks(tiles, config.pages * n.page_size, splits)
    per_core = math.ceil(count * splits / cores)
    items = per_core * cores

    def by_item(x: jax.Array) -> jax.Array:
        """One number for each part of each tile, and zeros (no keys) to a whole round of the cores."""
        flat = jnp.broadcast_to(x.reshape(count, -1), (count, splits)).reshape(-1)
        return jnp.pad(flat, (0, items - count * splits))

    rows, used = _rows(per_tile, n.heads), per_tile * n.heads
    token_rows = tiles.rows(per_tile, n.tokens)
    held = query if query_starts is None else query.at[token_rows].get(mode="fill", fill_value=0)
    held = jnp.pad(held.reshape(count, used, n.depth), ((0, 0), (0, rows - used), (0, 0)))
    row = jnp.arange(rows, dtype=jnp.int32)
    plan = _Plan(n, config, per_core, window, scale_of(scale, n.depth), softcap, matrix_precision(query.dtype))
    columns = config.chunk * plan.width
    # Keys and heads of a page as rows of one matrix: the same bytes where the heads fill a tile's rows.
    pools = [x.reshape(n.pages, plan.width, n.depth) for x in (key_pages, value_pages)]
    prefetched = [
        page_table.reshape(-1),
        *map(by_item, (tiles.sequence, tiles.position, tiles.begin, tiles.end, first, last)),
    ]
    operands = [
        held,
        (row % n.heads // n.group)[:, None],
        (row // n.heads)[:, None],
        (jnp.arange(columns, dtype=jnp.int32) % n.kv_heads)[None],
        *pools,
    ]

    def of_item(core: Any, turn: Any, *_: Any) -> Any:
        return turn * cores + core, 0, 0

    def of_tile(core: Any, turn: Any, *_: Any) -> Any:
        return jnp.minimum(jax.lax.div(turn * cores + core, splits), count - 1), 0, 0

    def same(*_: Any) -> Any:
        return 0, 0

    out_dtype = query.dtype if splits == 1 else jnp.float32
    made = pl.pallas_call(
        functools.partial(_body, plan=plan),
        out_shape=(
            out_struct((items, rows, n.depth), out_dtype, query),
            out_struct((items, rows, 1), jnp.float32, query),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(cores, per_core),
            in_specs=[
                pl.BlockSpec((None, rows, n.depth), of_tile),
                pl.BlockSpec((rows, 1), same),
                pl.BlockSpec((rows, 1), same),
                pl.BlockSpec((1, columns), same),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=(pl.BlockSpec((None, rows, n.depth), of_item), pl.BlockSpec((None, rows, 1), of_item)),
            scratch_shapes=(
                pltpu.VMEM((SLOTS, config.pages * plan.width, n.depth), key_pages.dtype),
                pltpu.VMEM((SLOTS, config.pages * plan.width, n.depth), key_pages.dtype),
                pltpu.VMEM((rows, n.depth), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.SemaphoreType.DMA((SLOTS, 2)),
                pltpu.SMEM((1,), jnp.int32),
            ),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=current_interpret().pallas_argument(),
        name="capibara_paged_attention",
    )(*vary_alike((*prefetched, *operands)))
    return _collect(made, query, tiles, token_rows, count, splits, query_starts is not None, return_lse)


def _collect(
    made: Any, query: jax.Array, tiles: work.Tiles, token_rows: jax.Array, count: int, splits: int, ragged: bool,
    return_lse: bool,
) -> Any:  # fmt: skip
    """The parts joined, and each row of a tile back at its token."""
    tokens, heads, depth = query.shape
    per_tile = token_rows.shape[1]
    used = per_tile * heads
    out = made[0][: count * splits, :used].reshape(count, splits, used, depth)
    lse = made[1][: count * splits, :used].reshape(count, splits, used)
    if splits == 1:
        out, lse = out[:, 0], lse[:, 0]
    else:
        out, lse = work.join_splits(out, lse, axis=1)
    out, lse = out.astype(query.dtype).reshape(count, per_tile, heads, depth), lse.reshape(count, per_tile, heads)
    if ragged:
        out = jnp.zeros_like(query).at[token_rows].set(out, mode="drop")
        lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32).at[token_rows].set(lse, mode="drop")
    else:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_lse else out


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    pallas_tpu,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 20,
    kernel=True,
    config_type=PagesConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
