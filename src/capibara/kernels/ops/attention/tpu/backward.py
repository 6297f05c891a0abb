"""Attention for the TPU's matrix units, in Pallas (Mosaic): the backward pass.

One kernel where a head's gradients fit in VMEM: a block of keys stays, the grid walks the live blocks of queries, and
the gradient of the queries is summed in VMEM on the way. Five matrix products a block. Where they do not fit, two
kernels that compute the probabilities twice, seven products:

- dkv: a block of keys stays, the grid walks the live blocks of queries, of every head that shares the keys;
- dq: a block of queries stays, the grid walks the live blocks of keys.

A bias has its gradient from a kernel of its own, which visits every pair and sums over the axes the bias lacks.

The probabilities are computed again from the log-sum-exp. delta = sum(out * d_out) - d_lse is one number a query and
is computed outside in plain JAX. The scores lie transposed as in the forward pass, keys along the sublanes and queries
along the lanes, so that what belongs to a query, its log-sum-exp and its delta, is one row. With `length_minor`
queries, output gradients and all sums lie as [depth, length] as well; only keys and values are transposed, once a
block of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.attention.tpu import blocks, tiles
from capibara.kernels.ops.attention.tpu.blocks import (
    LANES,
    LOG2_E,
    PARTIAL,
    WHOLE,
    Blocks,
    Buffers,
    FlashConfig,
    Rules,
    head_bytes,
    round_up,
    scratch_bytes,
    tile_bytes,
)

# Pieces of a masked block that position leaves nothing of are skipped in this many queries and keys.
SKIP = 512


@dataclasses.dataclass(frozen=True)
class FlashGradConfig(FlashConfig):
    """Block sizes as in the forward pass.

    Attributes:
      fused: one kernel for all gradients, which keeps those of a whole head in VMEM; else two.
    """

    fused: bool = True


def scratch(
    kernel: str, config: FlashGradConfig, rules: Rules, dtype: Any, bias_block: tuple[int, int] | None = None
) -> Buffers:
    """Scratch of the kernel "fused", "dkv", "dq" or "dbias", for operands that `config` was cut to."""
    block_q, block_k, depth, length_minor = config.block_q, config.block_k, rules.depth, config.length_minor
    rows: Buffers = {}  # keys and values as [keys, depth], where they come the other way
    if length_minor:
        rows = dict.fromkeys(("k_rows", "v_rows"), ((block_k, depth), dtype))
        rows["tall"] = ((round_up(depth), block_k), dtype)
    if bias_block is not None:
        return {"dbias_sum": (bias_block, jnp.float32)} | rows
    transposes: Buffers = {"kt": ((depth, block_k), dtype)} | rows
    if depth % LANES and not length_minor:
        transposes["pad"] = ((max(block_q, block_k), round_up(depth)), dtype)
        transposes["wide"] = ((round_up(depth), block_q), jnp.float32)
    query_blocks, key_blocks = -(-rules.rows // block_q), -(-rules.columns // block_k)
    # The sums of all keys of a head stay where several query heads are added to them one after another.
    kept = key_blocks if kernel == "fused" and rules.groups > 1 else 1
    sum_shape = (kept, depth, block_k) if length_minor else (kept, block_k, depth)
    key_sums: Buffers = dict.fromkeys(("dk_sum", "dv_sum"), (sum_shape, jnp.float32))
    if kernel == "fused":
        return {"dq_sum": ((query_blocks, depth, block_q), jnp.float32)} | key_sums | transposes
    if kernel == "dkv":
        return key_sums | rows
    buffers: Buffers = {"dq_sum": ((depth, block_q), jnp.float32)}
    if not length_minor:
        buffers |= dict.fromkeys(("qt", "dot"), ((depth, block_q), dtype))
    return buffers | transposes


def vmem_bytes(call: Call, config: FlashConfig) -> int:
    """VMEM of the fused kernel, or of the larger of the two; see the forward pass's.

    A bias has a third kernel, with its gradient in the place of the others'; all are held to the sum.
    """
    assert isinstance(config, FlashGradConfig)
    q, k, mask, bias = call.need("q"), call.need("k"), call["mask"], call["bias"]
    rules = blocks.rules_of(q, k, call.params)
    block_q, block_k, depth = config.block_q, config.block_k, rules.depth

    def head(length: int) -> int:
        return head_bytes(config, depth, length, q.dtype)

    fetched = 2 * head(block_q) + 2 * head(block_k)
    fetched += 3 * tile_bytes(1, block_q, np.float32) + 2 * tile_bytes(1, block_k, np.float32)
    if mask is not None:
        fetched += tile_bytes(min(mask.shape[2], block_q), block_k, np.int8)
    # The products, scores, probabilities, masks and gradients of a tile.
    temporaries = 8 * tile_bytes(config.chunk_k, config.chunk_q, np.float32)
    if bias is not None:
        pairs = min(bias.shape[2], block_q), block_k
        fetched += 2 * tile_bytes(*pairs, bias.dtype)
        temporaries += tile_bytes(*pairs, np.float32)

    def kernel(name: str, written: int, temporaries: int = 0) -> int:
        return 2 * written + scratch_bytes(scratch(name, config, rules, q.dtype)) + temporaries

    if config.fused:
        return 2 * fetched + temporaries + kernel("fused", 2 * head(block_k) + head(round_up(rules.rows, block_q)))
    # The next sum; and turned blocks of queries, counted where they come so, too.
    more = tile_bytes(depth, block_q, np.float32)
    if config.length_minor:
        more += 2 * tile_bytes(depth, block_q, q.dtype)
    return 2 * fetched + temporaries + max(kernel("dkv", 2 * head(block_k)), kernel("dq", head(block_q), more))


def candidates(call: Call) -> Sequence[FlashGradConfig]:
    """Every distinct block that fits VMEM and the caller's block mask, best predicted first; fused ones before."""
    return [config for like in _likes(call) for config in blocks.candidates(call, like, vmem_bytes)]


