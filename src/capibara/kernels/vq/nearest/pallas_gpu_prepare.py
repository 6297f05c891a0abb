"""The codes as the Hopper searches take them: moved, scaled and rounded to 16 bits, with their norms; one kernel.

Distances do not change when rows and codes move together, and products of what is left are the smaller, and so their
rounding, the more rows and codes had in common. Any place to move to is right; it is the mean of some codes. The scale
is from them too. What it brings beyond float16 is left out of the products, and is in what was lost.
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

from capibara.kernels.hopper import load, swizzled
from capibara.kernels.transforms import out_struct
from capibara.kernels.vq.nearest.pallas_gpu_compare import LARGEST_USABLE, THREADS
from capibara.kernels.vq.nearest.pallas_gpu_search import COLUMN_LAYOUT, DEPTH, LAYOUT, LOWEST, ROW_LAYOUT, ROWS

SAMPLE = 16  # codes that the centre and the scale are from
LARGEST_NUMBER = 8.0  # of the scaled sample: rows and codes may have 8,000 times as large ones before float16 ends
LARGEST_NARROW = 65000.0
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
    narrow, half, lost, centre, scale = plgpu.kernel(
        functools.partial(_program, count=count, exact=exact),
        out_type=[
            out_struct((padded, width), narrow_type, codebook),
            *(out_struct((size,), jnp.float32, codebook) for size in (padded, padded, width, 4)),
        ],
        grid=(padded // ROWS,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(codes)
    return Prepared(narrow, half, centre, _bounds(scale, half, lost))


def _bounds(scale: jax.Array, half: jax.Array, lost: jax.Array) -> jax.Array:
    largest = 2 * lax.reduce_max(lax.select(half < LARGEST_USABLE, half, lax.full_like(half, 0)), (0,))
    gone = lax.reduce_max(lost, (0,))
    return lax.concatenate([scale[:1], *(lax.sqrt(each)[None] for each in (largest, gone)), scale[3:]], 0)


def _program(
    codes_hbm: Any, narrow_hbm: Any, half_hbm: Any, lost_hbm: Any, centre_hbm: Any, scale_hbm: Any, *, count: int,
    exact: bool,
) -> None:  # fmt: skip
    width = codes_hbm.shape[1]
    steps, program = width // DEPTH, lax.axis_index("program")
    own = pl.ds(program * ROWS, ROWS)

    @functools.partial(
        pl.run_scoped,
        narrow_smem=plgpu.SMEM((steps, ROWS, DEPTH), narrow_hbm.dtype, transforms=swizzled(narrow_hbm.dtype)),
        centre_smem=plgpu.SMEM((width,), jnp.float32),
        collective_axes="warpgroup",
    )
    def _scoped(narrow_smem: Any, centre_smem: Any) -> None:
        centre, scale = _sampled(codes_hbm, count, exact)
        centre_smem[...] = centre

        @pl.when(program == 0)
        def _() -> None:
            centre_hbm[...] = centre
            for place in range(4):
                scale_hbm[place] = scale if place == 0 else np.float32(0)

        nothing = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), ROW_LAYOUT)

        def step(number: Any, carry: Any) -> Any:
            raw, norms, lost = carry
            depth = pl.ds(number * DEPTH, DEPTH)
            wide = load(codes_hbm.at[own, depth], LAYOUT, optimized=False).astype(jnp.float32)
            raw = raw + (wide * wide).sum(axis=1)
            if not exact:
                off = load(centre_smem.at[depth], COLUMN_LAYOUT, optimized=False)
                wide = (wide - lax.broadcast_in_dim(off, (ROWS, DEPTH), (1,))) * scale
            narrow = jnp.where(jnp.abs(wide) < LARGEST_NARROW if not exact else jnp.abs(wide) < np.inf, wide, 0.0)
            narrow = narrow.astype(narrow_hbm.dtype)
            gone = wide - narrow.astype(jnp.float32)
            narrow_smem[number] = narrow
            return raw, norms + (wide * wide).sum(axis=1), lost + (gone * gone).sum(axis=1)

        raw, norms, lost = lax.fori_loop(0, steps, step, (nothing, nothing, nothing))
        plgpu.commit_smem()
        for number in range(steps):
            plgpu.copy_smem_to_gmem(narrow_smem.at[number], narrow_hbm.at[own, pl.ds(number * DEPTH, DEPTH)])
        code = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=LAYOUT).max(axis=1) + program * ROWS
        usable = (raw < np.inf) & (code < count)
        # Norms beyond are of codes that are lost as a whole, so that every distance is computed.
        half_hbm[own] = jnp.where(usable, jnp.minimum(norms * 0.5, 0.5 * LARGEST_USABLE), -LOWEST)
        lost_hbm[own] = jnp.where(usable, lost, 0.0)
        plgpu.wait_smem_to_gmem(0)


def _sampled(codes_hbm: Any, count: int, exact: bool) -> tuple[Any, Any]:
    """(the centre [D], the scale) from codes all over the codebook; none for 16-bit codes, whose products are exact."""
    width = codes_hbm.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
    if exact:
        return plgpu.layout_cast(jnp.full((width,), 0, jnp.float32), layout), np.float32(1)
    some = min(SAMPLE, count)
    rows = [load(codes_hbm.at[number * count // some], layout) for number in range(some)]
    rows = [jnp.where(jnp.abs(row) < LARGEST_SAMPLED, row, 0.0) for row in rows]
    centre = functools.reduce(jnp.add, rows) * (1 / some)
    largest = jnp.max(functools.reduce(jnp.maximum, [jnp.abs(row - centre) for row in rows]))
    return centre, LARGEST_NUMBER / jnp.where(largest > 1e-30, largest, LARGEST_NUMBER)
