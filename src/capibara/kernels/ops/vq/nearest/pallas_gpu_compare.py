"""Distances in float32 from one row to some codes, by all 128 threads of a program or warpgroup.

By differences, so that near codes are told apart. Equal codes have equal distances, to the bit: each is computed by the
same additions in the same order. Where the least distance is so small that squares may have vanished, all are computed
again of differences that are enlarged by a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.pallas.hopper import load

THREADS = 128
TOGETHER = 4  # codes that are compared at a time, where there are many: a wait for memory and four sums, about 1.1 us
# A least distance below this may be a sum of squares that float32 has not. Enlarged, it is 2^68 at the most; a code
# whose distance overflows then is farther.
SMALLEST_DISTANCE = 2.0**-60
ENLARGED = 2.0**64
LARGEST_USABLE = 1e29  # half norms of codes that cannot be used are beyond


class Row:
    """A row of x in registers, and its distances to codes."""

    def __init__(self, x_hbm: Any, codes_hbm: Any, row: Any) -> None:
        self.codes_hbm = codes_hbm
        width = x_hbm.shape[1]
        vector = math.gcd(width // THREADS, 16 // max(x_hbm.dtype.itemsize, codes_hbm.dtype.itemsize))
        self.layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
        self.values = load(x_hbm.at[row], self.layout).astype(jnp.float32)

    def distances(self, indices: list[Any], by: Any) -> list[Any]:
        # All are on the way from memory before the first is added up.
        several = [load(self.codes_hbm.at[index], self.layout).astype(jnp.float32) for index in indices]
        differences = [self.values - code if by is None else (self.values - code) * by for code in several]
        return [jnp.sum(difference * difference) for difference in differences]

    def is_finite(self) -> Any:
        return jnp.sum(self.values * self.values) < np.inf

    def nearest(self, code: Callable[[Any], tuple[Any, Any]], count: int) -> Any:
        """The nearest of `count` codes, the first of equals; -1 where none counts.

        code(number) is (a code, whether it counts), in the order of their indices.
        """

        def look(turn: Any, best: Any, by: Any) -> Any:
            least, index = best
            # Whether they count is asked for with them: sums wait for all threads, and nothing is fetched across one.
            several = [code(jnp.minimum(turn * TOGETHER + number, count - 1)) for number in range(TOGETHER)]
            for there, (this, counts) in zip(self.distances([this for this, _ in several], by), several, strict=True):
                # The first that counts is as near as any where every distance overflows.
                nearer = counts & ((there < least) | (index < 0))
                least, index = jnp.where(nearer, there, least), jnp.where(nearer, this, index)
            return least, index

        def search(by: Any) -> Any:
            start = (np.float32(np.inf), np.int32(-1))
            return lax.fori_loop(0, -(-count // TOGETHER), lambda turn, best: look(turn, best, by), start)

        return twice_if_small(search)


def twice_if_small(search: Callable[[Any], tuple[Any, Any]]) -> Any:
    """The index of (the least distance, its index) that `search(by)` finds of differences enlarged `by`, or plain."""
    plain = search(None)
    again = jnp.where(plain[0] < SMALLEST_DISTANCE, np.int32(1), np.int32(0))
    return lax.fori_loop(0, again, lambda _, __: search(np.float32(ENLARGED)), plain)[1]


def usable(half: Any, code: Any) -> tuple[Any, Any]:
    """(a code, whether its half norm says that it can be used)."""
    return code, half[code] < LARGEST_USABLE
