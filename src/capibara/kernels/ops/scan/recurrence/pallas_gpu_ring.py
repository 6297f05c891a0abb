"""What the Hopper kernels of the recurrence share: the walk over tiles of time, and the ring that they arrive by.

A program owns `width` channels of one batch and walks over time in tiles of `steps` rows. Tiles are fetched by the
copy engine several ahead. Where time does not divide into tiles the short one lies at its end, and is computed by
code of its own, so that no row is ever masked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.scan.recurrence.planes import Number, filled
from capibara.kernels.ops.scan.recurrence.rules import sizes_of
from capibara.kernels.pallas.hopper import SMEM_BYTES, load, multiprocessors, refuses_chip

THREADS = 128  # of a warpgroup
GROUP = 8  # rows of real numbers that are read into registers together, ahead of the chain that uses them
OUT_STAGES = 2
RESERVED = 2048  # bytes of shared memory for barriers and alignment
SHORTEST_SEGMENT = 128  # steps: a shorter one has little to hide its start behind

# Shared memory is written by threads or by the copy engine, never both, and the walk synchronises what passes between
# them: the barriers that Pallas would put around every store are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Rows and channels of a tile, tiles on their way, and how many segments of time are computed side by side."""

    steps: int
    stages: int
    width: int = THREADS
    segments: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 256 or self.stages < 1 or self.segments < 1 or self.width not in (128, 256):
            raise rule_error(
                "steps is 1 to 256, stages and segments are 1 or more, and width is 128 or 256",
                self,
                "use steps=32, stages=4, width=128, segments=1",
            )

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=self.width // THREADS)

    def shared_bytes(self, fetched: int, stored: int) -> int:
        """Shared memory, where `fetched` and `stored` bytes a number come and go."""
        return self.steps * self.width * (self.stages * fetched + OUT_STAGES * stored)


