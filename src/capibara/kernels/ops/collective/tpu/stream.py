"""Tiles that stream through VMEM inside a kernel: the next is read while one is worked on and the last is written.

JAX's own pipeline (emit_pipeline) wants to know the chip while it is traced, which inside a shard_map on a machine
without one it cannot; and here there is little to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TWO = 2  # tiles of each kind: one in use, one under way


def read_scratch(tiles: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """Scratch for `read`: two tiles of each (shape, dtype), and their semaphores."""
    buffers = [pltpu.VMEM((TWO, *shape), dtype) for shape, dtype in tiles]
    return [*buffers, pltpu.SemaphoreType.DMA((len(tiles), TWO))]


def read(
    steps: int,
    sources: Sequence[Callable[[Any], Any]],
    scratch: Sequence[Any],
    work: Callable[[Any, list[Any]], None],
) -> None:
    """For each step, `work(step, tiles)` on the tiles that `sources` give the places of, in HBM."""
    *buffers, semaphores = scratch

    def copies(step: Any) -> list[Any]:
        turn = lax.rem(step, jnp.int32(TWO))
        return [
            pltpu.make_async_copy(source(step), buffer.at[turn], semaphores.at[kind, turn])
            for kind, (source, buffer) in enumerate(zip(sources, buffers, strict=True))
        ]

    for copy in copies(jnp.int32(0)):
        copy.start()

    def body(step: Any, carry: None) -> None:
        @pl.when(step + 1 < steps)
        def _() -> None:
            for copy in copies(step + 1):
                copy.start()

        for copy in copies(step):
            copy.wait()
        work(step, [buffer.at[lax.rem(step, jnp.int32(TWO))] for buffer in buffers])

    lax.fori_loop(jnp.int32(0), jnp.int32(steps), body, None)


def write_scratch(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """Scratch for a `Writer` of tiles of this shape."""
    return [pltpu.VMEM((TWO, *shape), dtype), pltpu.SemaphoreType.DMA((TWO,))]


class Writer:
    """Tiles on their way from VMEM to HBM, two at a time."""

    def __init__(self, scratch: Sequence[Any], target: Callable[[Any], Any]) -> None:
        self.buffer, self.semaphores = scratch
        self.target = target

    def _copy(self, number: Any) -> Any:
        turn = lax.rem(number, jnp.int32(TWO))
        return pltpu.make_async_copy(self.buffer.at[turn], self.target(number), self.semaphores.at[turn])

    def put(self, number: Any, tile: Any) -> None:
        """Tile `number`, counted from 0, to its place."""

        @pl.when(number >= TWO)
        def _() -> None:
            self._copy(number - TWO).wait()

        self.buffer[lax.rem(number, jnp.int32(TWO))] = tile
        self._copy(number).start()

    def finish(self, count: int) -> None:
        for number in range(max(0, count - TWO), count):
            self._copy(jnp.int32(number)).wait()


def tile_of(ref: Any, number: Any, tile: tuple[int, int], columns: int) -> Any:
    """Tile `number` of a matrix with so many tiles in a row, row by row."""
    row, column = lax.div(number, jnp.int32(columns)), lax.rem(number, jnp.int32(columns))
    return ref.at[
        pl.ds(pl.multiple_of(row * tile[0], tile[0]), tile[0]),
        pl.ds(pl.multiple_of(column * tile[1], tile[1]), tile[1]),
    ]
