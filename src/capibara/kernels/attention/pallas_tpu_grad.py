"""Attention for the TPU's matrix units, in Pallas (Mosaic): the backward pass.

Two kernels, both with the scores transposed as in the forward pass (keys along the sublanes, queries along the lanes),
so that what belongs to a query, its log-sum-exp and its delta, is one row:

- dkv: a block of keys stays, the grid walks the live blocks of queries, of every head that shares the keys;
- dq: a block of queries stays, the grid walks the live blocks of keys.

The probabilities are computed again from the log-sum-exp. delta = sum(out * d_out) - d_lse is one number a query and
is computed outside in plain JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.attention import pallas_tpu_common as common
from capibara.kernels.attention import pallas_tpu_tile as tile
from capibara.kernels.attention.pallas_tpu_common import LANES, LOG2_E, PARTIAL, FlashConfig, Rules
from capibara.kernels.context import current_interpret
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct

# Pieces of a masked block that position leaves nothing of are skipped in this many queries and keys.
SKIP = 512
_QUERIES_LAST = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What both bodies are specialised by."""

    rules: Rules
    config: FlashConfig
    whole_blocks: bool
    partial_blocks: bool
    table_shape: tuple[int, int]
    outer_blocks: int  # rows of the table
    live: int  # and their length
    tails: tuple[bool, bool]  # whether the last block of queries, of keys, must be masked at its end


def _rows(plan: _Plan, ref: Any, start: int, row: Any, masked: bool) -> jax.Array:
    """Rows of a block of queries; past the last query there may be NaN, which is put to zero."""
    x = ref[pl.ds(start, plan.config.chunk_q), :]
    if not (masked and plan.tails[0]):
        return x
    inside = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < plan.rules.rows - row
    return jnp.where(inside, x.astype(jnp.float32), 0.0).astype(x.dtype)


def _tile(
    plan: _Plan, refs: dict[str, Any], place: tuple[Any, Any, Any], q0: int, k0: int, x: jax.Array, dp: jax.Array,
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
    if rules.softcap:
        capped = jnp.tanh(x * (rules.scale / rules.softcap))
        x, slope = capped * (rules.softcap * LOG2_E), 1.0 - capped * capped
    else:
        x = x * rules.log2_scale
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


def _run_block(plan: _Plan, kind: Any, row: Any, column: Any, step: Any, prepare: Any = None) -> None:
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


def _dkv_body(*given: Any, plan: _Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, given, strict=True))
    rules, config = plan.rules, plan.config
    batch, kv_head, key_block, step = (pl.program_id(axis) for axis in range(4))
    head = kv_head * rules.groups + jax.lax.div(step, plan.live)
    at = (batch, head, key_block, jax.lax.rem(step, plan.live))
    found = common.entry(refs["table"], plan.table_shape, plan.outer_blocks, plan.live, at)
    kind, row, column = found & 3, (found >> 2) * config.block_q, key_block * config.block_k
    place = (batch * rules.heads + head, row, column)
    dot = functools.partial(
        jax.lax.dot_general, precision=rules.precision, preferred_element_type=jnp.float32
    )

    @pl.when(step == 0)
    def _start() -> None:
        refs["dk_sum"][...] = jnp.zeros_like(refs["dk_sum"])
        refs["dv_sum"][...] = jnp.zeros_like(refs["dv_sum"])

    def work(q_starts: Sequence[int], k_starts: Sequence[int], masked: bool) -> None:
        for k0 in k_starts:
            keys = pl.ds(k0, config.chunk_k)
            dk, dv = refs["dk_sum"][keys, :], refs["dv_sum"][keys, :]
            for q0 in q_starts:
                q, do = (_rows(plan, refs[name], q0, row + q0, masked) for name in ("q", "do"))
                x, dp = dot(refs["k"][keys, :], q, _QUERIES_LAST), dot(refs["v"][keys, :], do, _QUERIES_LAST)
                p, ds = _tile(plan, refs, place, q0, k0, x, dp, masked)
                dv = dv + dot(p.astype(do.dtype), do, (((1,), (0,)), ((), ())))
                dk = dk + dot(ds.astype(q.dtype), q, (((1,), (0,)), ((), ())))
            refs["dk_sum"][keys, :], refs["dv_sum"][keys, :] = dk, dv

    _run_block(plan, kind, row, column, work)

    @pl.when(step == rules.groups * plan.live - 1)
    def _finish() -> None:
        refs["dk"][...] = (refs["dk_sum"][...] * rules.scale).astype(refs["dk"].dtype)
        kept = 1.0 / (1.0 - rules.dropout_rate)
        refs["dv"][...] = (refs["dv_sum"][...] * kept).astype(refs["dv"].dtype)