def _likes(call: Call) -> list[FlashGradConfig]:
    orders = itertools.product(blocks.orders(call), (True, False))
    return [FlashGradConfig(fused=fused, length_minor=length_minor) for length_minor, fused in orders]


def refuses(call: Call) -> str | None:
    reason = blocks.refuses(call)
    if reason is not None:
        return reason
    if call.need("d_out").dtype != call.need("q").dtype:
        return f"the output's gradient is {call.need('d_out').dtype} and the queries are {call.need('q').dtype}"
    # One will do: this is asked at every call.
    fits = any(True for like in _likes(call) for _ in blocks.fitting(call, like, vmem_bytes))
    return None if fits else "no block of it fits the core's VMEM and the block mask"


def _call(
    body: Any, plan: GradPlan, operands: tiles.Operands, prefetched: dict[str, Any], grid: tuple[int, ...],
    outs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]], buffers: Buffers,
    *, parallel: int, products: int,
) -> Any:  # fmt: skip
    """The pallas_call that every kernel here is.

    `parallel` counts the leading grid axes that may run in any order, `products` the matrix products of a block.
    """
    batch, pairs = operands.arrays["q"].shape[0], plan.rules.rows * plan.rules.columns
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
    call = pl.pallas_call(
        functools.partial(body, plan=plan, names=(*prefetched, *operands.arrays, *outs, *buffers)),
        out_shape=tuple(shape for shape, _ in outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid,
            in_specs=operands.specs,
            out_specs=tuple(spec for _, spec in outs.values()),
            scratch_shapes=[pltpu.VMEM(*buffer) for buffer in buffers.values()],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * batch * plan.rules.heads * pairs * plan.rules.depth,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands.arrays.values()),
            transcendentals=batch * plan.rules.heads * pairs,
        ),
        interpret=current_interpret().pallas_argument(),
        name=f"capibara_attention_{'_'.join(outs)}",
    )
    return call(*vary_alike((*prefetched.values(), *operands.arrays.values())))


