"""In which order the programs of attention on Hopper go over its tiles, so that all end at the same time: forward over
tiles of queries, backward over tiles of keys."""

from __future__ import annotations

import functools
import heapq
from typing import Any, cast

import numpy as np

from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.hopper.calls import LONGEST_FIRST, best_order
from capibara.kernels.ops.attention.hopper.masking import Band, Grid
from capibara.kernels.ops.attention.masking import FAR, span
from capibara.kernels.ops.attention.rules import window_of
from capibara.kernels.pallas.hopper import multiprocessors

CACHED_BYTES = 70e6  # of keys and values, beyond which the second-level cache no longer helps
SHARERS = 4  # query heads of a key head, for which it need not
SHORT, MANY = 4, 1 << 20  # tiles of queries: of a head, and of a call
PROGRAM_WORK = 0.85 * 128 * 128  # what a program of one tile takes to begin, in keys times columns

# What programs of one tile with scores ahead take of the time of those without, and blocks a tile more: fitted to seven
# calls of 1,024 to 32,768 tokens. Of tiles that all see all keys they are sooner than programs from so many keys on.
AHEAD, AHEAD_TILE, LONG_ALIKE = 0.92, 0.6, 4096
# Of the backward pass, on an H200: what a core takes for a pair of query and key, as much for each of its columns, and
# steps that a program takes to begin and to end.
PAIR_US, COLUMN_US, BEGIN_STEPS = 27e-6, 2.2e-6, 2
BYTES_A_US, CACHED_SUMS = 3.5e6, 40e6
WORTH = 0.95  # of the time of the usual order, for another: orders that read more from memory are slower than they seem
MOST_PROGRAMS = 1 << 13  # beyond which there are so many that any order shares them out


def walk_of_tiles(call: Call, block_q: int, block_k: int, ahead: bool = False) -> dict[str, Any]:
    """The `programs`, `order` and `section` by which the tiles of this call are done soonest; with `ahead`, beside
    programs of one tile each that have scores ahead.

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
        alike = ahead and above - below == 2 * FAR and columns >= LONG_ALIKE
        return {"programs": 0 if alike else programs, "order": order, "section": 0}
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
    tiles = grid.counts[0] * batch * heads / programs
    apart = mean + begin * tiles
    if ahead:
        apart = AHEAD * apart + AHEAD_TILE * tiles
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


def programs_of_keys(call: Call, tile: int, block_q: int) -> dict[str, Any]:
    """The `order` of the backward pass's programs, and how many of the query heads that share a key head one visits
    (`sharers`, 0: all), by which this call is done soonest.

    The chip hands programs to cores as these are free. One visits the query heads one after another, so that few key
    heads of many query heads each are a few long programs, of which the longest alone decides; with fewer query heads
    each there are more, and gradients of keys and values are read and written once more for every one.
    """
    batch, heads, rows, head_dim = call.need("q").shape
    kv_heads, keys = call.need("k").shape[1:3]
    cores, group = multiprocessors(call.target.device_kind), heads // kv_heads
    below, above = span(bool(call.params["causal"]), cast(int, call.params["q_offset"]), window_of(call))
    grid = Grid(rows, Band(below, above, keys), block_q, tile)
    usual = best_order(head_dim)

    def cost(order: str, sharers: int) -> float:
        pairs, _ = busiest_with_keys(grid, batch, heads // sharers, sharers, cores, order)
        programs = group // sharers
        sums = bytes_of_sums(batch * kv_heads * keys * head_dim, programs)
        return pairs * (PAIR_US + COLUMN_US * head_dim) + sums / BYTES_A_US

    if batch * heads * grid.counts[1] > MOST_PROGRAMS:
        return {"order": usual, "sharers": 0}
    choices = [(order, n) for n in range(group, 0, -1) if group % n == 0 for order in (usual, LONGEST_FIRST)]
    costs = {choice: cost(*choice) for choice in choices}
    costs[usual, group] *= WORTH
    order, sharers = min(choices, key=lambda choice: costs[choice])
    return {"order": order, "sharers": sharers if sharers < group else 0}


def bytes_of_sums(numbers: int, programs: int) -> float:
    """What is moved for the gradients of so many keys, and of as many values, where several programs add to each:
    zeros, what is made of the sums, and what each adds where they are more than the second-level cache keeps, beside
    what a program writes that is the only one. Of four programs at 4x4096 tokens, 8 key heads of 128, that is 380 us;
    on an H200 they took 360 longer than one. Of 1x4500 tokens, 4 key heads, what seven programs added did not show."""
    if programs == 1:
        return 0.0
    return 2.0 * numbers * (8 + (8 * programs if 8 * numbers > CACHED_SUMS else 0))


@functools.lru_cache(maxsize=1024)
def busiest_with_keys(grid: Grid, batch: int, sets: int, sharers: int, cores: int, order: str) -> tuple[float, float]:
    """Pairs of query and key, in whole steps, of the core that ends last, a program's begin and end counted in, and of
    the mean without these.

    A program has a tile of keys and a set of `sharers` query heads, and cores take the next one when they are free.
    """
    band, (begin, end) = grid.band, steps_of_keys(grid)
    visits = end - begin
    if band.above == FAR and band.below != -FAR:
        visits = visits[::-1]  # programs with the most queries start first
    counts = {"batch": batch, "head": sets, "tile": len(visits)}
    axes = order.split()
    tiles = np.indices([counts[axis] for axis in axes])[axes.index("tile")].reshape(-1)
    step = grid.block_q * grid.block_k
    mean = float(visits.sum()) * sharers * sets * batch * step / cores
    if tiles.size > MOST_PROGRAMS:
        return mean + tiles.size / cores * BEGIN_STEPS * step, mean
    ends = [0] * cores
    for visited in (visits * sharers + BEGIN_STEPS)[tiles].tolist():
        heapq.heapreplace(ends, ends[0] + visited)
    return float(max(ends) * step), mean


def steps_of_keys(grid: Grid) -> tuple[Any, Any]:
    """For each tile of keys the first and the end of the steps of queries, of one head, that see any by position."""
    band, steps = grid.band, grid.counts[0]
    first = np.arange(0, band.columns, grid.block_k)
    begin, end = np.zeros_like(first), np.full_like(first, steps)
    if band.above != FAR:
        begin = np.clip(first - band.above, 0, grid.rows) // grid.block_q
    if band.below != -FAR:
        end = -(-np.clip(first + grid.block_k - band.below, 0, grid.rows) // grid.block_q)
    return begin, np.maximum(end, begin)


def tiles_of_steps(grid: Grid) -> Any:
    """How many tiles of keys each step of queries sees by position."""
    begin, end = steps_of_keys(grid)
    changes = np.zeros(grid.counts[0] + 1, np.int64)
    np.add.at(changes, begin, 1)
    np.add.at(changes, end, -1)
    return np.cumsum(changes)[:-1]
