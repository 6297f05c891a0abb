"""Attention for the TPU's matrix units, in Pallas (Mosaic): the forward pass.

The scores are computed transposed, keys along the sublanes and queries along the lanes. A maximum or a sum over keys
is then an elementwise operation between registers, and a query's statistics are one number in a row instead of a
whole column of lanes: the softmax costs little more than its exponentials. The price is that queries are transposed
once a block of queries, values once a step, and the output once at the end. A head_dim below the lanes' 128 comes with
the length along the lanes (`length_minor`): then the keys are transposed once a step, and nothing else is.

The grid's last axis walks the live blocks of keys from a prefetched table (see pallas_tpu_common); the axes before it
are parallel and so are split over both cores of a v4 chip. A block is worked through in tiles that stay in registers.
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

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.attention import pallas_tpu_common as common
from capibara.kernels.ops.attention import pallas_tpu_config as limits
from capibara.kernels.ops.attention import pallas_tpu_tile as tile
from capibara.kernels.ops.attention.pallas_tpu_common import FLOOR, LANES, LOG2_E, MASKED, PARTIAL, FlashConfig, Rules

# In a block that needs a mask, pieces of this many queries are skipped where position leaves nothing of them.
SKIP_Q = 512


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the body is specialised by."""

    rules: Rules
    config: FlashConfig
    steps: int
    table_shape: tuple[int, int]
    query_blocks: int
    whole_blocks: bool  # whether a block without any mask can occur
    partial_blocks: bool
    folded: bool  # the scale is in the queries already

    @property
    def tails(self) -> tuple[bool, bool]:
        # Queries past the end touch no other query here, and are never written back.
        return False, bool(self.rules.columns % self.config.block_k)

    @property
    def keys(self) -> str:
        """Where a block of keys lies as [keys, depth]."""
        return "k_rows" if self.config.length_minor else "k"

    @property
    def factor(self) -> float:
        """What the raw product is multiplied by: to the argument of tanh, or to an exponent of two."""
        return self.rules.scale / self.rules.softcap if self.rules.softcap else self.rules.log2_scale


def _scores(plan: _Plan, refs: dict[str, Any], at: tuple[Any, ...], q0: int, k0: int, masked: bool) -> jax.Array:
    """Exponents of two of a tile [keys, queries]."""
    rules, cq, ck = plan.rules, plan.config.chunk_q, plan.config.chunk_k
    row, column = at[2] * plan.config.block_q + q0, at[4] * plan.config.block_k + k0
    queries, keys = pl.ds(q0, cq), pl.ds(k0, ck)
    x = jax.lax.dot(
        refs[plan.keys][keys, :],
        refs["qt"][:, queries],
        precision=rules.precision,
        preferred_element_type=jnp.float32,
    )
    if not plan.folded:
        x = x * plan.factor
    if "bias" in refs:
        bias = tile.bias_tile(refs, (q0, k0), (ck, cq))
        x = x + bias * (1 / rules.softcap if rules.softcap else LOG2_E)
    if rules.softcap:
        x = jnp.tanh(x) * (rules.softcap * LOG2_E)
    if not masked:
        return x
    for allowed in tile.pairs_allowed(rules, refs, (row, column), (q0, k0), (ck, cq), plan.tails):
        x = jnp.where(allowed, x, MASKED)
    return x


def _update(
    plan: _Plan, refs: dict[str, Any], at: tuple[Any, ...], q0: int, k_starts: Sequence[int], masked: bool
) -> None:
    """One strip of queries through some chunks of the key block: statistics and output stay in registers between."""
    cq, ck = plan.config.chunk_q, plan.config.chunk_k
    queries = pl.ds(q0, cq)
    highest, total, out = refs["m"][:, queries], refs["l"][:, queries], refs["acc"][:, queries]
    for k0 in k_starts:
        x = _scores(plan, refs, at, q0, k0, masked)
        higher = jnp.maximum(highest, jnp.max(x, axis=0, keepdims=True))
        p = jnp.exp2(x - higher)
        shrink = jnp.exp2(highest - higher)
        total = total * shrink + jnp.sum(p, axis=0, keepdims=True)
        highest = higher
        if plan.rules.dropout_rate:
            place = (at[2] * plan.config.block_q + q0, at[4] * plan.config.block_k + k0)
            kept = tile.keep_pairs(plan.rules, refs["seed"], at[0] * plan.rules.heads + at[1], *place, (ck, cq))
            p = jnp.where(kept, p, 0.0)
        values = refs["v" if plan.config.length_minor and not masked else "vt"][:, pl.ds(k0, ck)]
        out = out * shrink + jax.lax.dot(
            values, p.astype(values.dtype), precision=plan.rules.precision, preferred_element_type=jnp.float32
        )
    refs["m"][:, queries], refs["l"][:, queries], refs["acc"][:, queries] = highest, total, out