def tpu_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    q_segments: jax.Array | None,
    kv_segments: jax.Array | None,
    block_mask: jax.Array | None,
    dropout_seed: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None = None,
    *,
    config: FlashGradConfig,
    **params: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(dq, dk, dv, dbias) as one to three Pallas calls; see the module's text."""
    rules = blocks.rules_of(q, k, params)
    config = config.fit(rules.rows, rules.columns)
    block_q, block_k, depth, turned = config.block_q, config.block_k, rules.depth, config.length_minor
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse.astype(jnp.float32)
    # A query that sees nothing has a log-sum-exp of minus infinity; plus infinity makes its probabilities zero.
    log2_lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse.astype(jnp.float32) * LOG2_E)
    segments = (q_segments, kv_segments)
    visible = tiles.visible_keys(q, k, mask, segments, params)
    seed = {}
    if rules.dropout_rate and dropout_seed is not None:
        seed["seed"] = jax.lax.bitcast_convert_type(dropout_seed, jnp.int32)

    def prepare(kernel: str) -> tuple[GradPlan, tiles.Operands, dict[str, Any]]:
        """The plan and operands of the kernel "dq", "dkv", "fused" or "dbias"."""
        # Where queries are summed over, a block that reaches past the last one has to be masked.
        ragged, by_key = kernel != "dq", kernel in ("dkv", "fused")
        walked = Blocks(rules, (block_q, block_k), by_key=by_key, masked=mask is not None, ragged_rows=ragged)
        table, table_shape = walked.table(block_mask, params["block_size"], *segments)
        live = walked.steps
        if kernel == "dbias":  # every block is written, so the table is the kinds themselves
            kinds = walked.refined(block_mask, params["block_size"], *segments)
            table, table_shape, live = kinds.reshape(-1), (kinds.shape[0], kinds.shape[1]), kinds.shape[3]
        plan = GradPlan(
            rules, config,
            whole_blocks=mask is None and walked.has(WHOLE),
            partial_blocks=mask is not None or q_segments is not None or walked.has(PARTIAL),
            table_shape=table_shape, outer_blocks=walked.outer, live=live,
            tails=(ragged and bool(rules.rows % block_q), bool(rules.columns % block_k)),
            # What a block mask leaves out is not visited, but position may leave a query nothing of the rest.
            dead_by_data=mask is not None or q_segments is not None
            or (block_mask is not None and rules.shapes_by_position),
        )  # fmt: skip

        def walk_dq(b: Any, h: Any, i: Any, s: Any, table: Any, *_: Any) -> tuple[Any, ...]:
            return b, h, i, plan.entry(table, (b, h, i, s)) >> 2

        def walk_dkv(b: Any, kv: Any, j: Any, s: Any, table: Any, *_: Any) -> tuple[Any, ...]:
            head = kv * rules.groups + jax.lax.div(s, plan.live)
            return b, head, plan.entry(table, (b, head, j, jax.lax.rem(s, plan.live))) >> 2, j

        def walk_fused(b: Any, kv: Any, g: Any, j: Any, s: Any, table: Any, *_: Any) -> tuple[Any, ...]:
            head = kv * rules.groups + g
            return b, head, plan.entry(table, (b, head, j, s)) >> 2, j

        def walk_dbias(b: Any, h: Any, i: Any, j: Any, sb: Any, sh: Any, si: Any, *_: Any) -> tuple[Any, ...]:
            return b + sb, h + sh, i + si, j

        walks: dict[str, Any] = {"dq": walk_dq, "dkv": walk_dkv, "fused": walk_fused, "dbias": walk_dbias}
        operands = tiles.Operands(walks[kernel], rules, (block_q, block_k), turned)
        for name, x in (("q", q), ("do", d_out)):
            operands.add_heads(name, x, operands.by_query)
        for name, x in (("k", k), ("v", v)):
            operands.add_heads(name, x, operands.by_key)
        for name, x in (("lse", log2_lse), ("delta", delta)):
            operands.add(name, x[:, :, None], operands.query_row)
        operands.add_bias(bias)
        operands.add_masks(mask, q_segments, kv_segments, visible if kernel in ("dq", "fused") else None)
        return plan, operands, {"table": table} | seed

    dbias = None
    if bias is not None:
        # A kernel of its own: where nothing asks for the bias's gradient, the compiler drops it.
        plan, operands, prefetched = prepare("dbias")
        counts = (q.shape[0], rules.heads, plan.outer_blocks)
        whole_axes = [have == full for have, full in zip(bias.shape[:3], q.shape[:3], strict=True)]
        walked_out = [n if kept else 1 for n, kept in zip(counts, whole_axes, strict=True)]
        summed = [1 if kept else n for n, kept in zip(counts, whole_axes, strict=True)]
        block = (block_q if whole_axes[2] else 1, block_k)
        (dbias,) = _call(
            dbias_body, plan, operands, prefetched, (*walked_out, plan.live, *summed),
            {
                "dbias": (
                    out_struct(bias.shape, bias.dtype, q),
                    pl.BlockSpec((None, None, *block), lambda b, h, i, j, *_: (b, h, i, j)),
                )
            },
            scratch("dbias", config, rules, q.dtype, block), parallel=4, products=2,
        )  # fmt: skip
    shapes = {
        name: out_struct((*x.shape[:2], depth, x.shape[2]) if turned else x.shape, x.dtype, x)
        for name, x in (("dq", q), ("dk", k), ("dv", v))
    }
    if config.fused:
        plan, operands, prefetched = prepare("fused")
        last = rules.groups - 1
        # Until the group's last head the gradients of the keys are not complete: nothing but block 0 is visited.
        by_key = tiles.head_block(
            block_k, depth, turned, lambda b, kv, g, j, *_: (b, kv, jax.lax.select(g == last, j, 0))
        )
        whole = tiles.head_block(
            round_up(rules.rows, block_q), depth, turned, lambda b, kv, g, *_: (b, kv * rules.groups + g, 0)
        )
        dq, dk, dv = _call(
            fused_body, plan, operands, prefetched,
            (q.shape[0], k.shape[1], rules.groups, plan.outer_blocks, plan.live),
            {"dq": (shapes["dq"], whole), "dk": (shapes["dk"], by_key), "dv": (shapes["dv"], by_key)},
            scratch("fused", config, rules, q.dtype), parallel=2, products=5,
        )  # fmt: skip
        return *(tiles.turned(x, turned) for x in (dq, dk, dv)), dbias
    plan, operands, prefetched = prepare("dkv")
    dk, dv = _call(
        dkv_body, plan, operands, prefetched,
        (q.shape[0], k.shape[1], plan.outer_blocks, rules.groups * plan.live),
        {"dk": (shapes["dk"], operands.by_key), "dv": (shapes["dv"], operands.by_key)},
        scratch("dkv", config, rules, q.dtype), parallel=3, products=4,
    )  # fmt: skip
    plan, operands, prefetched = prepare("dq")
    (dq,) = _call(
        dq_body, plan, operands, prefetched, (*q.shape[:2], plan.outer_blocks, plan.live),
        {"dq": (shapes["dq"], operands.by_query)}, scratch("dq", config, rules, q.dtype), parallel=3, products=3,
    )  # fmt: skip
    return *(tiles.turned(x, turned) for x in (dq, dk, dv)), dbias


