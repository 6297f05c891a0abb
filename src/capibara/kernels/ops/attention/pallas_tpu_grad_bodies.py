"""The bodies of the TPU attention kernels' backward pass; see pallas_tpu_grad for which is used when.

The scores lie transposed as in the forward pass, keys along the sublanes and queries along the lanes, so that what
belongs to a query, its log-sum-exp and its delta, is one row. With `length_minor` queries, output gradients and all
sums lie as [depth, length] as well; only keys and values are transposed, once a block of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from capibara.kernels.ops.attention import pallas_tpu_common as common
from capibara.kernels.ops.attention import pallas_tpu_tile as tile
from capibara.kernels.ops.attention.pallas_tpu_common import LOG2_E, PARTIAL, FlashConfig, Rules

# Pieces of a masked block that position leaves nothing of are skipped in this many queries and keys.
SKIP = 512


@dataclasses.dataclass(frozen=True)
class GradPlan:
    """What both bodies are specialised by."""

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
        return common.entry(table, self.table_shape, self.outer_blocks, self.live, at)


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
            lanes = jnp.broadcast_to(jnp.where(sees, 1.0, 0.0), (common.LANES, x.shape[0])).T
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
    bias = tile.bias_tile(refs, (q0, k0), shape) if "bias" in refs else 0.0
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
        kept = tile.keep_pairs(rules, refs["seed"], head, row, column, shape)
        spread = jnp.where(kept, p, 0.0)
        dp = jnp.where(kept, dp * (1.0 / (1.0 - rules.dropout_rate)), 0.0)
    ds = p * (dp - refs["delta"][:, queries])
    if slope is not None:
        ds = ds * slope
    if masked:
        for allowed in tile.pairs_allowed(rules, refs, (row, column), (q0, k0), shape, plan.tails):
            spread, ds = jnp.where(allowed, spread, 0.0), jnp.where(allowed, ds, 0.0)
    return spread, ds


def _run_block(plan: GradPlan, kind: Any, row: Any, column: Any, step: Any, prepare: Any = None) -> None:
    """Call `step(query starts, key starts, masked)` for a block: whole at once, or its pieces that are not dead."""
    config = plan.config
    if plan.whole_blocks:

        @pl.when(kind == common.WHOLE)
        def _whole() -> None:
            if prepare is not None:
                prepare(False)
            step(range(0, config.block_q, config.chunk_q), range(0, config.block_k, config.chunk_k), False)

    if plan.partial_blocks:

        @pl.when(kind == PARTIAL)
        def _partial() -> None:
            if prepare is not None:
                prepare(True)
            skip_q = tile.piece(SKIP, config.block_q, config.chunk_q)
            skip_k = tile.piece(SKIP, config.block_k, config.chunk_k)
            for first in range(0, config.block_q, skip_q):
                for start in range(0, config.block_k, skip_k):
                    dead = tile.tile_is_dead(plan.rules, row + first, column + start, skip_q, skip_k)

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
        refs["k_rows"][...] = tile.transposed_back(refs["k"][...], refs["tall"])
        refs["v_rows"][...] = tile.transposed_back(refs["v"][...], refs["tall"])


def _scores(plan: GradPlan, refs: dict[str, Any], keys: Any, q: jax.Array, do: jax.Array) -> tuple[Any, Any]:
    """The raw products [keys, queries] of keys and queries, and of values and output gradients."""
    dot, dot_t = _products(plan.rules)
    if plan.config.length_minor:
        return dot(refs["k_rows"][keys, :], q), dot(refs["v_rows"][keys, :], do)
    return dot_t(refs["k"][keys, :], q), dot_t(refs["v"][keys, :], do)


def dkv_body(*given: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, key head, key block, step): the steps walk the live query blocks of every head of the group."""
    refs = dict(zip(names, given, strict=True))
    rules, config = plan.rules, plan.config
    batch, kv_head, key_block, step = (pl.program_id(axis) for axis in range(4))
    head = kv_head * rules.groups + jax.lax.div(step, plan.live)
    found = plan.entry(refs["table"], (batch, head, key_block, jax.lax.rem(step, plan.live)))
    place = (batch * rules.heads + head, (found >> 2) * config.block_q, key_block * config.block_k)
    pl.when(step == 0)(lambda: _turn_keys(plan, refs))
    _accumulate(plan, refs, found & 3, place, 0, None, step == 0, step == rules.groups * plan.live - 1)


def fused_body(*given: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, key head, head of the group, key block, step): dkv, and dq summed in VMEM on the way.

    The gradient of all queries of a head stays in VMEM until the last key block, and with several heads a key head
    that of all keys as well.
    """
    refs = dict(zip(names, given, strict=True))
    rules, config = plan.rules, plan.config
    batch, kv_head, member, key_block, step = (pl.program_id(axis) for axis in range(5))
    head = kv_head * rules.groups + member
    found = plan.entry(refs["table"], (batch, head, key_block, step))
    place = (batch * rules.heads + head, (found >> 2) * config.block_q, key_block * config.block_k)
    first, last = step == 0, step == plan.live - 1

    @pl.when(first & (key_block == 0))
    def _start() -> None:
        refs["dq_sum"][...] = jnp.zeros_like(refs["dq_sum"])

    @pl.when(first)
    def _turn() -> None:
        _turn_keys(plan, refs)
        keys = tile.as_columns(refs["k"][...], refs, config.length_minor)
        refs["kt"][...] = tile.only_seen(rules, config.block_k, refs.get("visible"), key_block, keys)

    _accumulate(
        plan, refs, found & 3, place, 0 if rules.groups == 1 else key_block, found >> 2,
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
                refs["dq"][rows, :] = tile.transposed_back(dq, refs.get("wide")).astype(refs["dq"].dtype)


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


def dq_body(*given: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, head, query block, step): the steps walk the live key blocks."""
    refs = dict(zip(names, given, strict=True))
    rules, config = plan.rules, plan.config
    batch, head, block, step = (pl.program_id(axis) for axis in range(4))
    found = plan.entry(refs["table"], (batch, head, block, step))
    kind, key_block = found & 3, found >> 2
    place = (batch * rules.heads + head, block * config.block_q, key_block * config.block_k)
    dot, _ = _products(rules)
    turned = config.length_minor
    q_columns, do_columns = ("q", "do") if turned else ("qt", "dot")
    k_rows, v_rows = ("k_rows", "v_rows") if turned else ("k", "v")

    @pl.when(step == 0)
    def _start() -> None:
        if not turned:
            refs["qt"][...] = tile.transposed(refs["q"][...], refs.get("pad"))
            refs["dot"][...] = tile.transposed(refs["do"][...], refs.get("pad"))
        refs["dq_sum"][...] = jnp.zeros_like(refs["dq_sum"])

    def prepare(masked: bool) -> None:
        _turn_keys(plan, refs)
        keys = tile.as_columns(refs["k"][...], refs, turned)
        if masked:
            keys = tile.only_seen(rules, config.block_k, refs.get("visible"), key_block, keys)
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
            dq = tile.transposed_back(dq, refs.get("wide"))
        refs["dq"][...] = dq.astype(refs["dq"].dtype)


def dbias_body(*given: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Grid (batch, head, query block, key block, and the first three again): an axis that the bias does not have is
    walked by its second place, innermost, and summed over.
    """
    refs = dict(zip(names, given, strict=True))
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
