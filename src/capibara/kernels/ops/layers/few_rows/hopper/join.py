"""What follows a product that was summed in parts: their sum, the residual's, and its RMS norm, in one pass.

A program has a row. Everything that it reads is asked for before anything is computed, and all of it stays in
registers: a row is short, and what it waits for is the memory's answer, once.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.norm.reference import shrink_of
from capibara.kernels.pallas.hopper import load, named
from capibara.kernels.pallas.overlap import await_previous, let_next_start, overlaps

THREADS = 128  # of a warpgroup
MOST_COLUMNS = 16384  # 128 numbers a thread
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)  # memory is either read or written


def refuses_width(columns: int) -> str | None:
    if columns % THREADS or columns > MOST_COLUMNS:
        return f"it takes the norm of rows of a multiple of {THREADS} numbers up to {MOST_COLUMNS}, not {columns}"
    return None


def join(parts: jax.Array, residual: jax.Array, scale: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """(residual + the sum of parts [splits, rows, columns], rounded to the residual's type; the RMS norm of that)."""
    rows, columns = residual.shape
    out = out_struct((rows, columns), residual.dtype, residual)
    total, normal = plgpu.kernel(
        named("few_rows_join", _program, eps=eps, early=overlaps()),
        out_type=[out, out],
        grid=(rows,),
        grid_names=("row",),
        compiler_params=COMPILER_PARAMS,
    )(parts, residual, scale)
    return total, normal


def _program(
    parts_hbm: Any, residual_hbm: Any, scale_hbm: Any, total_hbm: Any, normal_hbm: Any, *, eps: float, early: bool
) -> None:
    if early:
        let_next_start()
        await_previous()
    row = lax.axis_index("row")
    splits, _, columns = parts_hbm.shape
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=math.gcd(columns // THREADS, 4))
    shrink = shrink_of(eps)

    def wide(ref: Any) -> Any:
        return load(ref, layout).astype(jnp.float32)

    y = wide(parts_hbm.at[0, row])
    for split in range(1, splits):
        y = y + wide(parts_hbm.at[split, row])
    total = (y + wide(residual_hbm.at[row])).astype(total_hbm.dtype)
    total_hbm.at[row][...] = total
    smaller = total.astype(jnp.float32) * shrink
    spread = lax.rsqrt(jnp.sum(smaller * smaller) * (1 / columns) + eps * shrink**2)
    normal_hbm.at[row][...] = (smaller * spread * wide(scale_hbm)).astype(normal_hbm.dtype)