@dataclasses.dataclass(frozen=True)
class GradPlan:
    """What the bodies are specialised by."""

    rules: Rules
    config: FlashConfig
    whole_blocks: bool
    partial_blocks: bool
    table_shape: tuple[int, int]
    outer_blocks: int  # rows of the table
    live: int  # and their length
    tails: tuple[bool, bool]  # whether the last block of queries, of keys, must be masked at its end
    dead_by_data: bool  # whether a query may see nothing for what a mask or segments say, not for its place

    def entry(self, table: Any, at: tuple[Any, ...]) -> Any:
        return blocks.entry(table, self.table_shape, self.outer_blocks, self.live, at)


def _rows(plan: GradPlan, refs: dict[str, Any], name: str, start: int, row: Any, masked: bool) -> jax.Array:
    """Rows of a block of queries, or of their output gradients.

    Those that see nothing, and what is past the last, are put to zero: they may be NaN, which a product with a zero
    probability would keep alive. Whole blocks have none of either.
    """
    queries, turned = pl.ds(start, plan.config.chunk_q), plan.config.length_minor
    x = refs[name][:, queries] if turned else refs[name][queries, :]
    if not masked:
        return x
    kept = []
    first, end = plan.rules.seeing
    if plan.tails[0] or first > 0 or end < plan.rules.rows:
        place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1 if turned else 0)
        kept.append((place >= first - row) & (place < end - row))
    if plan.dead_by_data:
        sees = refs["lse"][:, queries] != jnp.inf  # it is NaN where a query that sees something is
        if turned:
            kept.append(jnp.broadcast_to(sees, x.shape))
        else:  # queries lie along the lanes there and along the sublanes here
            lanes = jnp.broadcast_to(jnp.where(sees, 1.0, 0.0), (LANES, x.shape[0])).T
            kept.append(jnp.broadcast_to(lanes[:, :1], x.shape) != 0)
    if not kept:
        return x
    return jnp.where(functools.reduce(jnp.logical_and, kept), x.astype(jnp.float32), 0.0).astype(x.dtype)


