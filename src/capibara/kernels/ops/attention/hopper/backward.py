"""Attention backward for Hopper's tensor cores, in Pallas (Mosaic GPU): five products, one kernel.

A program has a tile of keys of one key head and goes over the queries that see them, of every query head that shares
the key head, or of some of these where the programs would be few and long. The gradients of its keys and values stay in
registers until the end, and are then written, or added to sums of several programs; the gradient of the queries is a
sum over programs, added by the copy engine, in float32 but for short rows of keys. The order of that sum is the order
in which programs arrive, so dq may differ in its last bits from run to run, those of 16 where the sums are rounded.

Steps of queries that see none of the keys are never fetched: by position they are left out of a range, by the
operands (block mask, segments, mask) out of a table. Keys that nobody sees have no effect and get zeros, NaN included,
where they have none in the forward pass.

Here is what XLA prepares, and the launch; the kernels, one for head_dim up to 128 and one for more, are in
backward_loops.py, and one for 192 and 256 in backward_divided.py; what they share is in backward_steps.py.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error, say_once
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike, vary_like
from capibara.kernels.ops.attention.hopper import calls
from capibara.kernels.ops.attention.hopper.backward_divided import DIVIDED
from capibara.kernels.ops.attention.hopper.backward_loops import NARROW, WIDE
from capibara.kernels.ops.attention.hopper.backward_steps import (
    COUNTS,
    WORD,
    HopperGradConfig,
    Lines,
    Loop,
    Plan,
    sums_dtype,
)
from capibara.kernels.ops.attention.hopper.calls import (
    AHEAD_OF_CUDNN,
    BEHIND_CUDNN,
    HEADS_TOGETHER,
    TILES_TOGETHER,
    best_order,
)
from capibara.kernels.ops.attention.hopper.masking import (
    DEAD,
    WHOLE,
    Band,
    Grid,
    laid_out,
    pad_to,
    pad_to_blocks,
)
from capibara.kernels.ops.attention.hopper.panels import Columns, aligned
from capibara.kernels.ops.attention.hopper.walks import programs_of_keys, tiles_of_steps
from capibara.kernels.ops.attention.masking import FAR, both, expand_blocks, may_be_dead, span, without_dead_queries
from capibara.kernels.ops.attention.rules import window_of
from capibara.kernels.pallas import prng
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES, smem_bytes

logger = logging.getLogger(__name__)

# Keys that a row sees beside its own: windows of fewer are slower than cuDNN's, but for sums that are rounded.
NARROWEST = 511
# On an H200 steps of 64 queries took 1.07 times as long as steps of 128 with as many pairs, and as long with 0.857 of
# them.
WORTH_64 = 0.85
# Columns of a step's dq that leave at a time, where roles are divided: on an H200 64 of 256 made a pass 1.1 times as
# fast as 32, and those, with one stage of the output's gradients fewer, 1.08 times as fast as 16.
DQ_COLUMNS = {192: 96, 256: 64}
# Tiles of keys that a query sees in the mean, up to which sums of dq are rounded with each: dq of 1,024 tokens with
# causality, in tiles of 128, is off by 3.0e-3 in norm then, of 512 without causality by 3.6e-3, and by 2.4e-3 with sums
# in float32 (simulated). In float16 a part of a sum may be too large where the whole is not.
MOST_ROUNDED = 4.5
LONGEST_AHEAD_192 = 3072  # queries of heads of 192, with all of whose lengths that were timed up to here it was ahead
VERY_LONG = 32768  # queries, from which on sums of dq are a large part of the memory, and go in two launches


def _loop(head_dim: int, config: HopperGradConfig) -> Loop:
    if head_dim <= 128:
        return NARROW
    return DIVIDED if config.divided else WIDE


def _divides_roles(head_dim: int, params: Mapping[str, Any]) -> bool:
    """Whether the kernel of divided roles takes the call: whoever has the gradients of the scores knows of these only
    the rounded probabilities, and dq leaves by whole tiles of a half of the columns."""
    return head_dim in DQ_COLUMNS and params["softcap"] is None and not params["dropout_rate"]


def tile_of_keys(config: HopperGradConfig, head_dim: int) -> int:
    """Keys of a program."""
    return _loop(head_dim, config).tile


def _sharers(config: HopperGradConfig, group: int) -> int:
    """Query heads of a program."""
    sharers = config.sharers or group
    if group % sharers:
        raise rule_error("sharers divides the query heads of a key head", f"{sharers} of {group}", "use sharers=0")
    return sharers


def _settled(config: HopperGradConfig, head_dim: int, params: Mapping[str, Any]) -> HopperGradConfig:
    """Without divided roles where they cannot be."""
    return dataclasses.replace(config, divided=config.divided and _divides_roles(head_dim, params))


def _block_q(call: Call) -> int:
    """Of narrow heads 128 queries a step are sooner, but in windows, and where many more of their pairs are outside of
    the call."""
    below, above = span(bool(call.params["causal"]), cast(int, call.params["q_offset"]), window_of(call))
    if call.need("q").shape[-1] > 64 or above - below < NARROWEST:
        return 64
    pairs = {block_q: block_q * tiles_of_steps(_grid(call, NARROW.tile, block_q)).sum() for block_q in (64, 128)}
    return 128 if pairs[64] > WORTH_64 * pairs[128] else 64


def _grid(call: Call, tile: int, block_q: int) -> Grid:
    length, keys = call.need("q").shape[2], call.need("k").shape[2]
    below, above = span(bool(call.params["causal"]), cast(int, call.params["q_offset"]), window_of(call))
    return Grid(length, Band(below, above, keys), block_q, tile)


def _columns_of(q: Any, k: Any, config: HopperGradConfig) -> Columns:
    head_dim = aligned(q.shape[-1], q.dtype)
    return _loop(head_dim, config).columns(config, head_dim, q.dtype, (q.shape[2], k.shape[2]))


def _divides(block_size: tuple[int, int], block_q: int, tile: int) -> bool:
    """Whether every tile of the kernel lies inside one block of the caller's block mask."""
    return block_size[0] % block_q == 0 and block_size[1] % tile == 0


