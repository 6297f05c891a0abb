"""Attention forward for Hopper's tensor cores, in Pallas (Mosaic GPU): what XLA does around the kernel.

A program computes 128 rows of queries of one head: one warpgroup streams blocks of keys and values by TMA, two
compute 64 rows each (see pallas_gpu_body). Blocks that no query of the program can see are never fetched: by position
they are left out of a range, by the operands (block mask, segments, mask) out of a table (see pallas_gpu_blocks).
Lengths and head sizes that the tiles do not divide are padded with zeros here, and cut again.

Keys that nobody sees: what lies in them has no effect, NaN included, when position or the segments or the mask rule
them out for every query of the head, or the block mask does in whole tiles (128 queries by a block of keys). A value
that some query sees may reach, if it is NaN, other queries of the same tile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.attention import pallas_gpu_blocks as blocks
from capibara.kernels.ops.attention.masking import Window, both, expand_blocks, span
from capibara.kernels.ops.attention.pallas_gpu_body import program
from capibara.kernels.ops.attention.pallas_gpu_config import (
    REDUCTION_BYTES,
    HopperConfig,
    aligned,
    candidates,
    default_config,
    folds_mask,
    padded_head_dim,
    rank,
    refuses,
    round_up,
)
from capibara.kernels.ops.attention.pallas_gpu_tile import Band
from capibara.kernels.ops.attention.pallas_gpu_walk import Plan

__all__ = ["IMPLEMENTATION", "HopperConfig", "mosaic_gpu", "refuses"]

LAYOUTS = {"bhtd": 2, "bthd": 1}  # with the axis of the length


def mosaic_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, mask: jax.Array | None = None,
    q_segments: jax.Array | None = None, kv_segments: jax.Array | None = None, block_mask: jax.Array | None = None,
    dropout_seed: jax.Array | None = None, *, config: HopperConfig, causal: bool = False, q_offset: int = 0,
    window: Window = None, scale: float | None = None, softcap: float | None = None, dropout_rate: float = 0.0,
    block_size: tuple[int, int] | None = None, return_lse: bool = False, physical: str = "bhtd",
) -> Any:  # fmt: skip
    """One kernel over all tiles of queries; see the module's text.

    `physical` says how the caller's arrays lie in memory. With "bthd" the kernel reads and writes [batch, length,
    heads, head_dim]; the transposes here and the caller's own cancel, so that none is ever made.
    """
    if physical not in LAYOUTS:
        raise rule_error(f"physical is one of {', '.join(LAYOUTS)}", repr(physical), "use 'bhtd'")
    batch, heads, rows, depth = q.shape
    columns = k.shape[2]
    below, above = span(causal, q_offset, window)
    grid = blocks.Grid(rows, Band(below, above, columns), config.tile, config.block_k)

    if block_mask is not None and block_size is not None and not aligned(block_size, config):
        # Blocks that cut through a tile: from here on it is a mask of pairs.
        mask = both(mask, expand_blocks(block_mask, jnp.arange(rows), jnp.arange(columns), block_size))
        block_mask = None
    folded = mask is not None and folds_mask(depth, bias, mask.shape[2] > 1)
    if folded and mask is not None and bias is not None:  # the mask travels in the bias, as minus infinity
        bias = jnp.where(mask, bias.astype(jnp.float32), -jnp.inf)

    params = {"causal": causal, "q_offset": q_offset, "window": window}
    visible = blocks.visible_keys(grid, mask, q_segments, kv_segments, params)
    given: dict[str, jax.Array] = {}
    if any(x is not None for x in (mask, q_segments, block_mask)):
        given["table"] = blocks.table(grid, mask, q_segments, kv_segments, block_mask, block_size, visible)
    if visible is not None:
        given["visible"] = blocks.in_blocks(visible.astype(jnp.int32), config.block_k)
    if q_segments is not None and kv_segments is not None:
        given["q_segments"] = blocks.in_blocks(q_segments, config.tile)
        given["kv_segments"] = blocks.in_blocks(kv_segments, config.block_k)
    for name, x in (("bias", None if bias is None else _narrow(bias)), ("mask", None if folded else mask)):
        if x is None:
            continue
        x = x.astype(jnp.int8) if name == "mask" else x
        if x.shape[2] == 1:  # one row for all queries
            given[f"{name}_row"] = blocks.in_blocks(x[:, :, 0], config.block_k)
        else:
            given[f"{name}_tile"] = blocks.in_tiles(x, config)
    if dropout_rate:
        assert dropout_seed is not None  # the op's check has seen to it
        given["seed"] = jax.lax.bitcast_convert_type(dropout_seed, jnp.int32)

    # TMA takes lengths in multiples of 8. An axis of a single tile is dropped from its descriptor, and stores past
    # the end would not be clipped: there is always room for both warpgroups.
    long_q = max(round_up(rows, 8), config.tile)
    long_k = max(round_up(columns, 8), config.block_k)
    wide = padded_head_dim(depth)
    # Transposed before padding and after cutting, so that nothing stands between the caller's transposes and these.
    length = LAYOUTS[physical]
    kv_heads = k.shape[1]
    q, k, v = (laid_out(x, physical) for x in (q, k, v))
    q = blocks.padded(q, _sizes({length: long_q, 3: wide}))
    k, v = (blocks.padded(x, _sizes({length: long_k, 3: wide})) for x in (k, v))

    outs = {"out": out_struct(q.shape, q.dtype, q)}
    tiles = grid.counts[0]
    if return_lse:
        # One number a row is stored without a TMA descriptor, so nothing drops what lies past the last row: the
        # array is made long enough for whole tiles and cut afterwards.
        outs["lse"] = out_struct((batch, heads, tiles * config.tile), jnp.float32, q)
    plan = Plan(
        config=config,
        grid=grid,
        batch=batch,
        heads=heads,
        group=heads // kv_heads,
        scale=depth**-0.5 if scale is None else float(scale),
        softcap=softcap,
        dropout_rate=dropout_rate,
        heads_first=physical == "bhtd",
        folded=folded,
    )
    launch, axes = plan.launch
    kernel = plgpu.kernel(
        functools.partial(program, plan=plan, names=("q", "k", "v", *given, *outs)),
        out_type=list(outs.values()),
        grid=launch,
        grid_names=axes,
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=REDUCTION_BYTES,
            # Every store to shared memory is followed by commit_smem, which waits for all threads by itself.
            unsafe_no_auto_barriers=True,
        ),
    )
    out, *lse = kernel(*vary_alike((q, k, v, *given.values())))
    out = laid_out(jax.lax.slice_in_dim(out, 0, rows, axis=length)[..., :depth], physical)
    return (out, lse[0][:, :, :rows]) if return_lse else out


def laid_out(x: jax.Array, physical: str) -> jax.Array:
    """[B, H, T, D] as it lies in memory, and back again."""
    return x if physical == "bhtd" else x.swapaxes(1, 2)


def _sizes(given: dict[int, int]) -> tuple[int, ...]:
    return tuple(given.get(axis, 0) for axis in range(4))


def _narrow(bias: jax.Array) -> jax.Array:
    """float64 has no place in a tile of float32 scores."""
    return bias.astype(jnp.float32) if bias.dtype.itemsize > 4 else bias


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    rank=rank,
    kernel=True,
    hints=("physical",),
    config_type=HopperConfig,
    default_config=default_config,
    candidates=candidates,
)