def _dq_body(*given: Any, plan: _Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, given, strict=True))
    rules, config = plan.rules, plan.config
    batch, head, block, step = (pl.program_id(axis) for axis in range(4))
    found = common.entry(
        refs["table"], plan.table_shape, plan.outer_blocks, plan.live, (batch, head, block, step)
    )
    kind, key_block = found & 3, found >> 2
    place = (batch * rules.heads + head, block * config.block_q, key_block * config.block_k)
    dot = functools.partial(jax.lax.dot, precision=rules.precision, preferred_element_type=jnp.float32)

    @pl.when(step == 0)
    def _start() -> None:
        refs["qt"][...] = tile.transposed(refs["q"][...], refs.get("pad"))
        refs["dot"][...] = tile.transposed(refs["do"][...], refs.get("pad"))
        refs["dq_sum"][...] = jnp.zeros_like(refs["dq_sum"])

    def prepare(masked: bool) -> None:
        keys = tile.transposed(refs["k"][...], refs.get("pad"))
        if masked:
            keys = tile.only_seen(rules, config.block_k, refs.get("visible"), key_block, keys)
        refs["kt"][...] = keys

    def work(q_starts: Sequence[int], k_starts: Sequence[int], masked: bool) -> None:
        for q0 in q_starts:
            queries = pl.ds(q0, config.chunk_q)
            dq = refs["dq_sum"][:, queries]
            for k0 in k_starts:
                keys = pl.ds(k0, config.chunk_k)
                x = dot(refs["k"][keys, :], refs["qt"][:, queries])
                dp = dot(refs["v"][keys, :], refs["dot"][:, queries])
                _, ds = _tile(plan, refs, place, q0, k0, x, dp, masked)
                dq = dq + dot(refs["kt"][:, keys], ds.astype(refs["kt"].dtype))
            refs["dq_sum"][:, queries] = dq

    _run_block(plan, kind, place[1], place[2], work, prepare)

    @pl.when(step == plan.live - 1)
    def _finish() -> None:
        dq = refs["dq_sum"][...] * rules.scale
        refs["dq"][...] = tile.transposed_back(dq, refs.get("wide")).astype(refs["dq"].dtype)


def vmem_bytes(call: Call, config: FlashConfig) -> int:
    """VMEM of the larger of the two kernels; see the forward pass's."""
    q, k = call.need("q"), call.need("k")
    fitted, depth, size = config.fit(q.shape[2], k.shape[2]), q.shape[3], common.tile_bytes
    bq, bk = fitted.block_q, fitted.block_k
    shared = 2 * (2 * size(bq, depth, q.dtype) + 2 * size(bk, depth, q.dtype))
    shared += 2 * (3 * size(1, bq, np.float32) + 2 * size(1, bk, np.float32))
    mask = call["mask"]
    if mask is not None:
        shared += 2 * size(min(mask.shape[2], bq), bk, np.int8)
    dkv = 2 * 2 * size(bk, depth, q.dtype) + 2 * size(bk, depth, np.float32)
    dq = 2 * size(bq, depth, q.dtype) + 2 * size(depth, bq, q.dtype) + size(depth, bk, q.dtype)
    dq += 2 * size(depth, bq, np.float32)
    if depth % LANES:
        dq += size(max(bq, bk), depth, q.dtype) + size(common.round_up(depth), bq, np.float32)
    return shared + max(dkv, dq) + 8 * size(fitted.chunk_k, fitted.chunk_q, np.float32)


def candidates(call: Call) -> Sequence[FlashConfig]:
    """Every distinct block that fits VMEM and the caller's block mask, best predicted first."""
    return common.candidates(call, vmem_bytes)


def refuses(call: Call) -> str | None:
    if call["bias"] is not None:
        return "it has no gradient of the bias"
    reason = common.refuses(call)
    if reason is not None:
        return reason
    if call.need("d_out").dtype != call.need("q").dtype:
        return (
            f"the output's gradient is {call.need('d_out').dtype} and the queries are {call.need('q').dtype}"
        )
    return None if candidates(call) else "no block of it fits the core's VMEM and the block mask"


def _call(
    body: Any, plan: _Plan, given: tile.Operands, prefetched: dict[str, Any], grid: tuple[int, ...],
    outs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]], scratch: dict[str, Any], products: int, name: str,
) -> Any:  # fmt: skip
    """The pallas_call that both kernels are; `products` counts their matrix products."""
    batch, pairs = given.arrays["q"].shape[0], plan.rules.rows * plan.rules.columns
    call = pl.pallas_call(
        functools.partial(body, plan=plan, names=(*prefetched, *given.arrays, *outs, *scratch)),
        out_shape=tuple(shape for shape, _ in outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid,
            in_specs=given.specs,
            out_specs=tuple(spec for _, spec in outs.values()),
            scratch_shapes=tuple(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * batch * plan.rules.heads * pairs * plan.rules.depth,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in given.arrays.values()),
            transcendentals=batch * plan.rules.heads * pairs,
        ),
        interpret=current_interpret().pallas_argument(),
        name=name,
    )
    return call(*prefetched.values(), *given.arrays.values())