def _fits(call: Call, config: HopperGradConfig) -> bool:
    q, k, mask = call.need("q"), call.need("k"), call["mask"]
    size: Any = call.params["block_size"]
    config = _settled(config, q.shape[-1], call.params)
    loop = _loop(q.shape[-1], config)
    cut = call["block_mask"] is not None and not _divides(size, config.block_q, loop.tile)
    # A mask of one row for all queries is counted like one of pairs.
    mask_words = config.block_q // WORD if mask is not None or cut else 0
    lines = Lines(call["q_segments"] is not None, bool(call.params["dropout_rate"]), mask_words)
    return smem_bytes(loop.scratch(config, _columns_of(q, k, config), q.dtype, lines)) <= SMEM_BYTES


def candidates(call: Call) -> Sequence[HopperGradConfig]:
    head_dim = call.need("q").shape[-1]
    block_q = _block_q(call)
    orders = (HEADS_TOGETHER, TILES_TOGETHER)
    configs = [HopperGradConfig(block_q, num_stages, order) for num_stages in (2, 3) for order in orders]
    if _divides_roles(head_dim, call.params):
        configs = [*(_divided(head_dim, order) for order in reversed(orders)), *configs]
    default = default_config(call)
    configs = [default, *(dataclasses.replace(c, rounded=default.rounded) for c in configs)]
    return list(dict.fromkeys(c for c in configs if _fits(call, c)))


def _divided(head_dim: int, order: str = TILES_TOGETHER) -> HopperGradConfig:
    return HopperGradConfig(order=order, divided=True, do_stages=1, dq_columns=DQ_COLUMNS[head_dim])


def default_config(call: Call) -> HopperGradConfig:
    head_dim = call.need("q").shape[-1]
    made = [HopperGradConfig(_block_q(call))]
    if _divides_roles(head_dim, call.params):
        made.insert(0, _divided(head_dim))
    return for_call(next((c for c in made if _fits(call, c)), made[-1]), call)


def for_call(config: HopperGradConfig, call: Call) -> HopperGradConfig:
    """The same tiles, shared out as this call's are done soonest. Of a very long one the sums of dq, in float32, are a
    quarter of what it takes; two parts need half of that."""
    q, k = call.need("q"), call.need("k")
    config = _settled(config, q.shape[-1], call.params)
    if q.shape[2] >= VERY_LONG and k.shape[1] % 2 == 0:
        return dataclasses.replace(config, order=best_order(q.shape[-1]), parts=2, sharers=0, rounded=False)
    tile = tile_of_keys(config, q.shape[-1])
    shared = programs_of_keys(call, tile, config.block_q)
    rounded = q.dtype == jnp.bfloat16 and not shared["sharers"] and _additions(call, tile) <= MOST_ROUNDED
    return dataclasses.replace(config, parts=1, rounded=rounded, **shared)