def _tile(
    plan: GradPlan, refs: dict[str, Any], place: tuple[Any, Any, Any], q0: int, k0: int, x: jax.Array, dp: jax.Array,
    masked: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """A tile [keys, queries] of probabilities after dropout, and of the scores' gradient.

    `x` is the raw product of keys and queries, `dp` of values and output gradients; `place` is the head counted over
    the batch, and the first query and key of the block.
    """
    rules, shape = plan.rules, (plan.config.chunk_k, plan.config.chunk_q)
    head, row, column = place[0], place[1] + q0, place[2] + k0
    queries = pl.ds(q0, shape[1])
    slope = None
    bias = tiles.bias_tile(refs, (q0, k0), shape) if "bias" in refs else 0.0
    if rules.softcap:
        capped = jnp.tanh(x * (rules.scale / rules.softcap) + bias * (1 / rules.softcap))
        x, slope = capped * (rules.softcap * LOG2_E), 1.0 - capped * capped
    else:
        x = x * rules.log2_scale
        if "bias" in refs:
            x = x + bias * LOG2_E
    p = jnp.exp2(x - refs["lse"][:, queries])
    spread = p
    if rules.dropout_rate:
        kept = tiles.keep_pairs(rules, refs["seed"], head, row, column, shape)
        spread = jnp.where(kept, p, 0.0)
        dp = jnp.where(kept, dp * (1.0 / (1.0 - rules.dropout_rate)), 0.0)
    ds = p * (dp - refs["delta"][:, queries])
    if slope is not None:
        ds = ds * slope
    if masked:
        for allowed in tiles.pairs_allowed(rules, refs, (row, column), (q0, k0), shape, plan.tails):
            spread, ds = jnp.where(allowed, spread, 0.0), jnp.where(allowed, ds, 0.0)
    return spread, ds


def _run_block(plan: GradPlan, kind: Any, row: Any, column: Any, step: Any, prepare: Any = None) -> None:
    """Call `step(query starts, key starts, masked)` for a block: whole at once, or its pieces that are not dead."""
    config = plan.config
    if plan.whole_blocks:

        @pl.when(kind == WHOLE)
        def _whole() -> None:
            if prepare is not None:
                prepare(False)
            step(range(0, config.block_q, config.chunk_q), range(0, config.block_k, config.chunk_k), False)

    if plan.partial_blocks:

        @pl.when(kind == PARTIAL)
        def _partial() -> None:
            if prepare is not None:
                prepare(True)
            skip_q = tiles.piece(SKIP, config.block_q, config.chunk_q)
            skip_k = tiles.piece(SKIP, config.block_k, config.chunk_k)
            for first in range(0, config.block_q, skip_q):
                for start in range(0, config.block_k, skip_k):
                    dead = tiles.tile_is_dead(plan.rules, row + first, column + start, skip_q, skip_k)

                    @pl.when(~dead)
                    def _piece(first: int = first, start: int = start) -> None:
                        step(
                            range(first, min(first + skip_q, config.block_q), config.chunk_q),
                            range(start, min(start + skip_k, config.block_k), config.chunk_k),
                            True,
                        )


def _products(rules: Rules) -> tuple[Any, Any]:
    """Matrix products with float32 sums: as they lie, and with the right side transposed."""
    options: dict[str, Any] = {"precision": rules.precision, "preferred_element_type": jnp.float32}

    def transposed_right(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), **options)

    return functools.partial(jax.lax.dot, **options), transposed_right


