"""Paged attention for the TPU's matrix units, in Pallas (Mosaic): prompts and single tokens in one kernel.

The page table, the lengths and the work list are read ahead (scalar prefetch). Pages of the next step, or of the next
tile's first, are fetched while this step is computed; pages without a key in sight are not fetched. The first axis of
the grid is the chip's cores, the second the tiles and parts of each.

A page is fetched whole, with all of its heads, and lies in one of three forms:

- "rows", [page_size * kv_heads, head_dim]: keys and heads are rows of one matrix. The scores of a tile's query heads
  against all of these rows take as many passes of the matrix unit as those against their own head's rows alone,
  because a decoding token has far fewer query heads than the unit has rows; pairs of different heads are masked.
- "lanes", [page_size, kv_heads * head_dim]: a key's heads lie side by side. Each query is spread over as many lanes,
  zero but for its own head's: one product gives its scores with no pair to mask, and another the sums of every head,
  of which its own are picked at the end.
- "turned", [kv_heads * head_dim, page_size]: the same with the keys along the lanes.

So no head is ever picked out of a page, which the packed layout would make slow. Tiles of a prompt pay for it: their
products are kv_heads times the least.
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

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.context import current_interpret, matmul_precision
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.attention.paged import tiles as work
from capibara.kernels.ops.attention.paged.rules import Sizes, scale_of, sizes, sizes_of
from capibara.kernels.ops.attention.tpu.blocks import (
    FLOOR,
    LANES,
    LOG2_E,
    MASKED,
    TABLE_BYTES,
    Buffers,
    matrix_precision,
    round_up,
    scratch_bytes,
    tile_bytes,
)
from capibara.kernels.pallas import vmem

SLOTS = 2
FORMS = ("rows", "lanes", "turned")


@dataclasses.dataclass(frozen=True)
class PagesConfig:
    """How the work is cut.

    Attributes:
      tokens: of a tile (1 where the call has no query_starts).
      pages: fetched in one step.
      chunk: pages whose scores are in registers together; it divides `pages`.
      splits: parts along the keys, where the call does not say.
      cores: of the chip, that the tiles are dealt out to.
      form: how a page is read, "rows", "lanes" or "turned". Only one of them is how the pool lies in memory, see
        `form_of`; for another the compiler copies the whole pool first.
    """

    tokens: int = 1
    pages: int = 8
    chunk: int = 2
    splits: int = 1
    cores: int = 1
    form: str = "rows"

    def __post_init__(self) -> None:
        for name in ("tokens", "pages", "chunk", "splits", "cores"):
            if getattr(self, name) < 1:
                raise rule_error(f"{name} is 1 or more", getattr(self, name), f"raise {name}")
        if self.pages % self.chunk:
            raise rule_error("chunk divides pages", self, "make pages a multiple of chunk")
        if self.form not in FORMS:
            raise unknown_name("form", self.form, FORMS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the body is specialised by."""

    n: Sizes
    config: PagesConfig
    per_core: int
    window: int | None
    scale: float
    softcap: float | None
    precision: jax.lax.Precision | None

    @property
    def turned(self) -> bool:
        return self.config.form == "turned"

    @property
    def spread(self) -> bool:
        """Whether a key's heads lie side by side, and queries are spread over them."""
        return self.config.form != "rows"

    @property
    def unit(self) -> int:
        """Scores of one key: one for each head of a page's rows, or one."""
        return 1 if self.spread else self.n.kv_heads

    @property
    def length(self) -> int:
        """Scores of one page."""
        return self.n.page_size * self.unit

    @property
    def depth(self) -> int:
        """Numbers that a query and a key are multiplied over."""
        return self.n.depth * (self.n.kv_heads if self.spread else 1)

    @property
    def step_keys(self) -> int:
        return self.config.pages * self.n.page_size

    def matrix(self, pages: int) -> tuple[int, int]:
        """The shape of so many pages beside each other."""
        shape = (pages * self.length, self.depth)
        return shape[::-1] if self.turned else shape

    def part(self, at: Any) -> tuple[Any, Any]:
        """Where so much of the keys' axis is in such a matrix."""
        return (slice(None), at) if self.turned else (at, slice(None))

    def pool(self, x: jax.Array) -> jax.Array:
        """A pool with each page in its form; see `form_of` for when this moves nothing."""
        if self.turned:
            x = x.reshape(self.n.pages, self.n.page_size, self.n.kv_heads, self.n.depth).transpose(0, 2, 3, 1)
        return x.reshape(self.n.pages, *self.matrix(1))


