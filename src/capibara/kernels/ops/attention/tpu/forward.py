"""Attention for the TPU's matrix units, in Pallas (Mosaic): the forward pass, its blocks, its launch and its body.

The scores are computed transposed, keys along the sublanes and queries along the lanes. A maximum or a sum over keys
is then an elementwise operation between registers, and a query's statistics are one number in a row instead of a
whole column of lanes: the softmax costs little more than its exponentials. The price is that queries are transposed
once a block of queries, values once a step, and the output once at the end. A head_dim below the lanes' 128 comes with
the length along the lanes (`length_minor`): then the keys are transposed once a step, and nothing else is.

The grid's last axis walks the live blocks of keys from a prefetched table (see blocks); the axes before it
are parallel and so are split over both cores of a v4 chip. A block is worked through in tiles that stay in registers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    DEAD,
    FLOOR,
    LANES,
    LOG2_E,
    MASKED,
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

# In a block that needs a mask, pieces of this many queries are skipped where position leaves nothing of them.
SKIP_Q = 512


def scratch(config: FlashConfig, depth: int, dtype: Any) -> Buffers:
    """Scratch of a call whose operands `config` was cut to."""
    block_q, block_k = config.block_q, config.block_k
    buffers: Buffers = {
        "qt": ((depth, block_q), dtype),
        "vt": ((depth, block_k), dtype),
        "acc": ((depth, block_q), jnp.float32),
        "m": ((1, block_q), jnp.float32),
        "l": ((1, block_q), jnp.float32),
    }
    if config.length_minor:
        buffers["k_rows"] = ((block_k, depth), dtype)
        buffers["tall"] = ((round_up(depth), block_k), dtype)
    elif depth % LANES:
        buffers["pad"] = ((max(block_q, block_k), round_up(depth)), dtype)
        buffers["wide"] = ((round_up(depth), block_q), jnp.float32)
    return buffers


def vmem_bytes(call: Call, config: FlashConfig) -> int:
    """VMEM the kernel asks for: every operand's block twice (the next is fetched meanwhile), the scratch, temporaries.

    Lines are counted for each call alike: the log-sum-exp of the queries, and two of the keys, segments and who is
    seen. The queries' segments are left to the reserve.
    """
    q, k = call.need("q"), call.need("k")
    depth = q.shape[3]
    config = config.fit(q.shape[2], k.shape[2])
    block_q, block_k = config.block_q, config.block_k
    fetched = sum(2 * head_bytes(config, depth, length, q.dtype) for length in (block_q, block_k))
    for name in ("bias", "mask"):
        pairs = call[name]
        if pairs is not None:
            fetched += tile_bytes(min(pairs.shape[2], block_q), block_k, np.int8 if name == "mask" else pairs.dtype)
    fetched += tile_bytes(1, block_q, np.float32) + 2 * tile_bytes(1, block_k, np.float32)
    # The next acc, and a tile's products, scores, probabilities and masks.
    temporaries = tile_bytes(depth, block_q, np.float32) + 4 * tile_bytes(config.chunk_k, config.chunk_q, np.float32)
    return 2 * fetched + scratch_bytes(scratch(config, depth, q.dtype)) + temporaries


def candidates(call: Call) -> Sequence[FlashConfig]:
    """Every distinct block that fits VMEM and the caller's block mask, best predicted first."""
    return [config for like in _likes(call) for config in blocks.candidates(call, like, vmem_bytes)]


def _likes(call: Call) -> list[FlashConfig]:
    return [FlashConfig(length_minor=length_minor) for length_minor in blocks.orders(call)]


def refuses(call: Call) -> str | None:
    reason = blocks.refuses(call)
    if reason is not None:
        return reason
    # One will do: this is asked at every call.
    fits = any(True for like in _likes(call) for _ in blocks.fitting(call, like, vmem_bytes))
    return None if fits else "no block of it fits the core's VMEM and the block mask"


