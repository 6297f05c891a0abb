"""Rows whose search left several codes: their distances in float32, by differences, and the nearest.

Equal codes have equal distances here, to the bit: each is computed by the same additions in the same order.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.hopper import load
from capibara.kernels.transforms import out_struct

THREADS = 128
ROWS = 8  # of a program: few, so that those with several codes are spread over the chip


def resolve(x: jax.Array, codebook: jax.Array, found: jax.Array, usable: jax.Array | None = None) -> jax.Array:
    """Indices [N] from what `search` found [kept + 1, N or more]: the nearest of those that may be it.

    A row whose list may not be complete is compared with all codes that are `usable` [K]; without that, it gets the
    first of its list, and the caller looks at it again. N is a multiple of ROWS.
    """
    rows, width = x.shape
    vector = math.gcd(width // THREADS, 16 // max(x.dtype.itemsize, codebook.dtype.itemsize))
    body = functools.partial(
        _program,
        kept=found.shape[0] - 1,
        codes=codebook.shape[0],
        layout=plgpu.Layout.WG_STRIDED((width,), vec_size=vector),
    )
    (made,) = plgpu.kernel(
        body if usable is not None else lambda x, codes, found, out: body(x, codes, found, None, out),
        out_type=[out_struct((rows,), jnp.int32, x)],
        grid=(rows // ROWS,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x, codebook, found, *(() if usable is None else (usable.astype(jnp.int32),)))
    return made


def _program(
    x_hbm: Any, codes_hbm: Any, found_hbm: Any, usable_hbm: Any, out_hbm: Any, *, kept: int, codes: int, layout: Any
) -> None:
    first = lax.axis_index("program") * ROWS
    # All of them are asked for before the first is looked at: one wait for memory, not one a row.
    counts = [found_hbm[kept, first + number] for number in range(ROWS)]
    best = [found_hbm[0, first + number] for number in range(ROWS)]
    for number in range(ROWS):
        out_hbm[first + number] = best[number]

    def among_a_few(row: Any, distance: Any, values: Any, count: Any) -> None:
        index = found_hbm[0, row]
        least = distance(index)
        for place in range(1, kept - 1):
            # Past its list a row looks at its first again.
            other = jnp.where(place < count, found_hbm[place, row], found_hbm[0, row])
            there = distance(other)
            nearer = (there < least) | ((there == least) & (other < index))
            least, index = jnp.where(nearer, there, least), jnp.where(nearer, other, index)
        out_hbm[row] = index

    def among_all(row: Any, distance: Any, values: Any) -> None:
        def look(number: Any, carry: Any) -> Any:
            least, index = carry
            there = distance(number)
            # The first that can be used is as near as any where every distance overflows.
            nearer = (usable_hbm[number] > 0) & ((there < least) | (index < 0))
            return jnp.where(nearer, there, least), jnp.where(nearer, number, index)

        _, index = lax.fori_loop(0, codes, look, (np.float32(np.inf), np.int32(-1)))
        out_hbm[row] = jnp.where(jnp.sum(values * values) < np.inf, index, np.int32(-1))

    def one(number: Any, carry: None) -> None:
        row = first + number
        count = found_hbm[kept, row]

        def compare(kind: Any, choose: Any) -> None:
            @pl.when(kind)
            def _() -> None:
                values = load(x_hbm.at[row], layout).astype(jnp.float32)

                def distance(index: Any) -> Any:
                    difference = values - load(codes_hbm.at[index], layout).astype(jnp.float32)
                    return jnp.sum(difference * difference)

                choose(row, distance, values)

        compare((count > 1) & (count < kept), functools.partial(among_a_few, count=count))
        if usable_hbm is not None:
            compare(count == kept, among_all)
        return carry

    most = functools.reduce(jnp.maximum, counts)

    @pl.when(most > 1)
    def _some_are_not_certain() -> None:
        lax.fori_loop(0, ROWS, one, None)