def _rows(tokens: int, heads: int) -> int:
    return round_up(tokens * heads, 16)


def _misfit(n: Sizes, dtype: Any, form: str) -> str | None:
    """Why pages of these sizes cannot be read in this form."""
    packed = 32 // np.dtype(dtype).itemsize
    if form == "rows":
        if n.page_size * n.kv_heads % packed:
            return f"a page's keys times heads is a multiple of {packed} here, not {n.page_size} x {n.kv_heads}"
        return None
    if n.kv_heads * n.depth % LANES:
        return f"a key's heads fill whole lanes of {LANES}, not {n.kv_heads} x {n.depth}"
    whole = LANES if form == "turned" else packed
    return f"a page's keys are a multiple of {whole} here, not {n.page_size}" if n.page_size % whole else None


def form_of(n: Sizes, dtype: Any, side_by_side: bool) -> str:
    """The form in which pages can be read as they lie; `side_by_side`: the pool has one axis for heads and head_dim.

    Where a head_dim does not fill the lanes, XLA lays a pool of four axes out with another axis minor: the page's keys
    where these fill them ("turned"), else the pages, from which no page can be fetched and which it has to copy.
    """
    forms: tuple[str, ...]
    if side_by_side:
        forms = ("lanes", "rows")
    elif n.depth % LANES:
        forms = ("turned", "lanes", "rows")
    else:
        forms = ("rows",)
    return next((form for form in forms if _misfit(n, dtype, form) is None), "rows")


def scratch(plan: Plan, rows: int, dtype: Any) -> Buffers:
    """Scratch of tiles of `rows` query heads."""
    slots = ((SLOTS, *plan.matrix(plan.config.pages)), dtype)
    buffers: Buffers = {
        "k_slots": slots,
        "v_slots": slots,
        "acc": ((rows, plan.depth), jnp.float32),
        "m": ((rows, 1), jnp.float32),
        "l": ((rows, 1), jnp.float32),
    }
    if plan.spread:
        buffers["q_spread"] = ((rows, plan.depth), dtype)
    return buffers


def vmem_bytes(n: Sizes, dtype: Any, config: PagesConfig) -> int:
    """The scratch, the query's and the output's blocks twice, a chunk's temporaries."""
    plan = Plan(n, config, 1, None, 1.0, None, None)
    rows = _rows(config.tokens, n.heads)
    # The output in float32, as where parts are joined; its log-sum-exp, and each row's head and token.
    blocks = tile_bytes(rows, n.depth, dtype) + tile_bytes(rows, n.depth, np.float32)
    blocks += 3 * tile_bytes(rows, 1, np.float32)
    temporaries = 6 * tile_bytes(rows, config.chunk * plan.length, np.float32)
    temporaries += 3 * tile_bytes(*plan.matrix(config.chunk), np.float32)
    if plan.spread:
        blocks += tile_bytes(n.depth, plan.depth, dtype)
        temporaries += 2 * tile_bytes(rows, plan.depth, np.float32)
    return scratch_bytes(scratch(plan, rows, dtype)) + 2 * blocks + temporaries


