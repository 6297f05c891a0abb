"""One result of the parts that a sequence's keys were cut into, by their log-sum-exps, in one pass.

A program has a row, a head's of a token. Everything that it reads is asked for before anything is computed: what it
waits for is the memory's answer, once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.pallas.hopper import LOG2E, load, named
from capibara.kernels.pallas.overlap import await_previous, let_next_start, overlaps

THREADS = 128  # of a warpgroup
MOST_PARTS = 32  # a number of each in registers
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)  # memory is either read or written


def takes(parts: int, depth: int) -> bool:
    return parts <= MOST_PARTS and depth >= THREADS


def join(out: jax.Array, lse: jax.Array, live: jax.Array, own: tuple[int, int], dtype: Any) -> jax.Array:
    """[tiles, rows, depth] of out [tiles, parts, rows, depth] and lse [tiles, parts, heads, fetched].

    Args:
      live: [tiles, parts]: parts that are not were never written.
      own: (rows of a head, heads whose rows were fetched together): where a row's number lies in lse.
      dtype: of the result.
    """
    tiles, _, rows, depth = out.shape
    (joined,) = plgpu.kernel(
        named("paged_attention_join", _program, each=own[0], together=own[1], early=overlaps()),
        out_type=[out_struct((tiles, rows, depth), dtype, out)],
        grid=(tiles, rows),
        grid_names=("tile", "row"),
        compiler_params=COMPILER_PARAMS,
    )(out, lse, live.astype(jnp.int32))
    return joined


def _program(
    out_hbm: Any, lse_hbm: Any, live_hbm: Any, joined_hbm: Any, *, each: int, together: int, early: bool
) -> None:
    if early:
        let_next_start()
        await_previous()
    tile, row = lax.axis_index("tile"), lax.axis_index("row")
    _, parts, _, depth = out_hbm.shape
    # A number a thread, or several: where they do not come out even, two stretches of the head overlap, and what lies
    # in both is computed and written twice.
    width = depth if depth % THREADS == 0 else THREADS
    starts = sorted({min(start, depth - width) for start in range(0, depth, width)})
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
    head = lax.div(row, each)
    at = lax.rem(head, together) * each + lax.rem(row, each)

    def columns(ref: Any, start: int) -> Any:
        return ref if width == depth else ref.at[pl.ds(start, width)]

    values = [[load(columns(out_hbm.at[tile, part, row], start), layout) for part in range(parts)] for start in starts]
    alive = [live_hbm[tile, part] > 0 for part in range(parts)]
    lse = [jnp.where(alive[part], lse_hbm[tile, part, head, at], -jnp.inf) for part in range(parts)]
    highest = functools.reduce(jnp.maximum, lse)
    base = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = [jnp.exp2((x - base) * LOG2E) for x in lse]
    total = functools.reduce(jnp.add, weights)
    spread = 1.0 / jnp.where(total == 0.0, 1.0, total)  # a NaN stays one
    for start, stretch in zip(starts, values, strict=True):
        y = jnp.zeros((width,), jnp.float32)
        for value, weight, written in zip(stretch, weights, alive, strict=True):
            y = y + jnp.where(jnp.broadcast_to(written, (width,)), value, 0.0) * (weight * spread)
        columns(joined_hbm.at[tile, row], start)[...] = y.astype(joined_hbm.dtype)