def _body(*given: Any, plan: _Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, given, strict=True))
    rules, config = plan.rules, plan.config
    batch, head, block, step = (pl.program_id(axis) for axis in range(4))
    found = common.entry(refs["table"], plan.table_shape, plan.query_blocks, plan.steps, (batch, head, block, step))
    kind, key_block = found & 3, found >> 2
    at = (batch, head, block, step, key_block)
    strips, chunks = range(0, config.block_q, config.chunk_q), range(0, config.block_k, config.chunk_k)

    @pl.when(step == 0)
    def _start() -> None:
        q = refs["q"][...]
        if plan.folded:
            q = (q.astype(jnp.float32) * plan.factor).astype(q.dtype)
        refs["qt"][...] = tile.as_columns(q, refs, config.length_minor)
        refs["m"][...] = jnp.full_like(refs["m"], FLOOR)
        refs["l"][...] = jnp.zeros_like(refs["l"])
        refs["acc"][...] = jnp.zeros_like(refs["acc"])

    def turn_keys() -> None:
        if config.length_minor:
            refs["k_rows"][...] = tile.transposed_back(refs["k"][...], refs.get("tall"))

    if plan.whole_blocks:

        @pl.when(kind == common.WHOLE)
        def _whole() -> None:
            turn_keys()
            if not config.length_minor:
                refs["vt"][...] = tile.transposed(refs["v"][...], refs.get("pad"))
            for q0 in strips:
                _update(plan, refs, at, q0, chunks, masked=False)

    if plan.partial_blocks:

        @pl.when(kind == PARTIAL)
        def _partial() -> None:
            turn_keys()
            values = tile.as_columns(refs["v"][...], refs, config.length_minor)
            refs["vt"][...] = tile.only_seen(rules, config.block_k, refs.get("visible"), key_block, values)
            skip = tile.piece(SKIP_Q, config.block_q, config.chunk_q)
            for first in range(0, config.block_q, skip):
                for k0 in chunks:
                    row, column = block * config.block_q + first, key_block * config.block_k + k0

                    @pl.when(~tile.tile_is_dead(rules, row, column, skip, config.chunk_k))
                    def _piece(first: int = first, k0: int = k0) -> None:
                        for q0 in range(first, min(first + skip, config.block_q), config.chunk_q):
                            _update(plan, refs, at, q0, (k0,), masked=True)

    @pl.when(step == plan.steps - 1)
    def _finish() -> None:
        total = refs["l"][...]
        share = jnp.where(total == 0.0, 0.0, 1.0 / (total * (1.0 - rules.dropout_rate)))
        out = refs["acc"][...] * share
        if not config.length_minor:
            out = tile.transposed_back(out, refs.get("wide"))
        refs["out"][...] = out.astype(refs["out"].dtype)
        if "lse" in refs:
            lse = refs["m"][...] * math.log(2) + jnp.log(total)
            refs["lse"][...] = jnp.where(total == 0.0, -jnp.inf, lse)


def vmem_bytes(call: Call, config: FlashConfig) -> int:
    """VMEM the kernel asks for: every operand's block twice (the next is fetched meanwhile), the scratch, two tiles."""
    q, k = call.need("q"), call.need("k")
    depth = q.shape[3]
    fitted = config.fit(q.shape[2], k.shape[2])
    bq, bk = fitted.block_q, fitted.block_k
    size, head = limits.tile_bytes, functools.partial(limits.head_bytes, config, depth)
    used = 2 * (2 * head(bq, q.dtype) + 2 * head(bk, q.dtype))
    for name in ("bias", "mask"):
        extra = call[name]
        if extra is not None:
            used += 2 * size(min(extra.shape[2], bq), bk, np.int8 if name == "mask" else extra.dtype)
    used += 2 * (2 * size(1, bq, np.float32) + 2 * size(1, bk, np.float32))
    used += size(depth, bq, q.dtype) + size(depth, bk, q.dtype) + size(depth, bq, np.float32) * 2
    if config.length_minor:
        used += size(bk, depth, q.dtype) + size(common.round_up(depth), bk, q.dtype)
    elif depth % LANES:
        used += size(max(bq, bk), depth, q.dtype) + size(common.round_up(depth), bq, np.float32)
    return used + 4 * size(fitted.chunk_k, fitted.chunk_q, np.float32)


