"""Paged attention for Hopper, in Pallas (Mosaic GPU): decoding is a stream of pages, and this keeps it full.

A program is one tile of tokens, one head of the cache and one part of its keys. A warpgroup looks pages up in the
table, one block ahead, and fetches them by TMA into a deep ring; one or two others take blocks in turn and compute
scores, softmax and products on the tensor cores. The query rows that share a head are padded to the 64 that a
product has: the extra rows cost no memory traffic, which is what bounds the kernel. Each computing warpgroup writes
its part's result and log-sum-exp; where there are several, a small XLA program joins them.
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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.attention.paged import tiles as work
from capibara.kernels.ops.attention.paged.rules import Sizes, scale_of, sizes, sizes_of
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES, load, named, refuses_chip, smem_bytes, swizzled

# What a row's maximum starts from: low enough for any score, and finite, so that a row that has seen no key yet
# subtracts it without making a NaN.
LOWEST = -1e30
ROWS = 64  # of a tensor-core product
FETCH_REGISTERS = 40
OUT_COLUMNS = 128  # of the output that leave through shared memory at a time
COMPUTE_REGISTERS = {1: 240, 2: 232}  # by computing warpgroups
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True)


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How the work is cut.

    Attributes:
      tokens: of a tile (1 where the call has no query_starts); times the query heads of a key head, 64 at most.
      keys: of a block: whole pages, or a part of one.
      stages: blocks in the ring.
      warpgroups: that compute, in turn; 1 or 2. They divide `stages`.
      splits: parts along the keys, where the call does not say.
    """

    tokens: int = 1
    keys: int = 64
    stages: int = 4
    warpgroups: int = 1
    splits: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.splits < 1:
            raise rule_error("tokens and splits are 1 or more", self, "raise them")
        if self.keys not in (64, 128, 192, 256):
            raise rule_error("keys is a multiple of 64 up to 256", self.keys, "use 64")
        if self.warpgroups not in (1, 2):
            raise rule_error("warpgroups is 1 or 2", self.warpgroups, "use 1")
        if self.stages < 2 or self.stages % self.warpgroups:
            raise rule_error("stages is 2 or more and a multiple of warpgroups", self.stages, "use 4")


def scratch(config: StreamConfig, n: Sizes, dtype: Any, out_dtype: Any) -> dict[str, Any]:
    """A program's shared memory: the query's rows, the ring of keys and values, each warpgroup's output."""
    block_k, num_stages, computing = config.keys, config.stages, config.warpgroups
    pages = max(1, block_k // n.page_size)  # fetched for a block
    return {
        "q": plgpu.SMEM((ROWS, n.depth), dtype, transforms=swizzled(dtype)),
        "k": plgpu.SMEM((num_stages, block_k, n.depth), dtype, transforms=swizzled(dtype)),
        "v": plgpu.SMEM((num_stages, block_k, n.depth), dtype, transforms=swizzled(dtype)),
        "out": plgpu.SMEM((computing, ROWS, min(n.depth, OUT_COLUMNS)), out_dtype, transforms=swizzled(out_dtype)),
        "lse": plgpu.SMEM((computing, ROWS), jnp.float32),
        "q_arrived": plgpu.Barrier(),
        "k_arrived": plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages),
        "v_arrived": plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages),
        "k_drained": plgpu.Barrier(num_barriers=num_stages),
        "v_drained": plgpu.Barrier(num_barriers=num_stages),
    }