def _additions(call: Call, tile: int) -> float:
    """Tiles of keys that a query sees by position, and that are added to its gradient: in the mean of those that see
    any."""
    added = tiles_of_steps(_grid(call, tile, 64))
    return float(added.sum()) / max(int((added > 0).sum()), 1)


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200, alone, it was ahead of cuDNN at head_dim 64 (8 to 24 %, but level at 8 x 1,024 tokens without
    causality), and at 128 up to 4k (up to 17 %, but 4 to 10 % behind where 4 to 8 query heads share keys), and since it
    has scores ahead at 16k, where four query heads share keys, by 1 to 5 %; at lengths that are no multiple of 8 it was
    behind, by 6 % at 5.6k and, without causality, by 10 %. At 256, with divided roles, it was ahead by 13 to 23 %, and
    3 % behind at 5,827 tokens; at 192 ahead by 3 to 12 % from 430 to 3,000 tokens, 10 % behind at 4,096, and level at
    4,927. Where columns come in panels it was behind by 1 to 27 % at most of the head sizes from 72 to 240, and level
    at 112, but with a window of 512 keys, where programs skip what lies outside, ahead by 23 %. With rounded sums both
    passes were ahead by 3 to 47 % from 257 to 1,024 tokens in heads of 64, 128, 192 and 256, level in heads of 80 and
    96, and ahead by 9 to 33 % with windows of 128 and 256 keys. Very long calls go in two parts, which take half
    of the memory that cuDNN wants beside the gradients: both passes of 32k, 8 heads of 128, take 0.97 of the time;
    where query heads share keys they took 1.07 to 1.13 times the time before scores were ahead, and were not timed
    since."""
    heads, length, head_dim = call.need("q").shape[1:]
    below, above = span(bool(call.params["causal"]), 0, window_of(call))
    config = default_config(call)
    if above - below < FAR:
        timed = config.rounded and head_dim in (64, 128) and above == 0
        return AHEAD_OF_CUDNN if above - below >= NARROWEST or timed else BEHIND_CUDNN
    if config.divided and (head_dim == 256 or max(length, call.need("k").shape[2]) <= LONGEST_AHEAD_192):
        return AHEAD_OF_CUDNN
    if head_dim > 128 or head_dim % 64:
        return BEHIND_CUDNN
    if above == FAR and length % 8:
        return AHEAD_OF_CUDNN if head_dim == 64 else BEHIND_CUDNN
    for_memory = length >= VERY_LONG and call.need("k").shape[1] == heads
    whole = length < VERY_LONG and length % 8 == 0
    return AHEAD_OF_CUDNN if head_dim == 64 or length <= 4096 or whole or for_memory else BEHIND_CUDNN


def refuses(call: Call) -> str | None:
    q, k = call.need("q"), call.need("k")
    if call["bias"] is not None:
        return "its backward pass has no form with bias, whose own gradient it would have to sum"
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    return calls.refuses(call)


def hopper_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: None, mask: jax.Array | None, q_segments: jax.Array | None,
    kv_segments: jax.Array | None, block_mask: jax.Array | None, dropout_seed: jax.Array | None,
    out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None = None, *, config: HopperGradConfig,
    causal: bool = False, q_offset: int = 0, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, dropout_rate: float = 0.0,
    block_size: tuple[int, int] | None = None, physical: str = "bhtd",
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(dq, dk, dv, None); see the module's text."""
    batch, heads, length, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    asked, config = config, _settled(config, head_dim, {"softcap": softcap, "dropout_rate": dropout_rate})
    if asked != config:
        text = "attention's gradient has no divided roles for this call, and goes without them: head_dim %d%s%s"
        why = ", a soft cap" if softcap is not None else "", ", dropout" if dropout_rate else ""
        say_once(logger, (head_dim, *why), text, head_dim, *why)
    loop = _loop(head_dim, config)
    below, above = span(causal, q_offset, window)
    grid = Grid(length, Band(below, above, keys), config.block_q, loop.tile)
    params = {"causal": causal, "q_offset": q_offset, "window": window}
    sharers = _sharers(config, heads // kv_heads)
    programs = heads // kv_heads // sharers
    of_programs = heads, kv_heads * programs
    operands = mask_operands(grid, of_programs, mask, q_segments, kv_segments, block_mask, block_size, params)
    if dropout_rate:
        assert dropout_seed is not None  # the op's check has seen to it
        operands["row_keys"] = _dropout_row_keys(dropout_seed, batch, heads, length, config.block_q)
    k, v = _hide_unseen(grid, k, v)
    by_data = any(x is not None for x in (mask, q_segments, block_mask))
    if may_be_dead(length, keys, causal, q_offset, window, by_data):
        q, d_out, out = without_dead_queries(lse, q, d_out, out)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse.astype(jnp.float32)
    # A query that sees nothing, and the rows past the last, have probabilities of zero: 2^(s - infinity).
    log2_lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse.astype(jnp.float32) * LOG2E)
    # Lines of one number a row are fetched without a TMA descriptor, so they are made long enough for whole steps.
    beyond = -length % config.block_q
    log2_lse = jnp.pad(log2_lse, ((0, 0), (0, 0), (0, beyond)), constant_values=jnp.inf)
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, beyond)))

    # Exchanged before padding and after cutting: an exchange then cancels with the caller's own.
    q, k, v, d_out = (laid_out(x, physical) for x in (q, k, v, d_out.astype(q.dtype)))
    q, k, v, d_out = (pad_to(x, (0, 0, 0, aligned(head_dim, q.dtype))) for x in (q, k, v, d_out))
    plan = Plan(
        config=config, tile=loop.tile, keys=keys, length=length, sharers=sharers, programs=programs, offset=q_offset,
        left=left, right=right, scale=1 / math.sqrt(head_dim) if scale is None else scale, softcap=softcap,
        physical=physical, dropout_rate=dropout_rate,
    )  # fmt: skip
    arrays = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": log2_lse, "delta": delta} | operands
    arrays = dict(zip(arrays, vary_alike(tuple(arrays.values())), strict=True))
    dq, dk, dv = _launch(loop, plan, arrays)

    dq, dk, dv = (laid_out(x[..., :head_dim], physical) for x in (dq, dk, dv))
    return dq, dk, dv, None