def ring_candidates(call: Call, fetched: int, stored: int) -> Sequence[TileConfig]:
    """Configs that fit, the best guess first."""
    batch, steps, channels = sizes_of(call)
    cores = multiprocessors(call.target.device_kind)
    programs = batch * (channels // THREADS)
    segments = 1
    # Segments cost a second reading of the operands, so only where more than half of the chip would idle.
    while programs * segments * 2 <= cores and steps % (2 * segments) == 0 and steps // segments > SHORTEST_SEGMENT:
        segments *= 2
    # Bytes on the way that keep the memory busy, by how many programs share a multiprocessor.
    shared = max(1, min(4, programs * segments // cores))
    made = []
    # A tile costs its barriers some hundred cycles, so narrow numbers want more rows of it.
    enough = 32 if fetched <= 6 else 16
    for many, ahead in ((1, 96), (2, 96), (1, 128), (2, 128), (0.5, 64), (2, 64), (4, 128), (1, 48)):
        rows = min(int(many * enough), steps, 256)
        for width in (128, 256):
            if channels % width:
                continue
            stages = max(2, min(16, ahead * 1024 // (shared * rows * width * fetched)))
            made.append(TileConfig(rows, stages, width, segments))
    if segments > 1:
        made.append(dataclasses.replace(made[0], segments=1))
    fits = [c for c in made if c.shared_bytes(fetched, stored) <= SMEM_BYTES - RESERVED]
    return list(dict.fromkeys(sorted(fits, key=lambda c: c.width)))


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and np.dtype(given.dtype).name not in ("bfloat16", "float16", "float32", "complex64"):
            return f"it takes bfloat16, float16, float32 and complex64; {name} is {given.dtype.name}"
    if 0 in sizes_of(call):
        return "there are no steps, or nothing that takes them"
    channels = sizes_of(call).channels
    if channels % THREADS:
        return f"128 threads take a channel each, so it takes a multiple of 128; not {channels} channels"
    return None


def check_config(config: TileConfig, length: int, channels: int) -> None:
    """A config that was asked for must fit the call."""
    if length % config.segments or channels % config.width:
        raise rule_error(
            "segments divides the steps, and width the channels",
            f"{config} for {length} steps and {channels} channels",
            "use segments=1, width=128",
        )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of `length` steps, forwards or backwards in time.

    The last tile in time may be short. With `edge` the last tile that the walk reaches is told apart too. Inside of a
    tile `group` rows are taken at a time.
    """

    length: int
    steps: int
    backwards: bool
    edge: bool
    group: int = GROUP

    @property
    def turns(self) -> int:
        return -(-self.length // self.steps)

    @property
    def short(self) -> bool:
        return self.length % self.steps != 0

    @property
    def alike(self) -> range:
        """The turns whose tiles are whole and not told apart: a loop takes them."""
        first = 1 if self.short and self.backwards else 0
        apart = self.edge or (self.short and not self.backwards)
        return range(first, max(first, self.turns - 1 if apart else self.turns))

    def start(self, turn: Any) -> Any:
        return (self.turns - 1 - turn if self.backwards else turn) * self.steps

    def rows(self, turn: int) -> int:
        """How many, for a turn outside of the loop."""
        return min(self.steps, self.length - self.start(turn))

    def each_row(self, rows: int, body: Callable[..., Any], carry: Any, first: int = 0) -> Any:
        """`body(rows, carry)` on `rows` of a tile from its row `first`, in the walk's order and `group` at a time.

        They are loops: unrolled, a tile takes long to compile and runs no faster.
        """
        groups, left = divmod(rows, self.group)

        def row(number: Any) -> Any:
            return first + (rows - 1 - number if self.backwards else number)

        if groups:

            def group(number: Any, carry: Any) -> Any:
                return body([row(number * self.group + one) for one in range(self.group)], carry)

            carry = lax.fori_loop(0, groups, group, carry)
        if left:
            carry = lax.fori_loop(groups * self.group, rows, lambda number, carry: body([row(number)], carry), carry)
        return carry


def walk_tiles(
    walk: Walk, config: TileConfig, arrived: Any, fetch: Callable[..., None], tile: Callable[..., Any], carry: Any
) -> Any:
    """Take every tile in turn, with those after it on their way.

    `fetch(turn, rows, at_edge)` starts the copies of a tile into its slot. `tile(turn, slot, rows, at_edge, carry)`
    reads it, and starts the copy of what it made after `commit_smem`, so that when it returns its slot has been read.
    """

    def apart(turn: int) -> tuple[int, bool]:
        return walk.rows(turn), walk.edge and turn == walk.turns - 1

    def take(turn: Any, rows: int, at_edge: bool, carry: Any) -> Any:
        slot = slot_of(turn, config.stages)
        plgpu.barrier_wait(arrived.at[slot])
        return tile(turn, slot, rows, at_edge, carry)

    def refill(turn: Any) -> None:
        following = turn + config.stages
        if isinstance(turn, int):
            if following < walk.turns:
                fetch(following, *apart(following))
            return
        pl.when(following < walk.alike.stop)(functools.partial(fetch, following, walk.steps, False))
        if walk.alike.stop < walk.turns:
            last = walk.turns - 1
            pl.when(following == last)(functools.partial(fetch, last, *apart(last)))

    def step(turn: Any, carry: Any) -> Any:
        carry = take(turn, walk.steps, False, carry)
        refill(turn)
        return carry

    for turn in range(min(config.stages, walk.turns)):
        fetch(turn, *apart(turn))
    for turn in range(walk.alike.start):
        carry = take(turn, *apart(turn), carry)
        refill(turn)
    if walk.alike:
        carry = lax.fori_loop(walk.alike.start, walk.alike.stop, step, carry)
    for turn in range(walk.alike.stop, walk.turns):
        carry = take(turn, *apart(turn), carry)
        refill(turn)
    return carry


def slot_of(turn: Any, slots: int) -> Any:
    return lax.rem(jnp.int32(turn), jnp.int32(slots))


def fetch_rows(
    sources: Any, buffers: Any, arrived: Any, slot: Any, batch: Any, first: Any, rows: int, columns: Any, into: int = 0
) -> None:
    """Start the copies of some rows of every source, each into its own ring from the slot's row `into`."""

    def copy(source: Any, buffer: Any) -> None:
        there = source.at[batch, pl.ds(first, rows), columns]
        plgpu.copy_gmem_to_smem(there, part(buffer, slot, into, rows), arrived.at[slot])

    jax.tree.map(copy, sources, buffers)


def store_rows(made: Any, targets: Any, out: Any, batch: Any, first: Any, rows: int, columns: Any) -> None:
    """Start the copies of what a tile made to where it belongs."""

    def copy(buffer: Any, target: Any) -> None:
        plgpu.copy_smem_to_gmem(part(buffer, out, 0, rows), target.at[batch, pl.ds(first, rows), columns])

    plgpu.commit_smem()
    jax.tree.map(copy, made, targets)


def rings(sources: Any, slots: int, walk: Walk, config: TileConfig) -> Any:
    """Shared memory for `slots` tiles of every source."""
    return jax.tree.map(lambda x: plgpu.SMEM((slots, walk.steps, config.width), x.dtype), sources)


def part(buffer: Any, slot: Any, first: int, rows: int) -> Any:
    """Some rows of a slot; the whole slot without a slice, as the copy engine likes it best."""
    return buffer.at[slot] if rows == buffer.shape[1] else buffer.at[slot, pl.ds(first, rows)]


def read_rows(buffers: Number, slot: Any, rows: Sequence[Any], layout: Any) -> list[Number]:
    """Numbers of some rows in float32."""

    def read(buffer: Any, row: Any) -> Any:
        return load(buffer.at[slot, row], layout, optimized=False).astype(jnp.float32)

    return [jax.tree.map(lambda buffer, row=row: read(buffer, row), buffers) for row in rows]


def state_at(refs: Number, batch: Any, columns: Any, config: TileConfig) -> Number:
    """A channel's state from device memory."""
    # Inside of a checked shard_map what is read varies over the mesh by its type, and what a kernel computes does not:
    # a product with 1 is computed, and a loop may carry it.
    one = np.float32(1)
    return jax.tree.map(lambda ref: load(ref.at[batch, columns], config.layout, optimized=False) * one, refs)


def constant(value: float, like: Number, config: TileConfig) -> Number:
    def full(number: float) -> Any:
        return plgpu.layout_cast(jnp.full((config.width,), number, jnp.float32), config.layout)

    return jax.tree.map(full, filled(like, value))


def own_columns(config: TileConfig) -> Any:
    column = lax.axis_index("column")
    return pl.ds(pl.multiple_of(column * config.width, config.width), config.width)
