"""Block-sparse attention: which blocks of queries and keys are worth computing, from a function of positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from capibara.errors import rule_error
from capibara.kernels.ops.attention.masking import Window, by_position, columns_seen, span

MaskFn = Callable[[Any, Any], Any]
DEFAULT_BLOCK = (512, 512)


class BlockMask(NamedTuple):
    """The live blocks, and the pairs inside them where that is not all of them."""

    blocks: np.ndarray  # bool [1, 1, blocks of queries, blocks of keys]
    pairs: np.ndarray | None  # bool [1, 1, queries, keys]; None when every live block is wholly live
    block_size: tuple[int, int]

    @property
    def live(self) -> float:
        """The fraction of blocks that is computed."""
        return float(self.blocks.mean()) if self.blocks.size else 0.0


def block_mask_from(
    mask_fn: MaskFn,
    rows: int,
    columns: int,
    block_size: tuple[int, int] = DEFAULT_BLOCK,
    *,
    causal: bool = False,
    query_offset: int = 0,
    window: Window = None,
) -> BlockMask:
    """Evaluate `mask_fn(q_idx, kv_idx)` on the host, block by block.

    Args:
      mask_fn: takes two integer arrays that broadcast, query positions [n, 1] and key positions [1, m], and returns
        True where the query may see the key. It is called once for each block that `causal` and `window` leave.
      rows, columns: the number of queries and of keys.
      block_size: queries and keys of one block.
      causal, query_offset, window: what the call itself rules out. A block is whole when `mask_fn` rules out nothing
        more, and then no mask of pairs is needed.

    >>> found = block_mask_from(lambda i, j: i // 4 == j // 4, 8, 8, (4, 4))
    >>> found.blocks[0, 0].tolist(), found.pairs
    ([[True, False], [False, True]], None)
    """
    return _evaluated_blocks(mask_fn, rows, columns, block_size, causal, query_offset, window)


@functools.lru_cache(maxsize=8)  # each may hold a mask of one byte a pair
def _evaluated_blocks(
    mask_fn: MaskFn, rows: int, columns: int, block_size: tuple[int, int], causal: bool, query_offset: int,
    window: Window,
) -> BlockMask:  # fmt: skip
    bq, bk = block_size
    grid = (-(-rows // bq), -(-columns // bk))
    blocks = np.zeros((1, 1, *grid), bool)
    pairs: np.ndarray | None = None
    below, above = span(causal, query_offset, window)
    for row in range(grid[0]):
        i = np.arange(row * bq, min((row + 1) * bq, rows))[:, None]
        first, end = columns_seen(int(i[0, 0]), int(i[-1, 0]), columns, below, above)
        for column in range(first // bk, -(-end // bk)):
            j = np.arange(column * bk, min((column + 1) * bk, columns))[None, :]
            asked = _evaluated(mask_fn, i, j)
            rest = by_position(i, j, causal, query_offset, window)
            visible = asked if rest is None else asked & rest
            if not visible.any():
                continue
            blocks[0, 0, row, column] = True
            if visible.all() if rest is None else np.array_equal(visible, rest):
                continue
            if pairs is None:
                pairs = np.ones((1, 1, rows, columns), bool)
            pairs[0, 0, i, j] = asked
    for made in (blocks, pairs):
        if made is not None:
            made.flags.writeable = False  # it is kept for the next call
    return BlockMask(blocks, pairs, block_size)


def _evaluated(mask_fn: MaskFn, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    made = np.asarray(mask_fn(i, j))
    shape = (i.shape[0], j.shape[1])
    if made.dtype != np.bool_ or np.broadcast_shapes(made.shape, shape) != shape:
        raise rule_error(
            f"mask_fn(q_idx [{shape[0]}, 1], kv_idx [1, {shape[1]}]) returns booleans of shape {shape}",
            f"{made.dtype.name}{list(made.shape)}",
            "compare the two arrays, e.g. lambda i, j: i - j < 128",
        )
    return np.broadcast_to(made, shape)
