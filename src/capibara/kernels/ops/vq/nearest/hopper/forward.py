"""The nearest code on Hopper: a 16-bit search that knows its error, and float32 for the rows that need it.

A search finds for every row the few best codes by float16 products (bfloat16 ones are exact), with a bound on their
error. Where one code is ahead of all others by more than that, it is the nearest. Where a few are not told apart,
`resolve` compares their distances in float32; where the list may not be complete (many near ties, numbers beyond
float16, NaN), the distances to all codes, which many programs share. Nothing waits for the host,
and no table of rows by codes is ever stored.

Rows that fit beside a ring of codes stay in shared memory (`search_resident`); else both come by again and again
(`search`).

Codes of a few columns are compared by their distances, without products (`nearest_directly`).

Rows too few for all multiprocessors are searched for by parts of the codes, side by side, and `resolve_parts` reads
the lists of all parts. Of those, few rows with few codes are mostly launches: two kernels are all (`search_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.trusting import trusted
from capibara.kernels.ops.vq.nearest.hopper.common import BLOCK_M, MOST_PARTS, PROGRAM_M, THREADS, SearchConfig, fits
from capibara.kernels.ops.vq.nearest.hopper.direct import MOST_COLUMNS, direct_config, nearest_directly
from capibara.kernels.ops.vq.nearest.hopper.prepare import prepare
from capibara.kernels.ops.vq.nearest.hopper.resolve import resolve
from capibara.kernels.ops.vq.nearest.hopper.resolve_parts import resolve_parts
from capibara.kernels.ops.vq.nearest.hopper.search import search, search_scratch
from capibara.kernels.ops.vq.nearest.hopper.search_parts import TILE as PART_TILE
from capibara.kernels.ops.vq.nearest.hopper.search_parts import parts_scratch, search_parts, tiles_of_a_part
from capibara.kernels.ops.vq.nearest.hopper.search_resident import TILE, search_resident, stages_for
from capibara.kernels.ops.vq.nearest.rules import Sizes, sizes, sizes_of
from capibara.kernels.ops.vq.nearest.xla import finish
from capibara.kernels.pallas.hopper import multiprocessors, refuses_64_bits, refuses_chip

MOST_WIDTH = 8192
FEWEST_STAGES = 4  # of the ring beside rows that stay
FEW_CODES = 128  # so few do not fill a tile beside rows that stay
SIDE_BY_SIDE = 2  # programs of `search_parts` that a multiprocessor has registers for
# Where each program of them has so many tiles of 64 x 128 x 128 numbers, rounding codes again and again is less than
# two launches: 18.0 us for 19.2 at one tile on an H200. At four and five it is 1.4 to 1.6 times as much as codes that
# are rounded once.
MOST_TILES = 1


def padded_sizes(n: Sizes) -> Sizes:
    """What the kernels see: 128 threads share a row; TMA copies pieces of 8 rows, and an array of a single tile of 64
    loses that axis from its descriptor. Zeros beside a row's numbers and a code's change no distance."""
    rows = max(-(-n.rows // 8) * 8, 16)
    return Sizes(rows + 8 if rows == 64 else rows, n.codes, -(-n.width // THREADS) * THREADS)


def parts_for(units: int, codes: int, tile: int, programs: int) -> int:
    """How many parts of whole tiles, so that parts of `units` tiles of rows are as many as programs, or fewer."""
    tiles = -(-codes // tile)
    most = max(1, min(tiles, programs // units, MOST_PARTS))
    return -(-tiles // -(-tiles // most))


def by_parts(n: Sizes, dtype: Any, programs: int) -> list[SearchConfig]:
    """Configs for rows too few for the programs: one that launches least, and one that rounds codes once."""
    rows, codes, width = padded_sizes(n)
    configs = []
    units, tiles = -(-n.rows // BLOCK_M), -(-codes // PART_TILE)
    parts = parts_for(units, codes, PART_TILE, SIDE_BY_SIDE * programs)
    work = units * tiles * (width // THREADS)
    if parts > 1 and work <= MOST_TILES * SIDE_BY_SIDE * programs and fits(parts_scratch(width, dtype)):
        configs += [SearchConfig(PART_TILE, 2, kept, parts=parts) for kept in (4, 6)]
    parts = parts_for(-(-rows // PROGRAM_M), codes, TILE, programs)
    if parts > 1 and rows >= PROGRAM_M and stages_for(width) >= FEWEST_STAGES:
        configs += [SearchConfig(TILE, stages_for(width), kept, resident=True, parts=parts) for kept in (5, 6)]
    return configs


def whole(n: Sizes, dtype: Any) -> list[SearchConfig]:
    """Configs of which each program has all codes: what keeps rows in shared memory; then the widest tile that the
    codes fill, each with the deepest ring."""
    rows, codes, width = padded_sizes(n)
    configs = []
    if rows >= PROGRAM_M and codes > FEW_CODES and stages_for(width) >= FEWEST_STAGES:
        configs += [SearchConfig(TILE, stages_for(width), kept, resident=True) for kept in (6, 5)]
    widest = min(256, -(-codes // 64) * 64)
    for tile in dict.fromkeys([widest, *(t for t in (192, 128, 64) if t < widest)]):
        # Beside few codes a longer list is short work, and one that is full is what all rows wait for.
        for kept in (6, 4, 3) if codes <= FEW_CODES else (4, 6, 3):
            rings = (SearchConfig(tile, stages, kept) for stages in (6, 5, 4, 3, 2))
            configs += [ring for ring in rings if fits(search_scratch(ring, codes, dtype))][:1]
    return configs


def candidates(call: Call) -> Sequence[SearchConfig]:
    """For few rows parts of the codes, which on an H200 took 0.20 to 0.74 of the time of all of them at 700 to 4,096
    rows. At fewer than a program's they are right there, and not timed."""
    n, dtype = sizes_of(call), call.need("x").dtype
    if n.width <= MOST_COLUMNS:
        others = whole(n, dtype)
        return [direct_config(n.rows, n.codes, multiprocessors(call.target.device_kind)), *others]
    parts, others = by_parts(n, dtype, multiprocessors(call.target.device_kind)), whole(n, dtype)
    timed = n.rows >= PROGRAM_M or trusted() == "predicted"
    return [*parts, *others] if timed else [*others, *parts]