def _launch(loop: Loop, plan: Plan, arrays: dict[str, jax.Array]) -> tuple[Any, Any, Any]:
    """(dq, dk, dv), as the operands lie in memory."""
    q, k = arrays["q"], arrays["k"]
    head_axis = 1 if plan.physical == "bhtd" else 2
    kv_heads, parts = k.shape[head_axis], plan.config.parts
    if kv_heads % parts:
        raise rule_error("parts divides the number of key heads", f"{parts} of {kv_heads}", "use parts=1")
    part_heads = kv_heads // parts * plan.programs
    sum_shape = [size if axis != head_axis else part_heads * plan.sharers for axis, size in enumerate(q.shape)]
    sizes = {"tile": math.ceil(plan.keys / loop.tile), "head": part_heads, "batch": q.shape[0]}
    names = tuple(plan.config.order.split())
    outs = [out_struct(k.shape, k.dtype, q)] * 2

    def kernel(part: int, out_type: Any) -> Any:
        # pl.kernel, since plgpu.kernel takes no array to add into.
        return pl.kernel(
            functools.partial(
                loop.kernel,
                plan=dataclasses.replace(plan, first_head=part * part_heads),
                names=(*arrays, "dq", "dk", "dv"),
            ),
            out_type=out_type,
            mesh=plgpu.Mesh(
                grid=tuple(sizes[name] for name in names), grid_names=names, num_threads=3, thread_name="warpgroup"
            ),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            name="attention_backward",
        )

    def finished(dq_sum: Any) -> Any:
        # Inside shard_map a kernel takes no reference that varies over the mesh, so the sums are marked afterwards.
        dq_sum = vary_like(dq_sum, q)
        return dq_sum if plan.config.rounded else (dq_sum * plan.scale).astype(q.dtype)

    # References that live in run_state alone: custom_vmap, which stands around this, takes no function that makes one
    # for itself.
    if parts == 1:
        # Zeros that are known beforehand the compiler makes for all layers at once, before the first one's gradient.
        varies = jax.typeof(q).manual_axis_type.varying
        zero = 0.0 if varies else _zero_after(arrays["d_out"])
        zeros = jnp.full(sum_shape, zero, sums_dtype(plan.config, q.dtype))
        if plan.adds_keys:
            key_zeros = jnp.full(k.shape, zero, jnp.float32)
            sums = pl.run_state(lambda refs: kernel(0, ())(*arrays.values(), *refs))((zeros, key_zeros, key_zeros))
            return finished(sums[0]), *(vary_like(x, q).astype(k.dtype) for x in sums[1:])

        def whole(refs: tuple[Any, Any, Any]) -> None:
            dq_sum, dk, dv = refs
            dk[...], dv[...] = kernel(0, outs)(*arrays.values(), dq_sum)

        # What dk and dv start from is overwritten and never made.
        empty = vary_like(jnp.zeros(k.shape, k.dtype), q)
        dq_sum, dk, dv = pl.run_state(whole)((zeros, empty, empty))
        return finished(dq_sum), dk, dv

    # dq starts from numbers that the compiler does not know, all of which are written over: from zeros it would put the
    # parts together at the end, with all sums in memory.
    dq, dk, dv = q, jnp.zeros(k.shape, k.dtype), jnp.zeros(k.shape, k.dtype)
    for part in range(parts):

        def one_part(refs: tuple[Any, Any, Any], part: int = part) -> None:
            kernel(part, ())(*arrays.values(), *refs)

        dq_sum, dk, dv = pl.run_state(one_part)((jnp.full(sum_shape, _zero_after(dq)), dk, dv))
        dq = jax.lax.dynamic_update_slice_in_dim(dq, finished(dq_sum), part * sum_shape[head_axis], head_axis)
        dq = jax.lax.optimization_barrier(dq)
    return dq, vary_like(dk, q), vary_like(dv, q)


