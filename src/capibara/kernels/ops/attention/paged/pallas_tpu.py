"""Paged attention for the TPU's matrix units, in Pallas (Mosaic): prompts and single tokens in one kernel.

The page table, the lengths and the work list are read ahead (scalar prefetch). Pages of the next step, or of the next
tile's first, are fetched while this step is computed; pages without a key in sight are not fetched. The first axis of
the grid is the chip's cores, the second the tiles and parts of each. The body and the forms that it reads a page in are
in pallas_tpu_body.
"""

from __future__ import annotations

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
from capibara.kernels.core.context import current_interpret, matmul_precision
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.attention.paged import tiles as work
from capibara.kernels.ops.attention.paged.pallas_tpu_body import SLOTS, PagesConfig, Plan, body
from capibara.kernels.ops.attention.paged.rules import Sizes, scale_of, sizes, sizes_of
from capibara.kernels.ops.attention.pallas_tpu_common import LANES, matrix_precision, round_up
from capibara.kernels.ops.attention.pallas_tpu_config import TABLE_BYTES, tile_bytes
from capibara.kernels.pallas import vmem


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


def vmem_bytes(n: Sizes, dtype: Any, config: PagesConfig) -> int:
    """Two slots of keys and values, two of the query's and the output's blocks, the scratch, a chunk's temporaries."""
    plan = Plan(n, config, 1, None, 1.0, None, None)
    rows = _rows(config.tokens, n.heads)
    used = 2 * SLOTS * tile_bytes(*plan.matrix(config.pages), dtype)
    used += 2 * tile_bytes(rows, n.depth, dtype) + 2 * tile_bytes(rows, n.depth, np.float32)
    used += 8 * tile_bytes(rows, 1, np.float32) + tile_bytes(rows, plan.depth, np.float32)
    if plan.spread:
        used += 2 * tile_bytes(n.depth, plan.depth, dtype)
        used += tile_bytes(rows, plan.depth, dtype) + 2 * tile_bytes(rows, plan.depth, np.float32)
    scores = tile_bytes(rows, config.chunk * plan.length, np.float32)
    return used + 6 * scores + 3 * tile_bytes(*plan.matrix(config.chunk), np.float32)


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
                if chunk > 1 and chunk * scores * _rows(tokens, n.heads) > 1 << 16:
                    continue  # scores beyond a few dozen registers are spilled
                programs = work.most_tiles(n.tokens, n.sequences, tokens)
                splits = work.choose_splits(programs, math.ceil(n.max_pages / pages), cores, most=2 * cores)
                config = PagesConfig(tokens, pages, chunk, splits, cores, form)
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
    misfit = _misfit(n, dtype, form_of(n, dtype, len(call.need("key_pages").shape) == 3))
    if misfit is not None:
        return misfit
    if dtype == jnp.float32 and matmul_precision() in ("high", "tensorfloat32", "bfloat16_3x"):
        return f"Mosaic has no {matmul_precision()!r} precision between one pass and the full six"
    table = 4 * n.sequences * n.max_pages + 7 * 4 * n.tokens
    if table > TABLE_BYTES:
        return f"the page table and the work list take {table} bytes of a core's scalar memory, of {TABLE_BYTES}"
    return None if candidates(call) else "no step of it fits the core's VMEM"


def pallas_tpu(
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
    held = query if query_starts is None else query.at[token_rows].get(mode="fill", fill_value=0)
    held = jnp.pad(held.reshape(count, used, n.depth), ((0, 0), (0, rows - used), (0, 0)))
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
        "q": held,
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

    slots = pltpu.VMEM((SLOTS, *plan.matrix(config.pages)), key_pages.dtype)
    scratch = {
        "k_slots": slots,
        "v_slots": slots,
        "acc": pltpu.VMEM((rows, plan.depth), jnp.float32),
        "highest": pltpu.VMEM((rows, 1), jnp.float32),
        "total": pltpu.VMEM((rows, 1), jnp.float32),
        "arrived": pltpu.SemaphoreType.DMA((SLOTS, 2)),
        "done": pltpu.SMEM((1,), jnp.int32),
    }
    if plan.spread:
        scratch["q_spread"] = pltpu.VMEM((rows, plan.depth), query.dtype)
    outs = {
        "out": out_struct((items, rows, n.depth), query.dtype if splits == 1 else jnp.float32, query),
        "lse": out_struct((items, rows, 1), jnp.float32, query),
    }
    made = pl.pallas_call(
        functools.partial(body, plan=plan, names=(*prefetched, *operands, *outs, *scratch)),
        out_shape=tuple(outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(cores, per_core),
            in_specs=[spec_of(name) for name in operands],
            out_specs=(pl.BlockSpec((None, rows, n.depth), of_item), pl.BlockSpec((None, rows, 1), of_item)),
            scratch_shapes=tuple(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=current_interpret().pallas_argument(),
        name="capibara_paged_attention",
    )(*vary_alike((*prefetched.values(), *operands.values())))
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
