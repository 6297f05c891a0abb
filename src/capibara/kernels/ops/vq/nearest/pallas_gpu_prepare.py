"""The codes as the Hopper searches take them: moved, scaled and rounded to 16 bits, with their norms; one kernel.

Distances do not change when rows and codes move together, and products of what is left are the smaller, and so their
rounding, the more rows and codes had in common. Any place to move to is right; it is the mean of some codes. The scale
is from them too. What it brings beyond float16 is left out of the products, and is in what was lost.

Numbers of 16 bits are multiplied as they are. Products of very small bfloat16 numbers would be nothing to float32: such
codes are scaled by a power of two, which is exact, once for themselves and once for the rows, which are not touched.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.pallas_gpu_compare import LARGEST_USABLE, THREADS
from capibara.kernels.ops.vq.nearest.pallas_gpu_search import (
    COLUMN_LAYOUT,
    DEPTH,
    LAYOUT,
    LOWEST,
    ROW_LAYOUT,
    ROWS,
    TINY,
)
from capibara.kernels.pallas.hopper import load, swizzled

SAMPLE = 16  # codes that the centre and the scale are from
LARGEST_NUMBER = 8.0  # of the scaled sample: rows and codes may have 8,000 times as large ones before float16 ends
LARGEST_NARROW = 65000.0
MOST_AHEAD = 4  # steps of the codes that are on the way from memory together
LARGEST_SAMPLED = 1e18  # numbers of the sample from here on are left out of it


class Prepared(NamedTuple):
    """codes 16-bit [K up to the tile, D]; half of their squared norms, -LOWEST for one that cannot be used; the centre
    [D]; bounds [4]: the scale, the largest norm of a code, the largest norm of what rounding took from one, nothing.
    """

    codes: jax.Array
    half: jax.Array
    centre: jax.Array
    bounds: jax.Array


def prepare(codebook: jax.Array, tile: int) -> Prepared:
    count, width = codebook.shape
    padded = math.ceil(count / tile) * tile
    exact = codebook.dtype != jnp.float32
    narrow_type = codebook.dtype if exact else jnp.dtype(jnp.float16)
    codes = lax.pad(codebook, np.zeros((), codebook.dtype), ((0, padded - count, 0), (0, 0, 0)))
    programs = padded // ROWS
    narrow, half, centre, bounds = plgpu.kernel(
        functools.partial(_program, count=count, exact=exact),
        out_type=[
            out_struct((padded, width), narrow_type, codebook),
            *(out_struct((size,), jnp.float32, codebook) for size in (padded, width, programs * 4)),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(codes)
    # Each program wrote those of its codes; the largest are those of all.
    if programs > 1:
        bounds = lax.reduce_max(bounds.reshape(programs, 4), (0,))
    return Prepared(narrow, half, centre, bounds)


def _program(
    codes_hbm: Any, narrow_hbm: Any, half_hbm: Any, centre_hbm: Any, bounds_hbm: Any, *, count: int, exact: bool
) -> None:  # fmt: skip
    width = codes_hbm.shape[1]
    steps, program = width // DEPTH, lax.axis_index("program")
    ahead = math.gcd(steps, MOST_AHEAD)
    own = pl.ds(program * ROWS, ROWS)

    @functools.partial(
        pl.run_scoped,
        narrow_smem=plgpu.SMEM((ahead, ROWS, DEPTH), narrow_hbm.dtype, transforms=swizzled(narrow_hbm.dtype)),
        centre_smem=plgpu.SMEM((width,), jnp.float32),
        collective_axes="warpgroup",
    )
    def _scoped(narrow_smem: Any, centre_smem: Any) -> None:
        centre, scale = _sampled(codes_hbm, count, exact)
        centre_smem[...] = centre

        @pl.when(program == 0)
        def _() -> None:
            centre_hbm[...] = centre

        nothing = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), ROW_LAYOUT)

        def several(turn: Any, carry: Any) -> Any:
            numbers = [turn * ahead + part for part in range(ahead)]
            coming = [
                load(codes_hbm.at[own, pl.ds(number * DEPTH, DEPTH)], LAYOUT, optimized=False) for number in numbers
            ]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those before have left
            for part, raw in enumerate(coming):
                narrow_smem[part], carry = step(numbers[part], raw.astype(jnp.float32), carry)
            plgpu.commit_smem()
            for part, number in enumerate(numbers):
                plgpu.copy_smem_to_gmem(narrow_smem.at[part], narrow_hbm.at[own, pl.ds(number * DEPTH, DEPTH)])
            return carry

        def step(number: Any, wide: Any, carry: Any) -> tuple[Any, Any]:
            raw, norms, lost = carry
            depth = pl.ds(number * DEPTH, DEPTH)
            raw = raw + (wide * wide).sum(axis=1)
            if exact:
                wide, most = wide * scale, np.float32(np.inf)
                taken = wide * scale
            else:
                most = np.float32(LARGEST_NARROW)
                off = load(centre_smem.at[depth], COLUMN_LAYOUT, optimized=False)
                wide = taken = (wide - lax.broadcast_in_dim(off, (ROWS, DEPTH), (1,))) * scale
            held = jnp.abs(taken) < most
            narrow = jnp.where(held, taken, 0.0).astype(narrow_hbm.dtype)
            gone = jnp.where(held, 0.0, wide) if exact else wide - narrow.astype(jnp.float32)
            return narrow, (raw, norms + (wide * wide).sum(axis=1), lost + (gone * gone).sum(axis=1))

        raw, norms, lost = lax.fori_loop(0, steps // ahead, several, (nothing, nothing, nothing))
        code = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=LAYOUT).max(axis=1) + program * ROWS
        usable = (raw < np.inf) & (code < count)
        # Norms beyond are of codes that are lost as a whole, so that every distance is computed.
        norms = jnp.minimum(norms, LARGEST_USABLE)
        half_hbm[own] = jnp.where(usable, norms * 0.5, -LOWEST)
        bounds = [scale, *(_root(jnp.where(usable, squares, 0.0).max()) for squares in (norms, lost)), np.float32(0)]
        for place, bound in enumerate(bounds):
            bounds_hbm[program * 4 + place] = bound
        plgpu.wait_smem_to_gmem(0)


def enlargement(largest: Any) -> Any:
    """A power of two for bfloat16 codes of such numbers: 1, but where products of them would be none of float32.

    Times it they are between 2^-26 and 2^15, and times its square, which is what rows meet, 2^100 at the most.
    """
    by: Any = np.float32(1)
    for below, power in ((-30, 45), (-60, 75), (-90, 100)):
        by = jnp.where(largest < np.float32(2.0**below), np.float32(2.0**power), by)
    return jnp.where(largest > 0, by, np.float32(1))


def _root(square: Any) -> Any:
    return square * lax.rsqrt(jnp.maximum(square, TINY))


def _sampled(codes_hbm: Any, count: int, exact: bool) -> tuple[Any, Any]:
    """(the centre [D], the scale) from codes all over the codebook; 16-bit codes, whose products are exact, stay."""
    width = codes_hbm.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
    nowhere = plgpu.layout_cast(jnp.full((width,), 0, jnp.float32), layout)
    if codes_hbm.dtype == jnp.float16:
        return nowhere, np.float32(1)
    some = min(SAMPLE, count)
    rows = [load(codes_hbm.at[number * count // some], layout).astype(jnp.float32) for number in range(some)]
    rows = [jnp.where(jnp.abs(row) < LARGEST_SAMPLED, row, 0.0) for row in rows]
    if exact:
        return nowhere, enlargement(jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, rows))))
    centre = functools.reduce(jnp.add, rows) * (1 / some)
    largest = jnp.max(functools.reduce(jnp.maximum, [jnp.abs(row - centre) for row in rows]))
    return centre, LARGEST_NUMBER / jnp.where(largest > 1e-30, largest, LARGEST_NUMBER)
