"""What attention's time is made of on a GPU: tiles of queries and keys, and the cores that they are shared out to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from capibara.kernels.core.spec import Call, TimeTerms, short_dtype
from capibara.kernels.ops.attention.hopper.backward import (
    DQ_COLUMNS,
    default_config,
    tile_of_keys,
)
from capibara.kernels.ops.attention.hopper.masking import Band, Grid
from capibara.kernels.ops.attention.hopper.walks import busiest_with_keys, bytes_of_sums
from capibara.kernels.ops.attention.masking import FAR, Window, columns_seen, span
from capibara.kernels.ops.attention.rules import sizes, window_of
from capibara.kernels.pallas.hopper import multiprocessors

TILE = 128  # queries of a program, and keys of a block
WIDE = 128  # columns, beyond which our backward pass and cuDNN's share them out to two warpgroups
# Columns beyond which our forward pass, and cuDNN's, has fewer keys in a block.
FEWER_KEYS = {"hopper": 128, "cudnn": 192}
LONG = 16384  # queries
# Our backward pass took 0.8 to 1.1 times what terms say, the most at 4,096 tokens.
HEAD_DIM_WITHOUT_MODEL = 192
# What no run beside both had: of such calls the model says nothing.
OPERANDS = ("bias", "mask", "q_segments", "block_mask")
PARAMS = ("q_offset", "softcap", "dropout_rate")


def forward(call: Call, implementation: str) -> TimeTerms | None:
    # Columns that wgmma takes at a time: ours are 16; cuDNN's time moves in steps of 32.
    columns = {"hopper": 16, "cudnn": 32}.get(implementation)
    found = None if columns is None else _terms(call, _with_queries, columns)
    if found is None:
        return None
    busiest, head_dim = found.terms["work"] + found.terms["idle"], call.need("q").shape[-1]
    terms = {
        **found.terms, "wide": busiest if head_dim > FEWER_KEYS[implementation] else 0.0,
        "panels": busiest if head_dim % 64 else 0.0,
        "wide programs": found.terms["programs"] if head_dim > WIDE else 0.0,
    }  # fmt: skip
    return TimeTerms(terms, found.sizes, found.words)


def backward(call: Call, implementation: str) -> TimeTerms | None:
    """Ours has a program for some keys of a key head; cuDNN's does not show which it has."""
    if call.need("q").shape[2] >= LONG:  # ours took 1.15 times what terms say, and cuDNN's not
        return None
    if call.need("q").shape[-1] == HEAD_DIM_WITHOUT_MODEL:
        return None
    below, above = span(bool(call.params["causal"]), 0, window_of(call))
    # Steps at a window's two ends: 1.5 times what terms say of narrow ones, and of 1,024 keys less than for cuDNN.
    if above - below < FAR:
        return None
    wide = call.need("q").shape[-1] > WIDE
    load = {"hopper": _with_keys, "cudnn": _with_queries}.get(implementation)
    found = None if load is None else _terms(call, load, 16)
    if found is None:
        return None
    busiest = found.terms["work"] + found.terms["idle"]
    q, k = call.need("q"), call.need("k")
    # Columns of different widths, each a product of its own; wide heads come in halves.
    panels = q.shape[-1] % (128 if wide else 64) != 0
    by_rows = not panels and (q.shape[2] % 8 != 0 or k.shape[2] % 8 != 0)
    ours, config = implementation == "hopper", default_config(call)
    divided = ours and q.shape[-1] in DQ_COLUMNS
    # Query heads that a program of ours visits: of those after the first, by the fit, a step takes 1.2 times as long.
    group = q.shape[1] // k.shape[1]
    sharers = config.sharers or group
    terms = {
        **found.terms, "wide": busiest if wide and not divided else 0.0, "panels": busiest if panels else 0.0,
        "by rows": busiest if by_rows else 0.0, "divided": busiest if divided else 0.0,
        "heads in turn": busiest * (1 - 1 / sharers) if ours else 0.0,
        # Zeros, and the pass that rounds: of sums in 16 bits the zeros are less, and of the other there is none.
        "float32 sums": 1e-6 * 8 * q.size if ours and not config.rounded else 0.0,
        # Where query heads share keys cuDNN writes their gradients for each query head, and adds them in another pass.
        "keys of heads": 1e-6 * 8 * k.size * group if not ours and group > 1 else 0.0,
    }  # fmt: skip
    return TimeTerms(terms, found.sizes, (*found.words, *(("divided",) if divided else ())))