def _zero_after(x: jax.Array) -> jax.Array:
    """A zero that the compiler cannot make before `x`: sums that start from it are not in memory beside the last ones.

    A barrier for the optimiser would be gone before the compiler decides what runs when.
    """
    first = jax.lax.bitcast_convert_type(x[(0,) * x.ndim], jnp.uint16)
    return (jax.lax.population_count(first) // 64).astype(jnp.float32)  # of 16 bits


def mask_operands(
    grid: Grid, heads: tuple[int, int], mask: Any, q_segments: Any, kv_segments: Any, block_mask: Any,
    block_size: Any, params: dict[str, Any],
) -> dict[str, jax.Array]:  # fmt: skip
    """The kernel's operands that say who sees whom, by name; none where position alone decides.

    `heads` are those of the queries, and the sets of them that programs have: of a key head all or a part. Positions
    are in `params`, as the op has them.
    """
    if block_mask is not None and not _divides(block_size, grid.block_q, grid.block_k):
        # Blocks that cut through a tile: from here on it is a mask of pairs.
        pairs = expand_blocks(block_mask, jnp.arange(grid.rows), jnp.arange(grid.band.columns), block_size)
        mask, block_mask = both(mask, pairs), None
    if all(x is None for x in (mask, q_segments, block_mask)):
        return {}
    visible = grid.visible_keys(mask, q_segments, kv_segments, params)
    if visible is not None and visible.shape[1] > 1:  # a key is seen when one of the heads that share it sees it
        visible = visible.reshape(visible.shape[0], heads[1], -1, visible.shape[-1]).any(2)
    kinds = grid.kinds(mask, q_segments, kv_segments, block_mask, block_size)
    operands = {"table": step_table(grid, heads, kinds, visible)}
    if visible is not None:
        operands["visible"] = pad_to_blocks(visible.astype(jnp.int32), grid.block_k)
    if q_segments is not None:
        operands["q_segments"] = pad_to_blocks(q_segments, grid.block_q)
        operands["kv_segments"] = pad_to_blocks(kv_segments, grid.block_k)
    if mask is not None:
        operands["mask"] = packed_mask(mask, grid)
    return operands


def step_table(grid: Grid, heads: tuple[int, int], kinds: jax.Array, visible: Any) -> jax.Array:
    """The live steps of each tile of keys, int32 [B|1, sets|1, tiles of keys, COUNTS + steps of all members + 1].

    First the counts, then `member * steps + step` for each live step of the query heads of a set, those that see all of
    the tile's keys first. One entry more than steps: the kernel reads one ahead. Tiles start
    at different steps, so that their sums into dq do not meet in the same rows.
    """
    query_heads, sets = heads
    group = query_heads // sets
    batch, per_head, steps, tiles = kinds.shape
    kinds = jnp.swapaxes(kinds, 2, 3).reshape(batch, -1, 1 if per_head == 1 else group, tiles, steps)
    kinds = jnp.broadcast_to(jnp.swapaxes(kinds, 2, 3), (batch, kinds.shape[1], tiles, group, steps))
    start = jnp.arange(tiles)[:, None, None] * grid.block_k // grid.block_q
    turn = jnp.arange(group)[:, None] * steps + (jnp.arange(steps) - start) % steps
    flat = (*kinds.shape[:3], group * steps)
    kinds, turn = kinds.reshape(flat), jnp.broadcast_to(turn, kinds.shape).reshape(flat)
    order = jnp.argsort(kinds * (group * steps) + turn, axis=-1)
    counts = [(kinds == WHOLE).sum(-1, keepdims=True), (kinds != DEAD).sum(-1, keepdims=True)]
    unseen = jnp.zeros_like(counts[0])
    if visible is not None:
        per_tile = jnp.pad(visible, ((0, 0), (0, 0), (0, -visible.shape[-1] % grid.block_k)), constant_values=True)
        unseen = ~per_tile.reshape(*visible.shape[:2], tiles, grid.block_k).all(-1, keepdims=True)
    columns = [x.astype(jnp.int32) for x in (*counts, unseen, order, jnp.zeros_like(counts[0]))]
    assert sum(x.shape[-1] for x in columns) == COUNTS + group * steps + 1
    lead = jnp.broadcast_shapes(*(x.shape[:3] for x in columns))
    return jnp.concatenate([jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in columns], axis=-1)


def packed_mask(mask: jax.Array, grid: Grid) -> jax.Array:
    """A mask [B|1, H|1, T, S] as int32 [B|1, H|1, T / 32, S] in whole tiles, bit i of a word for its query i.

    The kernel's tiles are keys by queries: one number a key then holds what a step of 32 queries may see of it, it is
    read as it lies, and it takes an eighth of the mask's memory. One row for all queries stays one line of zeros and
    ones.
    """
    batch, heads, rows, keys = mask.shape
    widths = ((0, 0), (0, 0), (0, 0 if rows == 1 else -rows % grid.block_q), (0, -keys % grid.block_k))
    mask = jnp.pad(mask, widths)
    if rows == 1:
        return mask.astype(jnp.int32)
    bits = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))[:, None]
    words = mask.reshape(batch, heads, -1, WORD, mask.shape[-1])
    return jax.lax.bitcast_convert_type(jnp.where(words, bits, jnp.uint32(0)).sum(3, dtype=jnp.uint32), jnp.int32)


