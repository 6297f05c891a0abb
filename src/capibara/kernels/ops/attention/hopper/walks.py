"""In which order the programs of attention on Hopper go over its tiles of queries, so that all end at the same time."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np

from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.hopper.calls import best_order
from capibara.kernels.ops.attention.hopper.masking import Band, Grid
from capibara.kernels.ops.attention.masking import FAR, span
from capibara.kernels.ops.attention.rules import window_of
from capibara.kernels.pallas.hopper import multiprocessors

CACHED_BYTES = 70e6  # of keys and values, beyond which the second-level cache no longer helps
SHARERS = 4  # query heads of a key head, for which it need not
SHORT, MANY = 4, 1 << 20  # tiles of queries: of a head, and of a call
PROGRAM_WORK = 0.85 * 128 * 128  # what a program of one tile takes to begin, in keys times columns


def walk_of_tiles(call: Call, block_q: int, block_k: int) -> dict[str, Any]:
    """The `programs`, `order` and `section` by which the tiles of this call are done soonest.

    Which tiles a program has is known, and so is how long it takes: the order whose busiest program is done first
    is taken, of equals that with the fewest heads at a time. Two things cost beside it, by runs on an H200: keys and
    values of a section that do not stay in the second-level cache are read again for each tile (7 to 18 %), unless
    several query heads share them; and short rows of heads of their own, whose tiles all read and all multiply at the
    same time (10 to 20 %). Where each tile is a program the chip hands them out, and none is the busiest, but each
    takes longer to begin.
    """
    batch, heads, rows, head_dim = call.need("q").shape
    kv_heads, columns = call.need("k").shape[1:3]
    group, order = heads // kv_heads, best_order(head_dim)
    programs = multiprocessors(call.target.device_kind)
    below, above = span(bool(call.params["causal"]), cast(int, call.params["q_offset"]), window_of(call))
    grid = Grid(rows, Band(below, above, columns), 2 * block_q, block_k)
    # All tiles take as long, or there are so many that any order shares them out.
    if above == FAR or below != -FAR or batch * heads * grid.counts[0] > MANY:
        return {"programs": programs, "order": order, "section": 0}
    head_bytes = 2 * columns * head_dim * call.need("k").dtype.itemsize / group

    def cost(section: int) -> float:
        longest, _ = busiest(grid, batch, heads, programs, order, section)
        if section and group < SHARERS and section * head_bytes > CACHED_BYTES:
            longest *= 1.15
        return longest * (1.12 if section and group == 1 and grid.counts[0] <= SHORT else 1.0)

    sections = [n for n in (programs, batch * heads) if n <= batch * heads]
    best = min((0, *sections), key=cost)
    _, mean = busiest(grid, batch, heads, programs, order, best)
    begin = PROGRAM_WORK / (block_k * head_dim)
    apart = mean + begin * grid.counts[0] * batch * heads / programs
    return {"programs": programs if cost(best) <= apart else 0, "order": order, "section": best}


@functools.lru_cache(maxsize=1024)
def busiest(grid: Grid, batch: int, heads: int, programs: int, order: str, section: int) -> tuple[float, float]:
    """Blocks of keys of the program that has the most, and the mean; a tile counts one more, to begin and end."""
    tiles, pairs = grid.counts[0], batch * heads
    tile = np.arange(tiles)
    if section:
        sizes = [min(section, pairs - first) for first in range(0, pairs, section)]
        numbers = np.concatenate([np.repeat(tile, size) for size in sizes])
    else:
        counts = {"batch": batch, "head": heads, "tile": tiles}
        axes = order.split()
        numbers = np.indices([counts[axis] for axis in axes])[axes.index("tile")].reshape(-1)
    last_rows = np.minimum((tiles - tile) * grid.block_q, grid.rows) - 1
    blocks = -(-np.clip(last_rows + grid.band.above + 1, 0, grid.band.columns) // grid.block_k)
    load = np.bincount(np.arange(numbers.size) % programs, weights=(blocks + 1)[numbers], minlength=programs)
    return float(load.max()), float(load.mean())