def candidates(call: Call) -> Sequence[FlashConfig]:
    """Every distinct block that fits VMEM and the caller's block mask, best predicted first."""
    return limits.in_both_orders(
        call, lambda turned: limits.candidates(call, FlashConfig(length_minor=turned), vmem_bytes)
    )


def refuses(call: Call) -> str | None:
    reason = limits.refuses(call)
    if reason is not None:
        return reason
    return None if candidates(call) else "no block of it fits the core's VMEM and the block mask"


def pallas_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    block_mask: jax.Array | None = None,
    dropout_seed: jax.Array | None = None,
    *,
    config: FlashConfig,
    return_lse: bool = False,
    **params: Any,
) -> Any:
    """attention as one Pallas call; see the module's text."""
    rules = common.rules_of(q, k, params)
    batch, heads, rows, depth = q.shape
    config = config.fit(rows, rules.columns)
    bq, bk = config.block_q, config.block_k
    blocks = common.Blocks(rules, (bq, bk), masked=mask is not None)
    table, table_shape = blocks.table(block_mask, params["block_size"], q_segments, kv_segments)
    steps = blocks.steps
    visible = tile.visible_keys(q, k, mask, (q_segments, kv_segments), params)
    plan = _Plan(
        rules, config, steps, table_shape, blocks.outer,
        whole_blocks=mask is None and blocks.has(common.WHOLE),
        partial_blocks=mask is not None or q_segments is not None or blocks.has(PARTIAL),
        folded=q.dtype == jnp.float32 or math.frexp(rules.scale * LOG2_E)[0] == 0.5,
    )  # fmt: skip

    def walk(b: Any, h: Any, i: Any, s: Any, table: Any, *_: Any) -> tuple[Any, Any, Any, Any]:
        return b, h, i, common.entry(table, plan.table_shape, plan.query_blocks, steps, (b, h, i, s)) >> 2

    given = tile.Operands(walk, rules, (bq, bk), config.length_minor)
    prefetched = {"table": table}
    if rules.dropout_rate and dropout_seed is not None:
        prefetched["seed"] = jax.lax.bitcast_convert_type(dropout_seed, jnp.int32)
    given.add_heads("q", q, given.by_query)
    given.add_heads("k", k, given.by_key)
    given.add_heads("v", v, given.by_key)
    given.add_bias(bias)
    given.add_masks(mask, q_segments, kv_segments, visible)
    outs, out_specs = {"out": out_struct(given.arrays["q"].shape, q.dtype, q)}, [given.by_query]
    if return_lse:
        outs["lse"] = out_struct((batch, heads, 1, rows), jnp.float32, q)
        out_specs.append(given.query_row)
    scratch = {
        "qt": pltpu.VMEM((depth, bq), q.dtype),
        "vt": pltpu.VMEM((depth, bk), v.dtype),
        "acc": pltpu.VMEM((depth, bq), jnp.float32),
        "m": pltpu.VMEM((1, bq), jnp.float32),
        "l": pltpu.VMEM((1, bq), jnp.float32),
    }
    if config.length_minor:
        scratch["k_rows"] = pltpu.VMEM((bk, depth), k.dtype)
        scratch["tall"] = pltpu.VMEM((common.round_up(depth), bk), k.dtype)
    elif depth % LANES:
        scratch["pad"] = pltpu.VMEM((max(bq, bk), common.round_up(depth)), q.dtype)
        scratch["wide"] = pltpu.VMEM((common.round_up(depth), bq), jnp.float32)
    pairs = int((blocks.kinds != common.DEAD).sum()) * bq * bk
    call = pl.pallas_call(
        functools.partial(_body, plan=plan, names=(*prefetched, *given.arrays, *outs, *scratch)),
        out_shape=tuple(outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, heads, blocks.outer, steps),
            in_specs=given.specs,
            out_specs=tuple(out_specs),
            scratch_shapes=tuple(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * pairs * depth,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*given.arrays.values(), *outs.values())),
            transcendentals=batch * heads * pairs,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_attention",
    )
    out, *lse = call(*vary_alike((*prefetched.values(), *given.arrays.values())))
    out = tile.turned(out, config.length_minor)
    return (out, lse[0].reshape(batch, heads, rows)) if return_lse else out


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    pallas_tpu,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 20,
    kernel=True,
    config_type=FlashConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