def tpu_forward(
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
    rules = blocks.rules_of(q, k, params)
    batch, heads, rows, depth = q.shape
    config = config.fit(rows, rules.columns)
    block_q, block_k = config.block_q, config.block_k
    live = Blocks(rules, (block_q, block_k), masked=mask is not None)
    table, table_shape = live.table(block_mask, params["block_size"], q_segments, kv_segments)
    steps = live.steps
    visible = tiles.visible_keys(q, k, mask, (q_segments, kv_segments), params)
    plan = _Plan(
        rules, config, steps, table_shape, live.outer,
        whole_blocks=mask is None and live.has(WHOLE),
        partial_blocks=mask is not None or q_segments is not None or live.has(PARTIAL),
        folded=q.dtype == jnp.float32 or math.frexp(rules.scale * LOG2_E)[0] == 0.5,
    )  # fmt: skip

    def walk(b: Any, h: Any, i: Any, s: Any, table: Any, *_: Any) -> tuple[Any, Any, Any, Any]:
        return b, h, i, blocks.entry(table, plan.table_shape, plan.query_blocks, steps, (b, h, i, s)) >> 2

    operands = tiles.Operands(walk, rules, (block_q, block_k), config.length_minor)
    prefetched = {"table": table}
    if rules.dropout_rate and dropout_seed is not None:
        prefetched["seed"] = jax.lax.bitcast_convert_type(dropout_seed, jnp.int32)
    operands.add_heads("q", q, operands.by_query)
    operands.add_heads("k", k, operands.by_key)
    operands.add_heads("v", v, operands.by_key)
    operands.add_bias(bias)
    operands.add_masks(mask, q_segments, kv_segments, visible)
    outs, out_specs = {"out": out_struct(operands.arrays["q"].shape, q.dtype, q)}, [operands.by_query]
    if return_lse:
        outs["lse"] = out_struct((batch, heads, 1, rows), jnp.float32, q)
        out_specs.append(operands.query_row)
    buffers = scratch(config, depth, q.dtype)
    pairs = int((live.kinds != DEAD).sum()) * block_q * block_k
    call = pl.pallas_call(
        functools.partial(_body, plan=plan, names=(*prefetched, *operands.arrays, *outs, *buffers)),
        out_shape=tuple(outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, heads, live.outer, steps),
            in_specs=operands.specs,
            out_specs=tuple(out_specs),
            scratch_shapes=[pltpu.VMEM(*buffer) for buffer in buffers.values()],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * pairs * depth,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands.arrays.values(), *outs.values())),
            transcendentals=batch * heads * pairs,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_attention",
    )
    out, *lse = call(*vary_alike((*prefetched.values(), *operands.arrays.values())))
    out = tiles.turned(out, config.length_minor)
    return (out, lse[0].reshape(batch, heads, rows)) if return_lse else out


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


class _At(NamedTuple):
    """A step's place, values of the kernel."""

    batch: Any
    head: Any
    query_block: Any
    key_block: Any


