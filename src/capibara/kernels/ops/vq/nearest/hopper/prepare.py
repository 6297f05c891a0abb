"""The codes as the Hopper searches take them: moved, scaled and rounded to 16 bits, with their norms; one kernel.

Distances do not change when rows and codes move together, and products of what is left are the smaller, and so their
rounding, the more rows and codes had in common. Any place to move to is right; it is the mean of some codes. The scale
is from them too. What it brings beyond float16 is left out of the products, and is in what was lost.

Numbers of 16 bits are multiplied as they are. Products of very small bfloat16 numbers would be zeros to float32: such
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
from capibara.kernels.ops.vq.nearest.hopper.common import (
    BLOCK_K,
    BLOCK_M,
    LARGEST_NARROW,
    LARGEST_SCALED,
    LARGEST_USABLE,
    LAYOUT,
    LOWEST,
    THREADS,
    across,
    enlargement,
    narrow_type,
    row_full,
    row_numbers,
    safe_sqrt,
)
from capibara.kernels.pallas.hopper import LANE, load, named, swizzled

SAMPLE = 16  # codes that the centre and the scale are from
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
    codes = lax.pad(codebook, np.zeros((), codebook.dtype), ((0, padded - count, 0), (0, 0, 0)))
    programs = padded // BLOCK_M
    narrow, half, centre, bounds = plgpu.kernel(
        named("nearest_code_prepare", _program, count=count, exact=exact),
        out_type=[
            out_struct((padded, width), narrow_type(codebook.dtype), codebook),
            *(out_struct((size,), jnp.float32, codebook) for size in (padded, width, programs * 4)),
        ],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
    )(codes)
    # Each program wrote those of its codes; the largest are those of all.
    if programs > 1:
        bounds = lax.reduce_max(bounds.reshape(programs, 4), (0,))
    return Prepared(narrow, half, centre, bounds)


def _program(
    codes_hbm: Any, narrow_hbm: Any, half_hbm: Any, centre_hbm: Any, bounds_hbm: Any, *, count: int, exact: bool
) -> None:  # fmt: skip
    width = codes_hbm.shape[1]
    k_steps, program = width // BLOCK_K, lax.axis_index("program")
    ahead = math.gcd(k_steps, MOST_AHEAD)
    own = pl.ds(program * BLOCK_M, BLOCK_M)

    @functools.partial(
        pl.run_scoped,
        narrow_smem=plgpu.SMEM((ahead, BLOCK_M, BLOCK_K), narrow_hbm.dtype, transforms=swizzled(narrow_hbm.dtype)),
        centre_smem=plgpu.SMEM((width,), jnp.float32),
    )
    def _scoped(narrow_smem: Any, centre_smem: Any) -> None:
        centre, scale = sampled(codes_hbm, count, exact)
        centre_smem[...] = centre

        @pl.when(program == 0)
        def _() -> None:
            centre_hbm[...] = centre

        zeros = row_full(0, jnp.float32)

        def k_slice(step: Any) -> Any:
            return pl.ds(step * BLOCK_K, BLOCK_K)

        def load_round_store(turn: Any, carry: Any) -> Any:
            steps = [turn * ahead + part for part in range(ahead)]
            coming = [load(codes_hbm.at[own, k_slice(step)], LAYOUT, optimized=False) for step in steps]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those before have left
            for part, raw in enumerate(coming):
                narrow_smem[part], carry = rounded(steps[part], raw.astype(jnp.float32), carry)
            plgpu.commit_smem()
            for part, step in enumerate(steps):
                plgpu.copy_smem_to_gmem(narrow_smem.at[part], narrow_hbm.at[own, k_slice(step)])
            return carry

        def rounded(step: Any, wide: Any, carry: Any) -> tuple[Any, Any]:
            return rounded_codes(wide, carry, centre_smem, step * BLOCK_K, scale, narrow_hbm.dtype, exact)

        squares = lax.fori_loop(0, k_steps // ahead, load_round_store, (zeros, zeros, zeros))
        half_hbm[own], *usable_squares = norms_of(squares, row_numbers() + program * BLOCK_M < count)
        largest = (safe_sqrt(each.max()) for each in usable_squares)
        for place, bound in enumerate((scale, *largest, np.float32(0))):
            bounds_hbm[program * 4 + place] = bound
        plgpu.wait_smem_to_gmem(0)


def rounded_codes(
    wide: Any, carry: Any, centre: Any, first: Any, scale: Any, dtype: Any, exact: bool
) -> tuple[Any, tuple[Any, Any, Any]]:
    """(some columns of codes, moved, scaled and rounded, from the `first` on; the squares `carry` with theirs added).

    The squares are of the codes as they are, of what they are scaled, and of what rounding took.
    """
    raw, norms, lost = carry
    raw = raw + (wide * wide).sum(axis=1)
    if exact:
        wide, most = wide * scale, np.float32(np.inf)
        taken = wide * scale
    else:
        most = np.float32(LARGEST_NARROW)
        wide = taken = (wide - across(centre, first, wide.shape)) * scale
    in_range = jnp.abs(taken) < most
    narrow = jnp.where(in_range, taken, 0.0).astype(dtype)
    error = jnp.where(in_range, 0.0, wide) if exact else wide - narrow.astype(jnp.float32)
    return narrow, (raw, norms + (wide * wide).sum(axis=1), lost + (error * error).sum(axis=1))


def norms_of(squares: Any, there: Any) -> tuple[Any, Any, Any]:
    """(half norms, -LOWEST of codes that cannot be used; norms and what rounding took, zeros of those) of codes.

    squares are those of `rounded_codes`; codes that are not `there` cannot be used.
    """
    raw, norms, lost = squares
    usable = (raw < np.inf) & there
    # A score has no place for norms beyond: such codes are lost as a whole, so that every distance is computed.
    lost = jnp.where(norms < LARGEST_USABLE, lost, np.inf)
    norms = jnp.minimum(norms, LARGEST_USABLE)
    return jnp.where(usable, norms * 0.5, -LOWEST), jnp.where(usable, norms, 0.0), jnp.where(usable, lost, 0.0)


def sampled(codes_hbm: Any, count: int, exact: bool) -> tuple[Any, Any]:
    """(the centre [D], the scale) from codes all over the codebook; 16-bit codes, whose products are exact, stay."""
    width = codes_hbm.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=math.gcd(width // THREADS, 4))
    zeros = plgpu.layout_cast(jnp.full((width,), 0, jnp.float32), layout)
    if codes_hbm.dtype == jnp.float16:
        return zeros, np.float32(1)
    some = min(SAMPLE, count)
    rows = [load(codes_hbm.at[number * count // some], layout).astype(jnp.float32) for number in range(some)]
    rows = [jnp.where(jnp.abs(row) < LARGEST_SAMPLED, row, 0.0) for row in rows]
    if exact:
        return zeros, enlargement(jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, rows))))
    centre = functools.reduce(jnp.add, rows) * (1 / some)
    largest = jnp.max(functools.reduce(jnp.maximum, [jnp.abs(row - centre) for row in rows]))
    return centre, LARGEST_SCALED / jnp.where(largest > 1e-30, largest, LARGEST_SCALED)
