"""Rows whose list may not be complete, compared with all codes: many programs a row, a slice of the codes each.

Such rows are rare, a few of a batch, and the rest of the chip would wait for the one program that has one: 8192 codes
of 768 numbers, four at a time, are 2.3 ms of waiting for memory. Most programs find no such row and end.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.pallas_gpu_compare import THREADS, Row, usable
from capibara.kernels.pallas.hopper import load

SHORTEST = 128  # codes of a slice: their best are then compared again, as many as there are slices
MOST_SLICES = 64
MOST_PARTS = 8  # of THREADS rows each: those of a program


def slice_length(codes: int) -> int:
    return max(SHORTEST, -(-codes // MOST_SLICES))


def by_slices(x: jax.Array, codebook: jax.Array, found: jax.Array, half: jax.Array, kept: int) -> jax.Array:
    """[slices, N] int32: the nearest code of each slice, -1 where none can be used, of rows whose list is full.

    What it says of other rows is nothing: they were not written. found is [kept + 1, N or more and 128 at the least].
    """
    rows, codes = x.shape[0], codebook.shape[0]
    slices, parts = -(-codes // slice_length(codes)), -(-rows // THREADS)
    together = min(parts, MOST_PARTS)
    (made,) = plgpu.kernel(
        functools.partial(_program, kept=kept, together=together),
        out_type=[out_struct((slices, rows), jnp.int32, x)],
        grid=(-(-parts // together), slices),
        grid_names=("rows", "slice"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x, codebook, found, half)
    return made


def _program(
    x_hbm: Any, codes_hbm: Any, found_hbm: Any, half_hbm: Any, out_hbm: Any, *, kept: int, together: int
) -> None:
    rows, codes, length = x_hbm.shape[0], codes_hbm.shape[0], slice_length(codes_hbm.shape[0])
    group, number = lax.axis_index("rows"), lax.axis_index("slice")
    first = number * length
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    place = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=layout)

    def look(start: Any, read: Any, count: Any) -> None:
        row = place + read
        full = (count >= kept) & (row >= start) & (row < rows)

        def one(_: Any, after: Any) -> Any:
            # From the last to the first: the threads agree on a largest number.
            this = jnp.max(jnp.where(full & (row < after), row, np.int32(-1)))
            values = Row(x_hbm, codes_hbm, this)
            nearest = values.nearest(lambda at: usable(half_hbm, jnp.minimum(first + at, codes - 1)), length)
            out_hbm[number, this] = nearest
            return this

        lax.fori_loop(0, jnp.sum(jnp.where(full, np.int32(1), np.int32(0))), one, np.int32(rows))

    starts = [(group * together + part) * THREADS for part in range(together)]
    # The last rows' counts are read with some before them, which are then another part's.
    reads = [jnp.minimum(start, found_hbm.shape[1] - THREADS) for start in starts]
    # All of them are asked for before the first is looked at.
    counts = [load(found_hbm.at[kept, pl.ds(read, THREADS)], layout) for read in reads]

    @pl.when(jnp.max(functools.reduce(jnp.maximum, counts)) >= kept)
    def _some_are_full() -> None:
        for part in zip(starts, reads, counts, strict=True):
            look(*part)
