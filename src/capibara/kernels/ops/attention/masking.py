"""Which pairs of query and key may see each other: by position, and by the operands that say so.

Positions are integer arrays (numpy's, JAX's, or a kernel's) that broadcast against each other: rows count queries,
columns count keys. Everything here is shared by the reference, the chunked form, the cost and the block masks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Window = tuple[int | None, int | None] | None
FAR = 2**30  # beyond any position, and far enough from the edge of int32 to be added to one


def without_dead_queries(lse: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """[B, H, T, D] arrays with zeros for queries that see nothing: a product with zero would keep their NaN alive."""
    dead = jnp.isneginf(lse)[..., None]
    return [jnp.where(dead, jnp.zeros((), x.dtype), x) for x in arrays]


def may_be_dead(rows: int, columns: int, causal: bool, q_offset: int, window: Window, by_data: bool) -> bool:
    """Whether some query may see no key: by an operand, or by its position."""
    below, above = span(causal, q_offset, window)
    return by_data or above < 0 or rows - 1 + below > columns - 1


def span(causal: bool, q_offset: int, window: Window) -> tuple[int, int]:
    """(below, above): row i sees columns i + below to i + above, both included, by position alone.

    An unlimited side is FAR away.
    """
    left, right = window or (None, None)
    below = -FAR if left is None else q_offset - left
    above = FAR if right is None else q_offset + right
    return below, min(above, q_offset) if causal else above


def by_position(rows: Any, columns: Any, causal: bool, q_offset: int, window: Window) -> Any:
    """The causal and window rules as a boolean array; None when they rule nothing out."""
    below, above = span(causal, q_offset, window)
    if below == -FAR and above == FAR:
        return None
    if below == -FAR:
        return columns - rows <= above
    if above == FAR:
        return columns - rows >= below
    return (columns - rows >= below) & (columns - rows <= above)


@functools.lru_cache(maxsize=1024)
def live_pairs(rows: int, columns: int, causal: bool, q_offset: int, window: Window) -> int:
    """How many pairs of query and key the causal and window rules leave, counted exactly."""
    below, above = span(causal, q_offset, window)
    i = np.arange(rows, dtype=np.int64)
    first = np.maximum(i + below, 0)
    last = np.minimum(i + above, columns - 1)
    return int(np.maximum(last - first + 1, 0).sum())


def columns_seen(first_row: Any, last_row: Any, columns: int, below: int, above: int) -> tuple[Any, Any]:
    """The columns (first, end) that a run of rows may see by position; python ints or traced ones."""

    def clipped(x: Any) -> Any:
        return min(max(x, 0), columns) if isinstance(x, int) else jnp.clip(x, 0, columns)

    first = 0 if below == -FAR else clipped(first_row + below)
    end = columns if above == FAR else clipped(last_row + above + 1)
    return first, end


def rows_seen(first_column: Any, last_column: Any, rows: int, below: int, above: int) -> tuple[Any, Any]:
    """The rows (first, end) that may see a run of columns by position: the same rule read the other way."""
    flip_below = -FAR if above == FAR else -above
    flip_above = FAR if below == -FAR else -below
    return columns_seen(first_column, last_column, rows, flip_below, flip_above)


def expand_blocks(block_mask: jax.Array, rows: Any, columns: Any, block_size: tuple[int, int]) -> jax.Array:
    """The block mask at these rows and columns (1-D), as [B|1, H|1, rows, columns]."""
    by_row = jnp.take(block_mask, rows // block_size[0], axis=2, mode="clip")
    return jnp.take(by_row, columns // block_size[1], axis=3, mode="clip")


def both(left: Any, right: Any) -> Any:
    """The conjunction of two masks, either of which may be None: everything allowed."""
    if left is None or right is None:
        return right if left is None else left
    return left & right