def pallas_tpu_grad(
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
    config: FlashConfig,
    **params: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """(dq, dk, dv, None) as two Pallas calls; see the module's text."""
    rules = common.rules_of(q, k, params)
    config = config.fit(rules.rows, rules.columns)
    blocks, depth = (config.block_q, config.block_k), rules.depth
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse.astype(jnp.float32)
    # A query that sees nothing has a log-sum-exp of minus infinity; plus infinity makes its probabilities zero.
    exponent = jnp.where(jnp.isneginf(lse), jnp.inf, lse.astype(jnp.float32) * LOG2_E)
    segments = (q_segments, kv_segments)
    visible = tile.visible_keys(q, k, mask, segments, params)
    seed = {"seed": jax.lax.bitcast_convert_type(dropout_seed, jnp.int32)} if rules.dropout_rate else {}

    def prepare(ragged: bool) -> tuple[_Plan, tile.Operands, dict[str, Any]]:
        """The plan and operands of dkv (queries are summed over, so their end is ragged) or of dq."""
        static = common.block_kinds(rules, *blocks, ragged_rows=ragged)
        kinds = common.refine_kinds(
            static, blocks, block_mask, params["block_size"], segments, masked=mask is not None
        )
        if ragged:
            static, kinds = static.T, kinds.swapaxes(2, 3)
        plan = _Plan(
            rules, config,
            whole_blocks=mask is None and bool((static == common.WHOLE).any()),
            partial_blocks=mask is not None or q_segments is not None or bool((static == PARTIAL).any()),
            table_shape=kinds.shape[:2], outer_blocks=static.shape[0], live=common.most_live(static),
            tails=(ragged and bool(rules.rows % blocks[0]), bool(rules.columns % blocks[1])),
        )  # fmt: skip

        def over_keys(b: Any, h: Any, i: Any, s: Any, table: Any, *_: Any) -> tuple[Any, ...]:
            return (
                b,
                h,
                i,
                common.entry(table, plan.table_shape, plan.outer_blocks, plan.live, (b, h, i, s)) >> 2,
            )

        def over_queries(b: Any, kv: Any, j: Any, s: Any, table: Any, *_: Any) -> tuple[Any, ...]:
            head = kv * rules.groups + jax.lax.div(s, plan.live)
            at = (b, head, j, jax.lax.rem(s, plan.live))
            return b, head, common.entry(table, plan.table_shape, plan.outer_blocks, plan.live, at) >> 2, j

        given = tile.Operands(over_queries if ragged else over_keys, rules, blocks)
        for name, x, spec in (
            ("q", q, given.by_query), ("k", k, given.by_key), ("v", v, given.by_key), ("do", d_out, given.by_query),
            ("lse", exponent[:, :, None], given.query_row), ("delta", delta[:, :, None], given.query_row),
        ):  # fmt: skip
            given.add(name, x, spec)
        given.add_masks(mask, q_segments, kv_segments, None if ragged else visible)
        return plan, given, {"table": common.live_table(kinds, plan.live)} | seed

    plan, given, prefetched = prepare(ragged=True)
    dk, dv = _call(
        _dkv_body, plan, given, prefetched,
        (q.shape[0], k.shape[1], plan.outer_blocks, rules.groups * plan.live),
        {"dk": (out_struct(k.shape, k.dtype, k), given.by_key), "dv": (out_struct(v.shape, v.dtype, v), given.by_key)},
        {"dk_sum": pltpu.VMEM((blocks[1], depth), jnp.float32), "dv_sum": pltpu.VMEM((blocks[1], depth), jnp.float32)},
        products=4, name="capibara_attention_dkv",
    )  # fmt: skip
    plan, given, prefetched = prepare(ragged=False)
    scratch = {
        "qt": pltpu.VMEM((depth, blocks[0]), q.dtype),
        "dot": pltpu.VMEM((depth, blocks[0]), q.dtype),
        "kt": pltpu.VMEM((depth, blocks[1]), k.dtype),
        "dq_sum": pltpu.VMEM((depth, blocks[0]), jnp.float32),
    }
    if depth % LANES:
        scratch["pad"] = pltpu.VMEM((max(blocks), common.round_up(depth)), q.dtype)
        scratch["wide"] = pltpu.VMEM((common.round_up(depth), blocks[0]), jnp.float32)
    (dq,) = _call(
        _dq_body, plan, given, prefetched, (*q.shape[:2], plan.outer_blocks, plan.live),
        {"dq": (out_struct(q.shape, q.dtype, q), given.by_query)}, scratch, products=3, name="capibara_attention_dq",
    )  # fmt: skip
    return dq, dk, dv, None


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    pallas_tpu_grad,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 20,
    kernel=True,
    config_type=FlashConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
