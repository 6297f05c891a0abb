"""Attention for the TPU's matrix units, in Pallas (Mosaic): the backward pass.

One kernel where a head's gradients fit in VMEM: a block of keys stays, the grid walks the live blocks of queries, and
the gradient of the queries is summed in VMEM on the way. Five matrix products a block. Where they do not fit, two
kernels that compute the probabilities twice, seven products:

- dkv: a block of keys stays, the grid walks the live blocks of queries, of every head that shares the keys;
- dq: a block of queries stays, the grid walks the live blocks of keys.

A bias has its gradient from a kernel of its own, which visits every pair and sums over the axes the bias lacks.

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

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.attention import pallas_tpu_common as common
from capibara.kernels.ops.attention import pallas_tpu_config as limits
from capibara.kernels.ops.attention import pallas_tpu_grad_bodies as bodies
from capibara.kernels.ops.attention import pallas_tpu_tile as tile
from capibara.kernels.ops.attention.pallas_tpu_common import LANES, LOG2_E, PARTIAL, FlashConfig
from capibara.kernels.ops.attention.pallas_tpu_grad_bodies import GradPlan


@dataclasses.dataclass(frozen=True)
class FlashGradConfig(FlashConfig):
    """Block sizes as in the forward pass.

    Attributes:
      fused: one kernel for all gradients, which keeps those of a whole head in VMEM; else two.
    """

    fused: bool = True


def vmem_bytes(call: Call, config: FlashConfig) -> int:
    """VMEM of the fused kernel, or of the larger of the two; see the forward pass's."""
    assert isinstance(config, FlashGradConfig)
    q, k = call.need("q"), call.need("k")
    (_, heads, rows, depth), columns, size = q.shape, k.shape[2], limits.tile_bytes
    bq, bk = config.block_q, config.block_k
    head = functools.partial(limits.head_bytes, config, depth)
    used = 2 * (2 * head(bq, q.dtype) + 2 * head(bk, q.dtype))
    used += 2 * (3 * size(1, bq, np.float32) + 2 * size(1, bk, np.float32))
    mask = call["mask"]
    if mask is not None:
        used += 2 * size(min(mask.shape[2], bq), bk, np.int8)
    sums = 1 if heads == k.shape[1] or not config.fused else -(-columns // bk)
    dkv = 2 * 2 * head(bk, q.dtype) + 2 * head(bk, np.float32) * sums
    turned = size(depth, bk, q.dtype)
    if config.length_minor:  # keys and values as rows, in each of the kernels
        used += 2 * size(bk, depth, q.dtype) + size(common.round_up(depth), bk, q.dtype)
    elif depth % LANES:
        turned += size(max(bq, bk), depth, q.dtype) + size(common.round_up(depth), bq, np.float32)
    if config.fused:
        whole = common.round_up(rows, bq)
        used += dkv + turned + size(depth, whole, np.float32) + 2 * head(whole, q.dtype)
    else:
        dq = 2 * head(bq, q.dtype) + 2 * size(depth, bq, q.dtype) + turned
        used += max(dkv, dq + 2 * size(depth, bq, np.float32))
    bias = call["bias"]
    if bias is not None:
        block = min(bias.shape[2], bq), bk
        # In the third kernel the bias's gradient takes the place of the others'; all three are held to the sum.
        used += 4 * size(*block, bias.dtype) + size(*block, np.float32)
    return used + 8 * size(config.chunk_k, config.chunk_q, np.float32)


def candidates(call: Call) -> Sequence[FlashGradConfig]:
    """Every distinct block that fits VMEM and the caller's block mask, best predicted first; fused ones before."""

    def made(turned: bool) -> list[FlashGradConfig]:
        fused, apart = (FlashGradConfig(fused=fused, length_minor=turned) for fused in (True, False))
        return [*limits.candidates(call, fused, vmem_bytes), *limits.candidates(call, apart, vmem_bytes)]

    return limits.in_both_orders(call, made)


def refuses(call: Call) -> str | None:
    reason = limits.refuses(call)
    if reason is not None:
        return reason
    if call.need("d_out").dtype != call.need("q").dtype:
        return f"the output's gradient is {call.need('d_out').dtype} and the queries are {call.need('q').dtype}"
    return None if candidates(call) else "no block of it fits the core's VMEM and the block mask"


def _call(
    body: Any, plan: GradPlan, given: tile.Operands, prefetched: dict[str, Any], grid: tuple[int, ...],
    outs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]], scratch: dict[str, Any],
    *, parallel: int, products: int,
) -> Any:  # fmt: skip
    """The pallas_call that every kernel here is.

    `parallel` counts the leading grid axes that may run in any order, `products` the matrix products of a block.
    """
    batch, pairs = given.arrays["q"].shape[0], plan.rules.rows * plan.rules.columns
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * batch * plan.rules.heads * pairs * plan.rules.depth,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in given.arrays.values()),
            transcendentals=batch * plan.rules.heads * pairs,
        ),
        interpret=current_interpret().pallas_argument(),
        name=f"capibara_attention_{'_'.join(outs)}",
    )
    return call(*vary_alike((*prefetched.values(), *given.arrays.values())))


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
    config: FlashGradConfig,
    **params: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(dq, dk, dv, dbias) as one to three Pallas calls; see the module's text."""
    rules = common.rules_of(q, k, params)
    config = config.fit(rules.rows, rules.columns)
    blocks, depth, turned = (config.block_q, config.block_k), rules.depth, config.length_minor
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse.astype(jnp.float32)
    # A query that sees nothing has a log-sum-exp of minus infinity; plus infinity makes its probabilities zero.
    exponent = jnp.where(jnp.isneginf(lse), jnp.inf, lse.astype(jnp.float32) * LOG2_E)
    segments = (q_segments, kv_segments)
    visible = tile.visible_keys(q, k, mask, segments, params)
    seed = {}
    if rules.dropout_rate and dropout_seed is not None:
        seed["seed"] = jax.lax.bitcast_convert_type(dropout_seed, jnp.int32)

    def prepare(body: str) -> tuple[GradPlan, tile.Operands, dict[str, Any]]:
        """The plan and operands of the kernel "dq", "dkv", "fused" or "dbias"."""
        # Where queries are summed over, a block that reaches past the last one has to be masked.
        ragged = body != "dq"
        walked = common.Blocks(
            rules, blocks, by_key=body in ("dkv", "fused"), masked=mask is not None, ragged_rows=ragged
        )
        table, table_shape = walked.table(block_mask, params["block_size"], *segments)
        live = walked.steps
        if body == "dbias":  # every block is written, so the table is the kinds themselves
            kinds = walked.refined(block_mask, params["block_size"], *segments)
            table, table_shape, live = kinds.reshape(-1), (kinds.shape[0], kinds.shape[1]), kinds.shape[3]
        plan = GradPlan(
            rules, config,
            whole_blocks=mask is None and walked.has(common.WHOLE),
            partial_blocks=mask is not None or q_segments is not None or walked.has(PARTIAL),
            table_shape=table_shape, outer_blocks=walked.outer, live=live,
            tails=(ragged and bool(rules.rows % blocks[0]), bool(rules.columns % blocks[1])),
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
        given = tile.Operands(walks[body], rules, blocks, turned)
        for name, x in (("q", q), ("do", d_out)):
            given.add_heads(name, x, given.by_query)
        for name, x in (("k", k), ("v", v)):
            given.add_heads(name, x, given.by_key)
        for name, x in (("lse", exponent), ("delta", delta)):
            given.add(name, x[:, :, None], given.query_row)
        given.add_bias(bias)
        given.add_masks(mask, q_segments, kv_segments, visible if body in ("dq", "fused") else None)
        return plan, given, {"table": table} | seed

    rows: dict[str, Any] = {}  # keys and values as [keys, depth], where they come the other way
    if turned:
        rows = {name: pltpu.VMEM((blocks[1], depth), k.dtype) for name in ("k_rows", "v_rows")}
        rows["tall"] = pltpu.VMEM((common.round_up(depth), blocks[1]), k.dtype)
    dbias = None
    if bias is not None:
        # A kernel of its own: where nothing asks for the bias's gradient, the compiler drops it.
        plan, given, prefetched = prepare("dbias")
        counts = (q.shape[0], rules.heads, plan.outer_blocks)
        whole_axes = [have == full for have, full in zip(bias.shape[:3], q.shape[:3], strict=True)]
        walked_out = [n if kept else 1 for n, kept in zip(counts, whole_axes, strict=True)]
        summed = [1 if kept else n for n, kept in zip(counts, whole_axes, strict=True)]
        block = (blocks[0] if whole_axes[2] else 1, blocks[1])
        (dbias,) = _call(
            bodies.dbias_body, plan, given, prefetched, (*walked_out, plan.live, *summed),
            {
                "dbias": (
                    out_struct(bias.shape, bias.dtype, q),
                    pl.BlockSpec((None, None, *block), lambda b, h, i, j, *_: (b, h, i, j)),
                )
            },
            {"dbias_sum": pltpu.VMEM(block, jnp.float32)} | rows, parallel=4, products=2,
        )  # fmt: skip
    shapes = {
        name: out_struct((*x.shape[:2], depth, x.shape[2]) if turned else x.shape, x.dtype, x)
        for name, x in (("dq", q), ("dk", k), ("dv", v))
    }
    transposes = {"kt": pltpu.VMEM((depth, blocks[1]), k.dtype)} | rows
    if depth % LANES and not turned:
        transposes["pad"] = pltpu.VMEM((max(blocks), common.round_up(depth)), q.dtype)
        transposes["wide"] = pltpu.VMEM((common.round_up(depth), blocks[0]), jnp.float32)
    sum_of_keys = (depth, blocks[1]) if turned else (blocks[1], depth)
    if config.fused:
        plan, given, prefetched = prepare("fused")
        kept = plan.outer_blocks if rules.groups > 1 else 1
        query_blocks = -(-rules.rows // blocks[0])
        last = rules.groups - 1
        # Until the group's last head the gradients of the keys are not complete: nothing but block 0 is visited.
        by_key = tile.head_block(
            blocks[1], depth, turned, lambda b, kv, g, j, *_: (b, kv, jax.lax.select(g == last, j, 0))
        )
        whole = tile.head_block(
            query_blocks * blocks[0], depth, turned, lambda b, kv, g, *_: (b, kv * rules.groups + g, 0)
        )
        dq, dk, dv = _call(
            bodies.fused_body, plan, given, prefetched,
            (q.shape[0], k.shape[1], rules.groups, plan.outer_blocks, plan.live),
            {"dq": (shapes["dq"], whole), "dk": (shapes["dk"], by_key), "dv": (shapes["dv"], by_key)},
            {
                "dq_sum": pltpu.VMEM((query_blocks, depth, blocks[0]), jnp.float32),
                "dk_sum": pltpu.VMEM((kept, *sum_of_keys), jnp.float32),
                "dv_sum": pltpu.VMEM((kept, *sum_of_keys), jnp.float32),
            } | transposes,
            parallel=2, products=5,
        )  # fmt: skip
        return *(tile.turned(x, turned) for x in (dq, dk, dv)), dbias
    plan, given, prefetched = prepare("dkv")
    dk, dv = _call(
        bodies.dkv_body, plan, given, prefetched,
        (q.shape[0], k.shape[1], plan.outer_blocks, rules.groups * plan.live),
        {"dk": (shapes["dk"], given.by_key), "dv": (shapes["dv"], given.by_key)},
        {name: pltpu.VMEM((1, *sum_of_keys), jnp.float32) for name in ("dk_sum", "dv_sum")} | rows,
        parallel=3, products=4,
    )  # fmt: skip
    plan, given, prefetched = prepare("dq")
    scratch = {"dq_sum": pltpu.VMEM((depth, blocks[0]), jnp.float32)}
    if not turned:
        scratch |= {name: pltpu.VMEM((depth, blocks[0]), q.dtype) for name in ("qt", "dot")}
    (dq,) = _call(
        bodies.dq_body, plan, given, prefetched, (*q.shape[:2], plan.outer_blocks, plan.live),
        {"dq": (shapes["dq"], given.by_query)}, scratch | transposes, parallel=3, products=3,
    )  # fmt: skip
    return *(tile.turned(x, turned) for x in (dq, dk, dv)), dbias


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    pallas_tpu_grad,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 20,
    kernel=True,
    config_type=FlashGradConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