def for_call(config: SearchConfig, call: Call) -> SearchConfig:
    """Codes as narrow as a near call's go the same way."""
    narrow = sizes_of(call).width <= MOST_COLUMNS
    return config if bool(config.direct) == narrow else candidates(call)[0]


def refuses(call: Call) -> str | None:
    cannot = refuses_chip(call.target.device_kind) or refuses_64_bits()
    if cannot is not None:
        return cannot
    x, codebook = call.need("x"), call.need("codebook")
    if x.dtype != codebook.dtype or np.dtype(x.dtype).name not in ("bfloat16", "float16", "float32"):
        return f"it takes x and codebook both in bfloat16, float16 or float32, not {x.dtype} and {codebook.dtype}"
    rows, _, width = sizes_of(call)
    if width > MOST_WIDTH:
        return f"it takes rows of up to {MOST_WIDTH} numbers, not {width}"
    return "x has no rows" if rows == 0 else None


def nearest_code_hopper(
    x: jax.Array, codebook: jax.Array, *, config: SearchConfig, return_distances: bool, return_stats: bool
) -> Any:
    size = sizes(x, codebook)
    if config.direct:
        found = nearest_directly(x.reshape(-1, size.width), codebook, config)
        return finish(x, codebook, found, return_distances, return_stats)
    if config.parts > 1:
        found = nearest_by_parts(x.reshape(-1, size.width), codebook, config)
        return finish(x, codebook, found, return_distances, return_stats)
    padded = padded_sizes(size)
    columns = (0, padded.width - size.width)
    rows = jnp.pad(x.reshape(-1, size.width), ((0, padded.rows - size.rows), columns))
    codes = jnp.pad(codebook, ((0, 0), columns))
    programs = multiprocessors(current_target().device_kind)
    prepared = prepare(codes, config.tile)
    lists = (search_resident if config.resident else search)(rows, *prepared, config, programs)
    indices = resolve(rows, codes, lists, prepared.half, config.kept, streams=config.resident)
    return finish(x, codebook, indices[: size.rows], return_distances, return_stats)


def nearest_by_parts(x: jax.Array, codebook: jax.Array, config: SearchConfig) -> jax.Array:
    """Indices [N] of rows x [N, D], found by parts of the codes. Neither rows nor codes have to fill tiles."""
    (rows, width), codes = x.shape, codebook.shape[0]
    if codes < PART_TILE:
        raise rule_error(f"Parts are of {PART_TILE} codes or more", codes, "use parts=1")
    columns = (0, -width % THREADS)
    # One more launch is more than what padded rows cost; but a tile there has to be.
    x = jnp.pad(x, ((0, max((PROGRAM_M if config.resident else BLOCK_M) - rows, 0)), columns))
    padded = jnp.pad(codebook, ((0, 0), columns))
    length = config.tile * tiles_of_a_part(codes, config.tile, config.parts)
    if config.resident:
        prepared = prepare(padded, length * config.parts)
        lists = search_resident(x, *prepared, config, multiprocessors(current_target().device_kind))
    else:
        lists = search_parts(x, padded, config)
    return resolve_parts(x, padded, lists, length, config)[:rows]


IMPLEMENTATION = Implementation(
    "hopper",
    nearest_code_hopper,
    platforms=("gpu",),
    refuses=refuses,
    # On an H200, 65536x768 float32: 6 to 14 times xla's exact search for 64 to 8192 codes. Beside an argmin of TF32
    # products, which is not exact, it was measured in earlier forms: 0.8 of its speed at 64 codes (a list of 6), 1.14
    # times at 1024, 1.55 times at 8192. In one form a single row in 65536 with a full list, which one program compared
    # with all 8192 codes, took as long as everything else; that many programs share it now has not been timed.
    kernel=True,
    config_type=SearchConfig,
    for_call=for_call,
    candidates=candidates,
)
