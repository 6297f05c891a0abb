"""What attention's time is made of on a GPU: tiles of queries and keys, and the cores that they are shared out to."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from capibara.kernels.core.spec import Call, TimeTerms, short_dtype
from capibara.kernels.ops.attention.hopper.backward import DQ_COLUMNS, NARROWEST, VERY_LONG
from capibara.kernels.ops.attention.masking import Window, columns_seen, span
from capibara.kernels.ops.attention.rules import sizes, window_of
from capibara.kernels.pallas.hopper import multiprocessors

TILE = 128  # queries of a program; of the backward pass keys, and half as many where heads are wide
WIDE = 128  # columns, beyond which our backward pass and cuDNN's share them out to two warpgroups
# What no run beside both had: of such calls the model says nothing.
OPERANDS = ("bias", "mask", "q_segments", "block_mask")
PARAMS = ("q_offset", "softcap", "dropout_rate")


def forward(call: Call, implementation: str) -> TimeTerms | None:
    # Columns that wgmma takes at a time: ours are 16; cuDNN's time moves in steps of 32.
    columns = {"hopper": 16, "cudnn": 32}.get(implementation)
    return None if columns is None else _terms(call, TILE, TILE, columns, key_programs=False)


def backward(call: Call, implementation: str) -> TimeTerms | None:
    """Ours has a program for some keys of a key head, and all query heads of it; cuDNN's does not show which it has."""
    if call.need("q").shape[2] >= VERY_LONG:  # memory decides there, not the time
        return None
    below, above = span(bool(call.params["causal"]), 0, window_of(call))
    if above - below < NARROWEST:  # steps at a window's two ends are most of it: 1.5 times what terms say
        return None
    wide = call.need("q").shape[-1] > WIDE
    if implementation == "hopper":
        found = _terms(call, TILE // 2 if wide else TILE, 64, 16, key_programs=True)
    elif implementation == "cudnn":
        found = _terms(call, TILE, TILE, 16, key_programs=False)
    else:
        return None
    if found is None:
        return None
    busiest = found.terms["work"] + found.terms["idle"]
    q, k = call.need("q"), call.need("k")
    panels = q.shape[-1] % 64 != 0 or q.shape[2] % 8 != 0 or k.shape[2] % 8 != 0
    divided = implementation == "hopper" and q.shape[-1] in DQ_COLUMNS
    terms = {
        **found.terms, "wide": busiest if wide and not divided else 0.0, "panels": busiest if panels else 0.0,
        "divided": busiest if divided else 0.0,
    }  # fmt: skip
    return TimeTerms(terms, found.sizes, (*found.words, *(("divided",) if divided else ())))


def _terms(call: Call, tile: int, step: int, columns: int, *, key_programs: bool) -> TimeTerms | None:
    if any(call[name] is not None for name in OPERANDS) or any(call.params[name] for name in PARAMS):
        return None
    batch, heads, kv_heads, rows, keys, head_dim = sizes(call)
    if not min(batch, heads, rows, keys):
        return None
    window, causal = window_of(call), bool(call.params["causal"])
    whole, longest = _pairs(rows, keys, tile, step, causal, window)
    tiles = -(-(keys if key_programs else rows) // tile)
    programs = batch * (kv_heads if key_programs else heads) * tiles
    cores = multiprocessors(call.target.device_kind)
    depth = -(-head_dim // columns) * columns
    share = batch * heads * whole / cores
    if causal or window is not None:
        # Programs of different lengths: the last to end is half of the longest behind the mean, or alone the longest.
        of_program = longest * (heads // kv_heads if key_programs else 1)
        idle = of_program / 2 if programs > cores else of_program - share
    else:
        idle = batch * heads * whole / programs * -(-programs // cores) - share
    moved = sum(x.size * x.dtype.itemsize for x in call.args if x is not None)
    terms = {
        "launch": 1.0, "work": 1e-6 * share * depth, "idle": 1e-6 * max(idle, 0.0) * depth, "pairs": 1e-6 * share,
        "programs": programs / cores, "bytes": 1e-6 * moved,
    }  # fmt: skip
    mask = "window" if window is not None else "causal" if causal else "all pairs"
    words = (short_dtype(call.need("q").dtype), mask)
    group = heads // kv_heads
    range_of = {"length": rows, "keys": keys, "head_dim": head_dim, "group": group, "work": 1e-6 * share * head_dim}
    return TimeTerms(terms, range_of, words)


@functools.lru_cache(maxsize=1024)
def _pairs(rows: int, keys: int, tile: int, step: int, causal: bool, window: Window) -> tuple[float, float]:
    """Pairs of query and key in whole steps of a tile of queries: all of one head, and of the longest tile."""
    below, above = span(causal, 0, window)
    seen = []
    for first in range(0, rows, tile):
        start, end = columns_seen(first, min(first + tile, rows) - 1, keys, below, above)
        steps: Any = -(-end // step) - start // step
        seen.append(max(steps, 0) * step * tile)
    return float(np.sum(seen)), float(max(seen))