def _body(*args: Any, plan: _Plan, names: tuple[str, ...]) -> None:
    """Grid (batch, head, query block, step): the steps walk the live key blocks."""
    refs = dict(zip(names, args, strict=True))
    rules, config = plan.rules, plan.config
    batch, head, query_block, step = (pl.program_id(axis) for axis in range(4))
    place = (batch, head, query_block, step)
    entry = blocks.entry(refs["table"], plan.table_shape, plan.query_blocks, plan.steps, place)
    kind, key_block = entry & 3, entry >> 2
    at = _At(batch, head, query_block, key_block)
    strips, chunks = range(0, config.block_q, config.chunk_q), range(0, config.block_k, config.chunk_k)

    @pl.when(step == 0)
    def _start() -> None:
        q = refs["q"][...]
        if plan.folded:
            q = (q.astype(jnp.float32) * plan.factor).astype(q.dtype)
        refs["qt"][...] = tiles.as_columns(q, refs, config.length_minor)
        refs["m"][...] = jnp.full_like(refs["m"], FLOOR)
        refs["l"][...] = jnp.zeros_like(refs["l"])
        refs["acc"][...] = jnp.zeros_like(refs["acc"])

    def turn_keys() -> None:
        if config.length_minor:
            refs["k_rows"][...] = tiles.transposed_back(refs["k"][...], refs.get("tall"))

    if plan.whole_blocks:

        @pl.when(kind == WHOLE)
        def _whole() -> None:
            turn_keys()
            if not config.length_minor:
                refs["vt"][...] = tiles.transposed(refs["v"][...], refs.get("pad"))
            for q0 in strips:
                _update(plan, refs, at, q0, chunks, masked=False)

    if plan.partial_blocks:

        @pl.when(kind == PARTIAL)
        def _partial() -> None:
            turn_keys()
            values = tiles.as_columns(refs["v"][...], refs, config.length_minor)
            refs["vt"][...] = tiles.only_seen(rules, config.block_k, refs.get("visible"), key_block, values)
            skip = tiles.piece(SKIP_Q, config.block_q, config.chunk_q)
            for first in range(0, config.block_q, skip):
                for k0 in chunks:
                    row, column = query_block * config.block_q + first, key_block * config.block_k + k0

                    @pl.when(~tiles.tile_is_dead(rules, row, column, skip, config.chunk_k))
                    def _piece(first: int = first, k0: int = k0) -> None:
                        for q0 in range(first, min(first + skip, config.block_q), config.chunk_q):
                            _update(plan, refs, at, q0, (k0,), masked=True)

    @pl.when(step == plan.steps - 1)
    def _finish() -> None:
        l_i = refs["l"][...]
        inverse = jnp.where(l_i == 0.0, 0.0, 1.0 / (l_i * (1.0 - rules.dropout_rate)))
        out = refs["acc"][...] * inverse
        if not config.length_minor:
            out = tiles.transposed_back(out, refs.get("wide"))
        refs["out"][...] = out.astype(refs["out"].dtype)
        if "lse" in refs:
            lse = refs["m"][...] * math.log(2) + jnp.log(l_i)
            refs["lse"][...] = jnp.where(l_i == 0.0, -jnp.inf, lse)


def _update(plan: _Plan, refs: dict[str, Any], at: _At, q0: int, k_starts: Sequence[int], masked: bool) -> None:
    """One strip of queries through some chunks of the key block: statistics and output stay in registers between."""
    cq, ck = plan.config.chunk_q, plan.config.chunk_k
    queries = pl.ds(q0, cq)
    m_i, l_i, acc = refs["m"][:, queries], refs["l"][:, queries], refs["acc"][:, queries]
    for k0 in k_starts:
        x = _scores(plan, refs, at, q0, k0, masked)
        m_next = jnp.maximum(m_i, jnp.max(x, axis=0, keepdims=True))
        p = jnp.exp2(x - m_next)
        alpha = jnp.exp2(m_i - m_next)
        l_i = l_i * alpha + jnp.sum(p, axis=0, keepdims=True)
        m_i = m_next
        if plan.rules.dropout_rate:
            place = (at.query_block * plan.config.block_q + q0, at.key_block * plan.config.block_k + k0)
            kept = tiles.keep_pairs(plan.rules, refs["seed"], at.batch * plan.rules.heads + at.head, *place, (ck, cq))
            p = jnp.where(kept, p, 0.0)
        values = refs["v" if plan.config.length_minor and not masked else "vt"][:, pl.ds(k0, ck)]
        acc = acc * alpha + jax.lax.dot(
            values, p.astype(values.dtype), precision=plan.rules.precision, preferred_element_type=jnp.float32
        )
    refs["m"][:, queries], refs["l"][:, queries], refs["acc"][:, queries] = m_i, l_i, acc


def _scores(plan: _Plan, refs: dict[str, Any], at: _At, q0: int, k0: int, masked: bool) -> jax.Array:
    """Exponents of two of a tile [keys, queries]."""
    rules, cq, ck = plan.rules, plan.config.chunk_q, plan.config.chunk_k
    row, column = at.query_block * plan.config.block_q + q0, at.key_block * plan.config.block_k + k0
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
        bias = tiles.bias_tile(refs, (q0, k0), (ck, cq))
        x = x + bias * (1 / rules.softcap if rules.softcap else LOG2_E)
    if rules.softcap:
        x = jnp.tanh(x) * (rules.softcap * LOG2_E)
    if not masked:
        return x
    for allowed in tiles.pairs_allowed(rules, refs, (row, column), (q0, k0), (ck, cq), plan.tails):
        x = jnp.where(allowed, x, MASKED)
    return x


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    tpu_forward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=FlashConfig,
    candidates=candidates,
)