def candidates(call: Call) -> Sequence[PagesConfig]:
    """Tiles and steps that fit VMEM, those with the most keys a step and the most tokens a tile first."""
    n = sizes(call)
    cores = work.cores_of(call)
    dtype = call.need("query").dtype
    form = form_of(n, dtype, len(call.need("key_pages").shape) == 3)
    scores = n.page_size * (n.kv_heads if form == "rows" else 1)
    most = 1
    if call["query_starts"] is not None:
        while most * n.sequences < n.tokens and 2 * most * n.heads <= 256:
            most *= 2
    lengths = [most >> shift for shift in range(most.bit_length())]
    configs = []
    for tokens in lengths:
        for pages in (64, 32, 16, 8, 4, 2, 1):
            for chunk in (8, 4, 2, 1):
                if (
                    pages % chunk
                    or (pages * n.page_size > 2048 and pages > 1)
                    or (pages > 1 and pages // 2 >= n.max_pages)
                ):
                    continue
                if chunk > 1 and chunk * scores * _rows(tokens, n.heads) > 1 << 16:
                    continue  # scores beyond a few dozen registers are spilled
                programs = work.most_tiles(n.tokens, n.sequences, tokens)
                splits = work.choose_splits(programs, math.ceil(n.max_pages / pages), cores, most=2 * cores)
                config = PagesConfig(tokens, pages, chunk, splits, cores, form)
                if vmem_bytes(n, dtype, config) <= vmem.limit(call):
                    configs.append(config)
    return configs


def refuses(call: Call) -> str | None:
    n = sizes(call)
    dtype = call.need("query").dtype
    if np.dtype(dtype).name not in ("bfloat16", "float32"):
        return f"the v4 matrix units take bfloat16 and float32, not {dtype}"
    if 0 in (n.tokens, n.heads, n.pages, n.sequences, n.max_pages):
        return "an operand is empty"
    if not 8 <= n.depth <= 256:
        return f"it takes a head_dim from 8 to 256, not {n.depth}"
    misfit = _misfit(n, dtype, form_of(n, dtype, len(call.need("key_pages").shape) == 3))
    if misfit is not None:
        return misfit
    if dtype == jnp.float32 and matmul_precision() in ("high", "tensorfloat32", "bfloat16_3x"):
        return f"Mosaic has no {matmul_precision()!r} precision between one pass and the full six"
    table = 4 * n.sequences * n.max_pages + 7 * 4 * n.tokens
    if table > TABLE_BYTES:
        return f"the page table and the work list take {table} bytes of a core's scalar memory, of {TABLE_BYTES}"
    return None if candidates(call) else "no step of it fits the core's VMEM"


def tpu_forward(
    query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, page_table: jax.Array, context_lengths: jax.Array,
    query_starts: jax.Array | None = None, *, config: PagesConfig, window: int | None, scale: float | None,
    softcap: float | None, key_splits: int | None, return_lse: bool,
) -> Any:  # fmt: skip
    """One Pallas call over the work list; see the module's text."""
    n = sizes_of(query, key_pages, page_table)
    misfit = _misfit(n, query.dtype, config.form)
    if misfit is not None:
        raise rule_error(f"In the form {config.form!r} {misfit}", config, "leave config out, or take another form")
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
    q = query if query_starts is None else query.at[token_rows].get(mode="fill", fill_value=0)
    q = jnp.pad(q.reshape(count, used, n.depth), ((0, 0), (0, rows - used), (0, 0)))
    row = jnp.arange(rows, dtype=jnp.int32)
    plan = Plan(n, config, per_core, window, scale_of(scale, n.depth), softcap, matrix_precision(query.dtype))
    # The head of each column: of the scores, or of a spread query.
    if plan.spread:
        columns = plan.depth
        column_head = jnp.arange(columns, dtype=jnp.int32) // n.depth
    else:
        columns = config.chunk * plan.length
        column_head = jnp.arange(columns, dtype=jnp.int32) % n.kv_heads
    names = ("sequence", "position", "begin", "end", "first", "last")
    scalars = (tiles.sequence, tiles.position, tiles.begin, tiles.end, first, last)
    prefetched = {"table": page_table.reshape(-1)} | dict(zip(names, map(by_item, scalars), strict=True))
    operands = {
        "q": q,
        "row_head": (row % n.heads // n.group)[:, None],
        "row_token": (row // n.heads)[:, None],
        "column_head": column_head[None],
    }
    if plan.spread:
        place = jnp.arange(n.depth, dtype=jnp.int32)[:, None]
        operands["repeat"] = (jnp.arange(columns, dtype=jnp.int32) % n.depth == place).astype(query.dtype)
    operands |= {"k": plan.pool(key_pages), "v": plan.pool(value_pages)}

    def of_item(core: Any, turn: Any, *_: Any) -> Any:
        return turn * cores + core, 0, 0

    def of_tile(core: Any, turn: Any, *_: Any) -> Any:
        return jnp.minimum(jax.lax.div(turn * cores + core, splits), count - 1), 0, 0

    def same(*_: Any) -> Any:
        return 0, 0

    def spec_of(name: str) -> pl.BlockSpec:
        if name in ("k", "v"):
            return pl.BlockSpec(memory_space=pltpu.HBM)
        return pl.BlockSpec((None, rows, n.depth), of_tile) if name == "q" else pl.BlockSpec(operands[name].shape, same)

    buffers: dict[str, Any] = {name: pltpu.VMEM(*buffer) for name, buffer in scratch(plan, rows, query.dtype).items()}
    buffers |= {"arrived": pltpu.SemaphoreType.DMA((SLOTS, 2)), "done": pltpu.SMEM((1,), jnp.int32)}
    outs = {
        "out": out_struct((items, rows, n.depth), query.dtype if splits == 1 else jnp.float32, query),
        "lse": out_struct((items, rows, 1), jnp.float32, query),
    }
    outputs = pl.pallas_call(
        functools.partial(_body, plan=plan, names=(*prefetched, *operands, *outs, *buffers)),
        out_shape=tuple(outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(cores, per_core),
            in_specs=[spec_of(name) for name in operands],
            out_specs=(pl.BlockSpec((None, rows, n.depth), of_item), pl.BlockSpec((None, rows, 1), of_item)),
            scratch_shapes=tuple(buffers.values()),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=current_interpret().pallas_argument(),
        name="capibara_paged_attention",
    )(*vary_alike((*prefetched.values(), *operands.values())))
    return _collect(outputs, query, tiles, token_rows, count, splits, query_starts is not None, return_lse)


def _collect(
    outputs: Any, query: jax.Array, tiles: work.Tiles, token_rows: jax.Array, count: int, splits: int, ragged: bool,
    return_lse: bool,
) -> Any:  # fmt: skip
    """The parts joined, and each row of a tile back at its token."""
    tokens, heads, depth = query.shape
    per_tile = token_rows.shape[1]
    used = per_tile * heads
    out = outputs[0][: count * splits, :used].reshape(count, splits, used, depth)
    lse = outputs[1][: count * splits, :used].reshape(count, splits, used)
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


def _body(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """Grid (core, turn): the tiles and parts of each, dealt out to the cores."""
    refs = dict(zip(names, args, strict=True))
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
    for name, start in (("acc", 0.0), ("m", FLOOR), ("l", 0.0)):
        refs[name][...] = jnp.full_like(refs[name], start)

    @pl.when((steps > 0) & ~fetched)
    def _() -> None:
        _fetch(plan, refs, item, first[item], jax.lax.rem(before, SLOTS))

    if plan.spread:
        _spread_queries(plan, refs)

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
    l_i = refs["l"][...]
    alive = l_i != 0.0  # a NaN among the keys in sight is not nothing, and stays
    safe = jnp.where(alive, l_i, 1.0)
    out = refs["acc"][...] * jnp.where(alive, 1.0 / safe, 0.0)
    refs["out"][...] = (_own_head(plan, refs, out) if plan.spread else out).astype(refs["out"].dtype)
    refs["lse"][...] = jnp.where(alive, refs["m"][...] * math.log(2) + jnp.log(safe), -jnp.inf)


def _fetch(plan: Plan, refs: dict[str, Any], item: Any, block: Any, slot: Any, wait: bool = False) -> None:
    """Start, or wait for, the copies of a block's pages that hold a key in sight; of no other entry of the table."""
    # lax.div and lax.rem: `//` and `%` round towards minus infinity, which nothing here needs and which costs a sign.
    size, pages, length = plan.n.page_size, plan.config.pages, plan.length
    low = jnp.maximum(block * pages, jax.lax.div(refs["begin"][item], size))
    high = jnp.minimum((block + 1) * pages, jax.lax.div(refs["end"][item] + size - 1, size))
    row = refs["sequence"][item] * plan.n.max_pages

    @pl.loop(low, high)
    def _page(column: Any) -> None:
        page = jnp.clip(refs["table"][row + column], 0, plan.n.pages - 1)
        at = plan.part(pl.ds(pl.multiple_of((column - block * pages) * length, length), length))
        for pool, slots, number in (("k", "k_slots", 0), ("v", "v_slots", 1)):
            copy = pltpu.make_async_copy(
                refs[pool].at[page], refs[slots].at[slot, *at], refs["arrived"].at[slot, number]
            )
            copy.wait() if wait else copy.start()


def _spread_queries(plan: Plan, refs: dict[str, Any]) -> None:
    """Each query at its own head's place among all heads', zero elsewhere."""
    q = refs["q"][...]
    # A product with ones and zeros: it copies every query to the place of each head, which no move of lanes does.
    repeated = jax.lax.dot(q, refs["repeat"][...], precision=plan.precision, preferred_element_type=jnp.float32)
    own = refs["row_head"][...] == refs["column_head"][...]
    refs["q_spread"][...] = jnp.where(own, repeated, 0.0).astype(q.dtype)


def _own_head(plan: Plan, refs: dict[str, Any], x: jax.Array) -> jax.Array:
    """Of x [rows, kv_heads * head_dim], each row's own head."""
    head, depth = refs["row_head"][...], plan.n.depth
    # So many heads fill whole lanes: first which of these groups, then which head of it.
    group = math.lcm(depth, LANES)
    heads = group // depth
    own_group = x[:, :group]
    for start in range(group, plan.depth, group):
        own_group = jnp.where(head >= start // depth, x[:, start : start + group], own_group)
    out = own_group[:, :depth]
    for place in range(1, heads):
        moved = pltpu.roll(own_group, group - place * depth, 1)[:, :depth]
        for own in range(place, plan.n.kv_heads, heads):
            out = jnp.where(head == own, moved, out)
    return out


def _compute(plan: Plan, refs: dict[str, Any], item: Any, block: Any, slot: Any, partial: bool) -> None:
    """One step of the online softmax, a chunk of pages at a time. `partial`: some token does not see some key."""
    unit, columns = plan.unit, plan.config.chunk * plan.length
    keys_axis = 1 if plan.turned else 0
    q = refs["q_spread" if plan.spread else "q"][...]
    own_head = None if plan.spread else refs["row_head"][...] == refs["column_head"][...]
    for chunk in range(plan.config.pages // plan.config.chunk):
        at = plan.part(pl.ds(chunk * columns, columns))
        start = block * plan.step_keys + chunk * plan.config.chunk * plan.n.page_size
        keys, values = refs["k_slots"][slot, *at], refs["v_slots"][slot, *at]
        x = jax.lax.dot_general(
            q, keys, (((1,), (1 - keys_axis,)), ((), ())), precision=plan.precision, preferred_element_type=jnp.float32
        )
        if plan.softcap is None:
            x = x * (plan.scale * LOG2_E)
        else:
            x = jnp.tanh(x * (plan.scale / plan.softcap)) * (plan.softcap * LOG2_E)
        allowed = own_head
        if partial:
            # Column c is key start + c // unit; comparing c itself with multiples of the unit needs no division.
            column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            position = refs["row_token"][...] + (refs["position"][item] - start)
            seen = column < (position + 1) * unit
            if plan.window is not None:
                seen = seen & (column >= (position + 1 - plan.window) * unit)
            allowed = seen if allowed is None else allowed & seen
            # A product with zero would keep a NaN alive: rows that no token sees are put to zero.
            row = jax.lax.broadcasted_iota(jnp.int32, values.shape, keys_axis)
            low, high = (refs[name][item] - start for name in ("begin", "end"))
            inside = (row >= low * unit) & (row < high * unit)
            values = jnp.where(inside, values.astype(jnp.float32), 0.0).astype(values.dtype)
        if allowed is not None:
            x = jnp.where(allowed, x, MASKED)
        m_i = refs["m"][...]
        m_next = jnp.maximum(m_i, jnp.max(x, axis=1, keepdims=True))
        p = jnp.exp2(x - m_next)
        alpha = jnp.exp2(m_i - m_next)
        refs["m"][...] = m_next
        refs["l"][...] = refs["l"][...] * alpha + jnp.sum(p, axis=1, keepdims=True)
        refs["acc"][...] = refs["acc"][...] * alpha + jax.lax.dot_general(
            p.astype(values.dtype), values, (((1,), (keys_axis,)), ((), ())),
            precision=plan.precision, preferred_element_type=jnp.float32,
        )  # fmt: skip


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    tpu_forward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=PagesConfig,
    candidates=candidates,
)