def _dropout_row_keys(seed: jax.Array, batch: int, heads: int, rows: int, block_q: int) -> jax.Array:
    """The part of dropout's generator that is computed once a query, int32 [2, B, H, T] in whole steps.

    A transposed tile has each query in 32 threads, so it is cheaper made here once and streamed.
    """
    numbers = jnp.arange(batch * heads * rows, dtype=jnp.uint32).reshape(batch, heads, rows)
    words = jnp.stack(prng.row_keys(seed, numbers))
    return pad_to_blocks(jax.lax.bitcast_convert_type(words, jnp.int32), block_q)


def _hide_unseen(grid: Grid, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Keys or values [B, H, S, D], zero where position hides them from every query: zero times NaN would be NaN."""
    first, end = grid.seen
    if (first, end) == (0, grid.band.columns):
        return arrays
    number = jnp.arange(grid.band.columns)[:, None]
    return tuple(jnp.where((number >= first) & (number < end), x, jnp.zeros_like(x)) for x in arrays)


IMPLEMENTATION = Implementation(
    "hopper",
    hopper_backward,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    hints=("physical",),
    same_bits=False,  # dq is summed in the order in which programs arrive
    config_type=HopperGradConfig,
    default_config=default_config,
    for_call=for_call,
    candidates=candidates,
)
