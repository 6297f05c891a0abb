"""Attention backward for Hopper's tensor cores, in Pallas (Mosaic GPU): five products, one kernel.

A program owns a tile of keys of one key head and goes over the queries that see them, of every query head that
shares the key head. The gradients of its keys and values stay in registers until the end; the gradient of the
queries is a sum over programs, added in float32 by the copy engine. The order of that sum is the order in which
programs arrive, so dq may differ in its last bits from run to run.

Steps of queries that see none of the keys are never fetched: by position they are left out of a range, by the
operands (block mask, segments, mask) out of a table (see pallas_gpu_grad_operands). Keys that nobody sees have no
effect and get zeros, NaN included, where they have none in the forward pass (see pallas_gpu).

The bodies are in pallas_gpu_grad_narrow.py (head_dim up to 128) and pallas_gpu_grad_wide.py (256).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike, vary_like
from capibara.kernels.ops.attention import pallas_gpu, pallas_gpu_grad_narrow, pallas_gpu_grad_wide
from capibara.kernels.ops.attention import pallas_gpu_grad_operands as operands
from capibara.kernels.ops.attention.masking import may_be_dead, span, without_dead_queries
from capibara.kernels.ops.attention.pallas_gpu import LAYOUTS, laid_out
from capibara.kernels.ops.attention.pallas_gpu_blocks import Grid
from capibara.kernels.ops.attention.pallas_gpu_config import (
    HEADS_TOGETHER,
    TILES_TOGETHER,
    VERY_LONG,
    best_order,
    padded_head_dim,
    rank_grad,
    round_up,
)
from capibara.kernels.ops.attention.pallas_gpu_grad_steps import HopperGradConfig, Steps
from capibara.kernels.ops.attention.pallas_gpu_tile import Band
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES


def candidates(call: Call) -> Sequence[HopperGradConfig]:
    head_dim = padded_head_dim(call.need("q").shape[-1])
    orders = [(stages, order) for stages in (2, 3) for order in (HEADS_TOGETHER, TILES_TOGETHER)]
    made = [HopperGradConfig(_block_q(head_dim), stages, order) for stages, order in orders]
    body = _body(head_dim)
    return [c for c in made if body.smem_bytes(c, head_dim, operands.smem_bytes(call, c, body.TILE)) <= SMEM_BYTES]


LEAST_LENGTH = 128


def _body(head_dim: int) -> Any:
    return pallas_gpu_grad_narrow if head_dim <= 128 else pallas_gpu_grad_wide


def _block_q(head_dim: int) -> int:
    return 128 if head_dim <= 64 else 64


def default_config(call: Call) -> HopperGradConfig:
    """The sums of dq, in float32, are a quarter of what a long call takes; two parts need half of that."""
    q, k = call.need("q"), call.need("k")
    parts = 2 if q.shape[2] >= VERY_LONG and k.shape[1] % 2 == 0 else 1
    head_dim = q.shape[-1]
    return HopperGradConfig(_block_q(padded_head_dim(head_dim)), order=best_order(head_dim), parts=parts)


def refuses(call: Call) -> str | None:
    q, k = call.need("q"), call.need("k")
    if call["bias"] is not None:
        return "its backward pass has no form with bias, whose own gradient it would have to sum"
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    return pallas_gpu.refuses(call)


def mosaic_gpu_grad(
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
    body = _body(padded_head_dim(head_dim))
    below, above = span(causal, q_offset, window)
    grid = Grid(length, Band(below, above, keys), config.block_q, body.TILE)
    params = {"causal": causal, "q_offset": q_offset, "window": window}
    more = operands.prepared(grid, (heads, kv_heads), mask, q_segments, kv_segments, block_mask, block_size, params)
    if dropout_rate:
        assert dropout_seed is not None  # the op's check has seen to it
        more["row_keys"] = operands.row_keys(dropout_seed, batch, heads, length, config.block_q)
    k, v = operands.hide_unseen(grid, k, v)
    by_data = any(x is not None for x in (mask, q_segments, block_mask))
    if may_be_dead(length, keys, causal, q_offset, window, by_data):
        q, d_out, out = without_dead_queries(lse, q, d_out, out)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse.astype(jnp.float32)
    # A query that sees nothing, and the rows past the last, have probabilities of zero: 2^(s - infinity).
    logs = jnp.where(jnp.isneginf(lse), jnp.inf, lse.astype(jnp.float32) * LOG2E)
    # Lines of one number a row are fetched without a TMA descriptor, so they are made long enough for whole steps.
    beyond = -length % config.block_q
    logs = jnp.pad(logs, ((0, 0), (0, 0), (0, beyond)), constant_values=jnp.inf)
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, beyond)))

    # Exchanged before padding and after cutting: an exchange then cancels with the caller's own.
    along = LAYOUTS[physical]
    q, k, v, d_out = (laid_out(x, physical) for x in (q, k, v, d_out.astype(q.dtype)))
    wide = padded_head_dim(head_dim)
    q, d_out = (_padded(x, along, length, wide) for x in (q, d_out))
    k, v = (_padded(x, along, keys, wide) for x in (k, v))
    steps = Steps(
        config=config, tile=body.TILE, keys=keys, length=length, group=heads // kv_heads, offset=q_offset, left=left,
        right=right, scale=scale, softcap=softcap, physical=physical, dropout_rate=dropout_rate,
    )  # fmt: skip
    arrays = dict(zip(("q", "k", "v", "d_out", "lse", "delta"), (q, k, v, d_out, logs, delta), strict=True)) | more
    arrays = dict(zip(arrays, vary_alike(tuple(arrays.values())), strict=True))
    dq, dk, dv = _launch(body, steps, arrays)

    def cut(x: jax.Array, size: int) -> jax.Array:
        return laid_out(jax.lax.slice_in_dim(x, 0, size, axis=along)[..., :head_dim], physical)

    return cut(dq, length), cut(dk, keys), cut(dv, keys), None


def _launch(body: Any, steps: Steps, arrays: dict[str, jax.Array]) -> tuple[Any, Any, Any]:
    """(dq, dk, dv), as the operands lie in memory."""
    q, k = arrays["q"], arrays["k"]
    head_axis = 1 if steps.physical == "bhtd" else 2
    kv_heads, parts = k.shape[head_axis], steps.config.parts
    if kv_heads % parts:
        raise rule_error("parts divides the number of key heads", f"{parts} of {kv_heads}", "use parts=1")
    of_heads = kv_heads // parts
    sums = [size if axis != head_axis else of_heads * steps.group for axis, size in enumerate(q.shape)]
    grid = {"tile": math.ceil(steps.keys / body.TILE), "head": of_heads, "batch": q.shape[0]}
    names = tuple(steps.config.order.split())
    outs = [out_struct(k.shape, k.dtype, q)] * 2

    def kernel(part: int, out_type: Any) -> Any:
        # pl.kernel, since plgpu.kernel takes no array to add into.
        return pl.kernel(
            functools.partial(
                body.program,
                steps=dataclasses.replace(steps, first_head=part * of_heads),
                names=(*arrays, "dq", "dk", "dv"),
            ),
            out_type=out_type,
            mesh=plgpu.Mesh(
                grid=tuple(grid[name] for name in names), grid_names=names, num_threads=3, thread_name="warpgroup"
            ),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            name="attention_backward",
        )

    def finished(dq_sum: Any) -> Any:
        # Inside shard_map a kernel takes no reference that varies over the mesh, so the sums are marked afterwards.
        return (vary_like(dq_sum, q) * steps.scale).astype(q.dtype)

    # References that live in run_state alone: custom_vmap, which stands around this, takes no function that makes one
    # for itself.
    if parts == 1:

        def whole(refs: tuple[Any, Any, Any]) -> None:
            dq_sum, dk, dv = refs
            dk[...], dv[...] = kernel(0, outs)(*arrays.values(), dq_sum)

        # What dk and dv start from is overwritten and never made.
        empty = vary_like(jnp.zeros(k.shape, k.dtype), q)
        dq_sum, dk, dv = pl.run_state(whole)((jnp.zeros(sums, jnp.float32), empty, empty))
        return finished(dq_sum), dk, dv

    # dq starts from numbers that the compiler does not know, all of which are written over: from zeros it would put the
    # parts together at the end, with all sums in memory.
    dq, dk, dv = q, jnp.zeros(k.shape, k.dtype), jnp.zeros(k.shape, k.dtype)
    for part in range(parts):

        def of_part(refs: tuple[Any, Any, Any], part: int = part) -> None:
            kernel(part, ())(*arrays.values(), *refs)

        dq_sum, dk, dv = pl.run_state(of_part)((jnp.full(sums, _zero_after(dq)), dk, dv))
        dq = jax.lax.dynamic_update_slice_in_dim(dq, finished(dq_sum), part * sums[head_axis], head_axis)
        dq = jax.lax.optimization_barrier(dq)
    return dq, vary_like(dk, q), vary_like(dv, q)


def _zero_after(x: jax.Array) -> jax.Array:
    """A zero that the compiler cannot make before `x`: sums that start from it are not in memory beside the last ones.

    A barrier for the optimiser would be gone before the compiler decides what runs when.
    """
    first = jax.lax.bitcast_convert_type(x[(0,) * x.ndim], jnp.uint16)
    return (jax.lax.population_count(first) // 64).astype(jnp.float32)  # of 16 bits


def _padded(x: jax.Array, along: int, length: int, head_dim: int) -> jax.Array:
    """TMA takes lengths in multiples of 8. An axis of a single tile is dropped from its descriptor, and stores past the
    end would not be clipped: there is always room for both warpgroups."""
    wanted = {along: max(round_up(length, 8), LEAST_LENGTH), 3: head_dim}
    return jnp.pad(x, [(0, wanted.get(axis, size) - size) for axis, size in enumerate(x.shape)])


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu_grad,
    platforms=("gpu",),
    refuses=refuses,
    rank=rank_grad,
    kernel=True,
    hints=("physical",),
    same_bits=False,  # dq is summed in the order in which programs arrive
    config_type=HopperGradConfig,
    default_config=default_config,
    candidates=candidates,
)