def _fits(config: StreamConfig, n: Sizes, dtype: Any) -> bool:
    if config.keys % n.page_size and n.page_size % config.keys:
        return False
    # With the output in float32, as it is where there are several parts to join.
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
    configs = []
    for keys, warpgroups in ((64, 1), (64, 2), (128, 1), (128, 2), (256, 1)):
        fitting = (
            StreamConfig(tokens, keys, stages, warpgroups) for stages in (6, 5, 4, 3, 2) if not stages % warpgroups
        )
        deepest = next((c for c in fitting if _fits(c, n, dtype)), None)
        if deepest is not None:
            programs = work.most_tiles(n.tokens, n.sequences, tokens) * n.kv_heads
            splits = work.choose_splits(programs, math.ceil(n.capacity / keys), work.cores_of(call))
            configs.append(dataclasses.replace(deepest, splits=splits))
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
    if n.depth not in (64, 128):  # 256 failed on an H200; what was changed since has not run there
        return f"head_dim is 64 or 128 here, not {n.depth}"
    if n.group > ROWS:
        return f"{ROWS} query heads at most share a key head here, not {n.group}"
    if n.page_size % 8:
        return f"a page holds a multiple of 8 keys here, not {n.page_size}"
    if n.kv_heads * n.depth < 128 or n.pages * n.page_size < 16:
        # An axis of a single tile is dropped from the TMA descriptor.
        return f"the pool is {n.pages * n.page_size} keys by {n.kv_heads * n.depth}, and TMA needs 16 by 128 or more"
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
    splits = key_splits or config.splits
    tiles = work.work_list(n.tokens, context_lengths, query_starts, per_tile, window=window, capacity=n.capacity)
    count = tiles.token.shape[0]
    first, last = work.split_blocks(tiles, config.keys, splits)
    token_rows = tiles.rows(per_tile, n.tokens)
    q = query if query_starts is None else query.at[token_rows].get(mode="fill", fill_value=0)
    q = q.reshape(count, per_tile, n.kv_heads, n.group, n.depth).swapaxes(1, 2)
    used = per_tile * n.group
    rows = -(-used // 8) * 8  # TMA moves whole tiles of 8 rows
    q = jnp.pad(q.reshape(count, n.kv_heads, used, n.depth), ((0, 0), (0, 0), (0, rows - used), (0, 0)))
    parts = splits * config.warpgroups
    out_dtype = query.dtype if parts == 1 else jnp.float32
    kernel = plgpu.kernel(
        named(
            "paged_attention", _kernel, n=n, config=config, splits=splits, per_tile=per_tile, rows=rows, window=window,
            scale=scale_of(scale, n.depth), softcap=softcap,
        ),
        out_type=[
            out_struct((count, parts, n.kv_heads, rows, n.depth), out_dtype, query),
            out_struct((count, parts, n.kv_heads, rows), jnp.float32, query),
        ],
        grid=(splits, count, n.kv_heads),
        grid_names=("split", "tile", "head"),
        num_threads=1 + config.warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )  # fmt: skip
    # Every key of every page as a row, every head as columns of it: the same bytes.
    pools = [x.reshape(n.pages * n.page_size, n.kv_heads * n.depth) for x in (key_pages, value_pages)]
    spans = jnp.stack([tiles.sequence, tiles.position, tiles.begin, tiles.end], axis=1)
    out, lse = kernel(q, *pools, page_table, spans, jnp.stack([first, last], axis=2))
    if parts == 1:
        out, lse = out[:, 0], lse[:, 0]
    else:
        out, lse = work.join_splits(out, lse, axis=1)

    def by_token(x: jax.Array, missing: float) -> jax.Array:
        x = x[:, :, :used].reshape(count, n.kv_heads, per_tile, n.group, *x.shape[3:]).swapaxes(1, 2)
        x = x.reshape(count, per_tile, n.heads, *x.shape[4:])
        if query_starts is None:
            return x[:, 0]
        return jnp.full((n.tokens, *x.shape[2:]), missing, x.dtype).at[token_rows].set(x, mode="drop")

    out = by_token(out.astype(query.dtype), 0.0)
    return (out, by_token(lse, -jnp.inf)) if return_lse else out


def _ceil_div(x: Any, by: int) -> Any:
    return lax.div(lax.max(x, x * 0) + (by - 1), by)


def _kernel(
    q_hbm: Any, k_hbm: Any, v_hbm: Any, table_hbm: Any, spans_hbm: Any, blocks_hbm: Any, out_hbm: Any, lse_hbm: Any,
    *, n: Sizes, config: StreamConfig, splits: int, per_tile: int, rows: int, window: int | None, scale: float,
    softcap: float | None,
) -> None:  # fmt: skip
    block_k, num_stages, computing = config.keys, config.stages, config.warpgroups
    depth, dtype = n.depth, q_hbm.dtype
    pages = max(1, block_k // n.page_size)  # fetched for a block
    piece = block_k // pages  # keys of each

    def run_warpgroups(smem: dict[str, Any]) -> None:
        split, tile, head = (lax.axis_index(name) for name in ("split", "tile", "head"))
        warpgroup = lax.axis_index("warpgroup")
        first, last = blocks_hbm[tile, split, 0], blocks_hbm[tile, split, 1]
        begin, end = spans_hbm[tile, 2], spans_hbm[tile, 3]

        @pl.when(warpgroup == computing)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            plgpu.copy_gmem_to_smem(q_hbm.at[tile, head], smem["q"].at[pl.ds(0, rows)], smem["q_arrived"])
            sequence = spans_hbm[tile, 0]
            columns = pl.ds(head * depth, depth)
            first_page = lax.div(begin, n.page_size)
            last_page = lax.max(lax.div(end - 1, n.page_size), first_page)

            def page_of(block: Any, number: int) -> Any:
                """Of the pages in sight only: past the last, it is named again, and masked. Never outside the pool."""
                at = lax.div(block * block_k + number * piece, n.page_size)
                page = table_hbm[sequence, lax.clamp(first_page, at, last_page)]
                return lax.clamp(page * 0, page, page * 0 + (n.pages - 1))

            def fetch(block: Any, ahead: tuple[Any, ...]) -> tuple[Any, ...]:
                slot = lax.rem(block - first, num_stages)
                # The table is read a block ahead, while the ring is waited for.
                following = tuple(page_of(block + 1, number) for number in range(pages))
                inside = lax.rem(block * block_k, n.page_size) if pages == 1 else 0
                for name, source in (("k", k_hbm), ("v", v_hbm)):

                    @pl.when(block - first >= num_stages)
                    def _(name: str = name) -> None:
                        plgpu.barrier_wait(smem[f"{name}_drained"].at[slot])

                    for number, page in enumerate(ahead):
                        keys = pl.ds(page * n.page_size + inside, piece)
                        target = smem[name].at[slot]
                        if pages > 1:
                            target = smem[name].at[slot, pl.ds(number * piece, piece)]
                        plgpu.copy_gmem_to_smem(source.at[keys, columns], target, smem[f"{name}_arrived"].at[slot])
                return following

            @pl.when(first < last)
            def _() -> None:
                pages_of_first = tuple(page_of(first, number) for number in range(pages))
                _steps(first, last, fetch, pages_of_first)

        @pl.when(warpgroup < computing)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS[computing], action="increase")
            position = spans_hbm[tile, 1]
            layout = plgpu.Layout.WGMMA

            def visible(start: Any) -> Any:
                """Which pairs of a row and a key of the block at `start` see each other."""
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS, block_k), 0, layout=layout)
                key = plgpu.broadcasted_iota(jnp.int32, (ROWS, block_k), 1, layout=layout) + start
                if per_tile == 1:
                    row = row * 0
                else:
                    row = lax.shift_right_logical(row, int(math.log2(n.group)))
                row = row + position
                seen = key <= row
                return seen if window is None else seen & (key > row - window)

            def blank(slot: Any, start: Any) -> None:
                """Zeros for the values of a block that no row sees: a product with zero would keep a NaN alive."""
                for at in range(0, block_k, 64):
                    part = smem["v"].at[slot, pl.ds(at, 64)]
                    key = plgpu.broadcasted_iota(jnp.int32, (64, depth), 0, layout=layout) + (start + at)
                    value = load(part, layout)
                    part[...] = jnp.where((key >= begin) & (key < end), value, jnp.zeros_like(value))
                plgpu.commit_smem()

            def step(turn: Any, carry: Any, masked: bool) -> Any:
                acc, m_i, l_i = carry
                block = first + warpgroup + turn * computing
                slot = lax.rem(block - first, num_stages)
                plgpu.barrier_wait(smem["k_arrived"].at[slot])

                def scores(ref: Any) -> Any:
                    plgpu.wgmma(ref, smem["q"], smem["k"].at[slot].transpose((1, 0)))
                    return ref[...]

                s = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((ROWS, block_k), jnp.float32))
                plgpu.barrier_arrive(smem["k_drained"].at[slot])
                unit = scale * LOG2E
                if softcap is not None:
                    # tanh from an exponential, which the hardware has.
                    s = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * scale * LOG2E / softcap)))
                    unit = softcap * LOG2E
                # Scaled before it is masked: minus infinity times a negative scale would be plus infinity.
                s = s * unit
                if masked:
                    s = jnp.where(visible(block * block_k), s, -jnp.inf)
                m_next = jnp.maximum(m_i, s.max(axis=1))
                alpha = jnp.exp2(m_i - m_next)
                p = jnp.exp2(s - lax.broadcast_in_dim(m_next, s.shape, [0]))
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                l_i = l_i * alpha + p.sum(axis=1)
                p16 = p.astype(dtype)
                plgpu.barrier_wait(smem["v_arrived"].at[slot])
                if masked:
                    blank(slot, block * block_k)

                def add_values(ref: Any) -> None:
                    plgpu.wgmma(ref, p16, smem["v"].at[slot])

                acc = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc))
                plgpu.barrier_arrive(smem["v_drained"].at[slot])
                return acc, m_next, l_i

            # This warpgroup's turns; those in the middle, whose blocks every row sees whole, need no mask.
            turns = _ceil_div(last - first - warpgroup, computing)
            whole_end = lax.div(lax.max(position + 1, position * 0), block_k)
            stop = lax.min(_ceil_div(whole_end - first - warpgroup, computing), turns)
            start = turns * 0
            if window is not None:
                whole_begin = _ceil_div(end - window, block_k)
                start = lax.min(_ceil_div(whole_begin - first - warpgroup, computing), turns)
                stop = lax.max(stop, start)
            plgpu.barrier_wait(smem["q_arrived"])
            carry = (
                plgpu.layout_cast(jnp.full((ROWS, depth), 0, jnp.float32), layout),
                plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), layout.reduce(1)),
                plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), layout.reduce(1)),
            )
            if window is not None:
                carry = _steps(turns * 0, start, functools.partial(step, masked=True), carry)
            carry = _steps(start, stop, functools.partial(step, masked=False), carry)
            acc, m_i, l_i = _steps(stop, turns, functools.partial(step, masked=True), carry)

            alive = l_i != 0  # a NaN among the keys in sight is not nothing, and stays
            inverse = jnp.where(alive, 1.0 / jnp.where(alive, l_i, 1.0), 0.0)
            acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
            lse = (m_i + jnp.log2(jnp.where(alive, l_i, 1.0))) / LOG2E
            smem["lse"][warpgroup] = jnp.where(alive, lse, -jnp.inf)
            part = split * computing + warpgroup
            kept = pl.ds(0, rows)
            width = smem["out"].shape[-1]
            for at in range(0, depth, width):
                if at:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                smem["out"][warpgroup] = acc[:, at : at + width].astype(out_hbm.dtype)
                plgpu.commit_smem()
                target = out_hbm.at[tile, part, head, :, pl.ds(at, width)]
                plgpu.copy_smem_to_gmem(smem["out"].at[warpgroup, kept], target)
            plgpu.copy_smem_to_gmem(smem["lse"].at[warpgroup, kept], lse_hbm.at[tile, part, head])
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(run_warpgroups, scratch(config, n, dtype, out_hbm.dtype), collective_axes="warpgroup")


def _steps(first: Any, last: Any, body: Any, carry: Any) -> Any:
    """fori_loop, counted from zero: in shard_map a count that starts from what was read from an operand varies over the
    mesh, and one that is added to does not."""
    zero = lax.axis_index("warpgroup") * 0
    return lax.fori_loop(zero, last - first, lambda n, carry: body(first + n, carry), carry)


IMPLEMENTATION = Implementation(
    "hopper",
    hopper_forward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=StreamConfig,
    candidates=candidates,
)