def _turn_keys(plan: GradPlan, refs: dict[str, Any]) -> None:
    """The block's keys and values as [keys, depth], where they came the other way."""
    if plan.config.length_minor:
        refs["k_rows"][...] = tiles.transposed_back(refs["k"][...], refs["tall"])
        refs["v_rows"][...] = tiles.transposed_back(refs["v"][...], refs["tall"])


def _scores(plan: GradPlan, refs: dict[str, Any], keys: Any, q: jax.Array, do: jax.Array) -> tuple[Any, Any]:
    """The raw products [keys, queries] of keys and queries, and of values and output gradients."""
    dot, dot_t = _products(plan.rules)
    if plan.config.length_minor:
        return dot(refs["k_rows"][keys, :], q), dot(refs["v_rows"][keys, :], do)
    return dot_t(refs["k"][keys, :], q), dot_t(refs["v"][keys, :], do)


def dkv_body(*args: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, key head, key block, step): the steps walk the live query blocks of every head of the group."""
    refs = dict(zip(names, args, strict=True))
    rules, config = plan.rules, plan.config
    batch, kv_head, key_block, step = (pl.program_id(axis) for axis in range(4))
    head = kv_head * rules.groups + jax.lax.div(step, plan.live)
    entry = plan.entry(refs["table"], (batch, head, key_block, jax.lax.rem(step, plan.live)))
    place = (batch * rules.heads + head, (entry >> 2) * config.block_q, key_block * config.block_k)
    pl.when(step == 0)(lambda: _turn_keys(plan, refs))
    _accumulate(plan, refs, entry & 3, place, 0, None, step == 0, step == rules.groups * plan.live - 1)


def fused_body(*args: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, key head, head of the group, key block, step): dkv, and dq summed in VMEM on the way.

    The gradient of all queries of a head stays in VMEM until the last key block, and with several heads a key head
    that of all keys as well.
    """
    refs = dict(zip(names, args, strict=True))
    rules, config = plan.rules, plan.config
    batch, kv_head, member, key_block, step = (pl.program_id(axis) for axis in range(5))
    head = kv_head * rules.groups + member
    entry = plan.entry(refs["table"], (batch, head, key_block, step))
    place = (batch * rules.heads + head, (entry >> 2) * config.block_q, key_block * config.block_k)
    first, last = step == 0, step == plan.live - 1

    @pl.when(first & (key_block == 0))
    def _start() -> None:
        refs["dq_sum"][...] = jnp.zeros_like(refs["dq_sum"])

    @pl.when(first)
    def _turn() -> None:
        _turn_keys(plan, refs)
        keys = tiles.as_columns(refs["k"][...], refs, config.length_minor)
        refs["kt"][...] = tiles.only_seen(rules, config.block_k, refs.get("visible"), key_block, keys)

    _accumulate(
        plan, refs, entry & 3, place, 0 if rules.groups == 1 else key_block, entry >> 2,
        first & (member == 0), last & (member == rules.groups - 1),
    )  # fmt: skip

    @pl.when(last & (key_block == plan.outer_blocks - 1))
    def _finish() -> None:
        @pl.loop(0, refs["dq_sum"].shape[0])
        def _block(i: Any) -> None:
            dq = refs["dq_sum"][i] * rules.scale
            rows = pl.ds(pl.multiple_of(i * config.block_q, config.block_q), config.block_q)
            if config.length_minor:
                refs["dq"][:, rows] = dq.astype(refs["dq"].dtype)
            else:
                refs["dq"][rows, :] = tiles.transposed_back(dq, refs.get("wide")).astype(refs["dq"].dtype)


