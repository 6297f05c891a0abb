"""The nearest code on Hopper: a 16-bit search that knows its error, and float32 for the rows that need it.

`search` finds for every row the few best codes by float16 products (bfloat16 ones are exact), with a bound on their
error. Where one code is ahead of all others by more than that, it is the nearest. Where a few are not told apart,
`resolve` compares their distances in float32. Where the list may not be complete (many near ties, numbers beyond
float16, NaN), `resolve` looks at all codes if they are few; else XLA searches the row again at full precision, a chunk
of such rows at a time until none is left: mostly there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.context import current_target
from capibara.kernels.hopper import multiprocessors, refuses_chip
from capibara.kernels.op import Call, Implementation
from capibara.kernels.vq.nearest.equal import lowest_equal
from capibara.kernels.vq.nearest.pallas_gpu_resolve import THREADS, resolve
from capibara.kernels.vq.nearest.pallas_gpu_search import LOWEST, SearchConfig, search
from capibara.kernels.vq.nearest.reference import is_finite, squared_norms
from capibara.kernels.vq.nearest.rules import sizes_of
from capibara.kernels.vq.nearest.xla import finish, nearest_rows

MOST_WIDTH = 8192
AGAIN = 256  # one in so many rows is searched again at a time: its table is the largest thing in memory
FEW_CODES = 128  # so few are all compared on the spot: that there is no row left, the host need not be asked
LARGEST_NUMBER = 8.0  # of the scaled codes: rows may have 8,000 times as large ones before float16 ends


def candidates(call: Call) -> Sequence[SearchConfig]:
    """The widest tile that the codes fill first, each with the deepest ring that fits."""
    _, codes, _ = sizes_of(call)
    size = call.need("x").dtype.itemsize
    widest = min(256, -(-codes // 64) * 64)
    tiles = dict.fromkeys([widest, *(t for t in (192, 128, 64) if t < widest)])
    made = []
    for tile in tiles:
        for kept in (4, 6, 3):
            deepest = next((s for s in (6, 5, 4, 3, 2) if SearchConfig(tile, s, kept).fits(size)), None)
            if deepest is not None:
                made.append(SearchConfig(tile, deepest, kept))
    return made


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    x, codebook = call.need("x"), call.need("codebook")
    if x.dtype != codebook.dtype or np.dtype(x.dtype).name not in ("bfloat16", "float16", "float32"):
        return f"it takes x and codebook both in bfloat16, float16 or float32, not {x.dtype} and {codebook.dtype}"
    rows, _, width = sizes_of(call)
    if width % THREADS or width > MOST_WIDTH:
        return (
            f"it takes rows of a multiple of {THREADS} numbers up to {MOST_WIDTH}, which 128 threads share; not {width}"
        )
    # TMA copies pieces of 8 rows; an array of a single tile loses that axis from its descriptor.
    if rows % 8 or rows < 16 or rows == 64:
        return f"it takes a multiple of 8 rows, 16 or more and not 64; not {rows}"
    return None


def _prepared(codebook: jax.Array, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(16-bit codes [K up to the tile, D], half norms, bounds): what `search` takes."""
    count = codebook.shape[0]
    wide = codebook.astype(jnp.float32)
    usable = is_finite(squared_norms(wide))[:, None]
    wide = jnp.where(usable, wide, 0)
    scale = jnp.float32(1)
    narrow_type = codebook.dtype
    if codebook.dtype == jnp.float32:
        narrow_type = jnp.dtype(jnp.float16)
        largest = jnp.abs(wide).max()
        _, exponent = jnp.frexp(jnp.where(largest > 0, largest, LARGEST_NUMBER))
        # A power of two, so that scaling is exact: the largest number is in [4, 8).
        scale = jnp.ldexp(jnp.float32(LARGEST_NUMBER), -jnp.clip(exponent, -100, 100))
        wide = wide * scale
    narrow = wide.astype(narrow_type)
    lost = wide - narrow.astype(jnp.float32)
    norms = squared_norms(wide)
    half = jnp.where(usable[:, 0], norms / 2, -LOWEST)
    bounds = jnp.stack([scale, jnp.sqrt(norms.max()), jnp.sqrt(squared_norms(lost).max()), jnp.float32(0)])
    more = -count % tile
    # A row of zeros is as good a code as any, if its half norm keeps it from being found.
    narrow = jnp.pad(narrow, ((0, more), (0, 0)))
    return narrow, jnp.pad(half, (0, more), constant_values=-LOWEST), bounds


def again(x: jax.Array, codebook: jax.Array, indices: jax.Array, pending: jax.Array) -> jax.Array:
    """The indices, those of `pending` rows found anew at full precision, some rows at a time."""
    rows = x.shape[0]
    chunk = max(16, -(-rows // AGAIN))

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        indices, pending = carry
        (chosen,) = jnp.nonzero(pending, size=chunk, fill_value=rows)
        found = lowest_equal(codebook, nearest_rows(x[jnp.minimum(chosen, rows - 1)], codebook))
        return (
            indices.at[chosen].set(found, mode="drop"),
            pending.at[chosen].set(jnp.zeros_like(chosen, bool), mode="drop"),
        )

    indices, _ = lax.while_loop(lambda carry: carry[1].any(), step, (indices, pending))
    return indices


def mosaic_gpu(
    x: jax.Array, codebook: jax.Array, *, config: SearchConfig, return_distances: bool, return_stats: bool
) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    narrow, half, bounds = _prepared(codebook, config.tile)
    found = search(flat, narrow, half, bounds, config, multiprocessors(current_target().device_kind))
    if codebook.shape[0] <= FEW_CODES:
        indices = resolve(flat, codebook, found, is_finite(squared_norms(codebook.astype(jnp.float32))))
    else:
        indices = resolve(flat, codebook, found)
        indices = again(flat, codebook, indices, found[config.kept, :rows] == config.kept)
    return finish(x, codebook, indices, return_distances, return_stats)


IMPLEMENTATION = Implementation(
    "mosaic_gpu",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    # On an H200, 65536x768 float32: 8 to 10 times xla's exact search for 64 to 8192 codes; 0.8 to 1.0 of the speed of a
    # plain argmin of TF32 products, which is not exact.
    rank=lambda call: 20,
    kernel=True,
    config_type=SearchConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