class _Load(NamedTuple):
    """Pairs of query and key, in whole steps: the mean of the cores, and what the one that ends last waits or has more;
    and how many programs there are."""

    mean: float
    idle: float
    programs: float
    sums: float = 0.0
    """Bytes moved for gradients that several programs add to."""


def _with_keys(call: Call) -> _Load:
    """Our backward pass: a program has some keys of a key head, and all query heads of it or some."""
    config = default_config(call)
    batch, heads, kv_heads, rows, keys, head_dim = sizes(call)
    tile, sharers = tile_of_keys(config, head_dim), config.sharers or heads // kv_heads
    cores = multiprocessors(call.target.device_kind)
    grid = Grid(rows, Band(*span(bool(call.params["causal"]), 0, window_of(call)), keys), config.block_q, tile)
    busiest, mean = busiest_with_keys(grid, batch, heads // sharers, sharers, cores, config.order)
    sums = bytes_of_sums(batch * kv_heads * keys * head_dim, heads // kv_heads // sharers)
    return _Load(mean, busiest - mean, batch * heads / sharers * grid.counts[1], sums)


def _with_queries(call: Call) -> _Load:
    batch, heads, _, rows, keys, _ = sizes(call)
    window, causal = window_of(call), bool(call.params["causal"])
    cores = multiprocessors(call.target.device_kind)
    whole, longest = _pairs(rows, keys, causal, window)
    programs = batch * heads * -(-rows // TILE)
    mean = batch * heads * whole / cores
    if causal or window is not None:
        # Programs of different lengths: the last to end is half of the longest behind the mean, or alone the longest.
        idle = longest / 2 if programs > cores else longest - mean
    else:
        idle = batch * heads * whole / programs * -(-programs // cores) - mean
    return _Load(mean, max(idle, 0.0), programs)


def _terms(call: Call, load_of: Callable[[Call], _Load], columns: int) -> TimeTerms | None:
    if any(call[name] is not None for name in OPERANDS) or any(call.params[name] for name in PARAMS):
        return None
    batch, heads, kv_heads, rows, keys, head_dim = sizes(call)
    if not min(batch, heads, rows, keys):
        return None
    load = load_of(call)
    cores = multiprocessors(call.target.device_kind)
    depth = -(-head_dim // columns) * columns
    moved = sum(x.size * x.dtype.itemsize for x in call.args if x is not None) + load.sums
    terms = {
        "launch": 1.0, "work": 1e-6 * load.mean * depth, "idle": 1e-6 * load.idle * depth, "pairs": 1e-6 * load.mean,
        "programs": load.programs / cores, "bytes": 1e-6 * moved,
    }  # fmt: skip
    mask = "window" if window_of(call) is not None else "causal" if call.params["causal"] else "all pairs"
    words = (short_dtype(call.need("q").dtype), mask)
    work = 1e-6 * load.mean * head_dim
    range_of = {"length": rows, "keys": keys, "head_dim": head_dim, "group": heads // kv_heads, "work": work}
    return TimeTerms(terms, range_of, words)


@functools.lru_cache(maxsize=1024)
def _pairs(rows: int, keys: int, causal: bool, window: Window) -> tuple[float, float]:
    """Pairs of query and key in whole tiles: all of one head, and of the tile of queries that has the most."""
    below, above = span(causal, 0, window)
    seen = []
    for first in range(0, rows, TILE):
        start, end = columns_seen(first, min(first + TILE, rows) - 1, keys, below, above)
        tiles: Any = -(-end // TILE) - start // TILE
        seen.append(max(tiles, 0) * TILE * TILE)
    return float(np.sum(seen)), float(max(seen))