def _accumulate(
    plan: GradPlan, refs: dict[str, Any], kind: Any, place: tuple[Any, Any, Any], at: Any, query_block: Any,
    first: Any, last: Any,
) -> None:  # fmt: skip
    """Add a block to the gradients of its keys, kept at `at`, and with a `query_block` to those of its queries."""
    rules, config = plan.rules, plan.config
    dot, dot_t = _products(rules)

    @pl.when(first)
    def _start() -> None:
        refs["dk_sum"][at] = jnp.zeros(refs["dk_sum"].shape[1:], jnp.float32)
        refs["dv_sum"][at] = jnp.zeros(refs["dv_sum"].shape[1:], jnp.float32)

    def work(q_starts: Sequence[int], k_starts: Sequence[int], masked: bool) -> None:
        for k0 in k_starts:
            keys = pl.ds(k0, config.chunk_k)
            part = (at, slice(None), keys) if config.length_minor else (at, keys, slice(None))
            dk, dv = refs["dk_sum"][part], refs["dv_sum"][part]
            for q0 in q_starts:
                q, do = (_rows(plan, refs, name, q0, place[1] + q0, masked) for name in ("q", "do"))
                x, dp = _scores(plan, refs, keys, q, do)
                p, ds = _tile(plan, refs, place, q0, k0, x, dp, masked)
                p, ds = p.astype(do.dtype), ds.astype(q.dtype)
                dv = dv + (dot_t(do, p) if config.length_minor else dot(p, do))
                dk = dk + (dot_t(q, ds) if config.length_minor else dot(ds, q))
                if query_block is not None:
                    refs["dq_sum"][query_block, :, pl.ds(q0, config.chunk_q)] += dot(refs["kt"][:, keys], ds)
            refs["dk_sum"][part], refs["dv_sum"][part] = dk, dv

    _run_block(plan, kind, place[1], place[2], work)

    @pl.when(last)
    def _finish() -> None:
        refs["dk"][...] = (refs["dk_sum"][at] * rules.scale).astype(refs["dk"].dtype)
        kept = 1.0 / (1.0 - rules.dropout_rate)
        refs["dv"][...] = (refs["dv_sum"][at] * kept).astype(refs["dv"].dtype)


def dq_body(*args: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, head, query block, step): the steps walk the live key blocks."""
    refs = dict(zip(names, args, strict=True))
    rules, config = plan.rules, plan.config
    batch, head, block, step = (pl.program_id(axis) for axis in range(4))
    entry = plan.entry(refs["table"], (batch, head, block, step))
    kind, key_block = entry & 3, entry >> 2
    place = (batch * rules.heads + head, block * config.block_q, key_block * config.block_k)
    dot, _ = _products(rules)
    turned = config.length_minor
    q_columns, do_columns = ("q", "do") if turned else ("qt", "dot")
    k_rows, v_rows = ("k_rows", "v_rows") if turned else ("k", "v")

    @pl.when(step == 0)
    def _start() -> None:
        if not turned:
            refs["qt"][...] = tiles.transposed(refs["q"][...], refs.get("pad"))
            refs["dot"][...] = tiles.transposed(refs["do"][...], refs.get("pad"))
        refs["dq_sum"][...] = jnp.zeros_like(refs["dq_sum"])

    def prepare(masked: bool) -> None:
        _turn_keys(plan, refs)
        keys = tiles.as_columns(refs["k"][...], refs, turned)
        if masked:
            keys = tiles.only_seen(rules, config.block_k, refs.get("visible"), key_block, keys)
        refs["kt"][...] = keys

    def work(q_starts: Sequence[int], k_starts: Sequence[int], masked: bool) -> None:
        for q0 in q_starts:
            queries = pl.ds(q0, config.chunk_q)
            dq = refs["dq_sum"][:, queries]
            for k0 in k_starts:
                keys = pl.ds(k0, config.chunk_k)
                x = dot(refs[k_rows][keys, :], refs[q_columns][:, queries])
                dp = dot(refs[v_rows][keys, :], refs[do_columns][:, queries])
                _, ds = _tile(plan, refs, place, q0, k0, x, dp, masked)
                dq = dq + dot(refs["kt"][:, keys], ds.astype(refs["kt"].dtype))
            refs["dq_sum"][:, queries] = dq

    _run_block(plan, kind, place[1], place[2], work, prepare)

    @pl.when(step == plan.live - 1)
    def _finish() -> None:
        dq = refs["dq_sum"][...] * rules.scale
        if not turned:
            dq = tiles.transposed_back(dq, refs.get("wide"))
        refs["dq"][...] = dq.astype(refs["dq"].dtype)


def dbias_body(*args: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, head, query block, key block, and the first three again): an axis that the bias does not have is
    walked by its second place, innermost, and summed over.
    """
    refs = dict(zip(names, args, strict=True))
    rules, config = plan.rules, plan.config
    *kept, key_block, batch, head, block = (pl.program_id(axis) for axis in range(7))
    first = (batch == 0) & (head == 0) & (block == 0)
    last = functools.reduce(jnp.logical_and, (pl.program_id(a) == pl.num_programs(a) - 1 for a in (4, 5, 6)))
    batch, head, block = kept[0] + batch, kept[1] + head, kept[2] + block
    place = (batch * rules.heads + head, block * config.block_q, key_block * config.block_k)
    by_row = refs["dbias_sum"].shape[0] > 1

    @pl.when(first)
    def _start() -> None:
        refs["dbias_sum"][...] = jnp.zeros_like(refs["dbias_sum"])

    def work(q_starts: Sequence[int], k_starts: Sequence[int], masked: bool) -> None:
        for k0 in k_starts:
            keys = pl.ds(k0, config.chunk_k)
            for q0 in q_starts:
                q, do = (_rows(plan, refs, name, q0, place[1] + q0, masked) for name in ("q", "do"))
                x, dp = _scores(plan, refs, keys, q, do)
                ds = _tile(plan, refs, place, q0, k0, x, dp, masked)[1].T
                if by_row:
                    refs["dbias_sum"][pl.ds(q0, config.chunk_q), keys] += ds
                else:
                    refs["dbias_sum"][:, keys] += jnp.sum(ds, axis=0, keepdims=True)

    kind = plan.entry(refs["table"], (batch, head, block, key_block))
    _run_block(plan, kind, place[1], place[2], work, lambda masked: _turn_keys(plan, refs))

    @pl.when(last)
    def _finish() -> None:
        refs["dbias"][...] = refs["dbias_sum"][...].astype(refs["dbias"].dtype)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    tpu_backward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=FlashGradConfig,
    candidates=candidates,
)
