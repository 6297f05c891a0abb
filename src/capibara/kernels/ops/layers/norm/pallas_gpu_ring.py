"""What the Hopper kernels of norm share: how a row is cut among threads, and the ring that rows arrive by."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.layers.norm.rules import MOST_COLUMNS, sizes_of
from capibara.kernels.pallas.hopper import SMEM_BYTES, load, multiprocessors, refuses_chip

THREADS = 128  # of a warpgroup
PIECE = 4096  # numbers handled at a time, at most: 32 a thread
MOST_PIECES = 16
HELD_COLUMNS = 4096  # up to so many, scale and bias stay in registers from row to row
RING_BYTES = 200 * 1024  # of a multiprocessor's shared memory, for the rings of all its programs
AHEAD_BYTES = 64 * 1024  # enough on the way to keep the memory busy; more only takes shared memory from the cache

# Memory is either read or written, and `release` waits for all threads: the barriers that Pallas would put around every
# store are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """How many programs share the rows, and how many rows each of them fetches ahead."""

    programs: int
    stages: int

    def __post_init__(self) -> None:
        if self.programs < 1 or self.stages < 1:
            raise rule_error("programs and stages are 1 or more", self, "use programs=528, stages=4")


@dataclasses.dataclass(frozen=True)
class Cut:
    """A row as [lines, width] in memory, handled in `pieces` of `depth` lines, `vector` numbers a thread at a time."""

    lines: int
    width: int
    depth: int
    vector: int

    @property
    def pieces(self) -> int:
        return self.lines // self.depth

    @property
    def columns(self) -> int:
        return self.lines * self.width

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.depth, self.width), vec_size=self.vector)

    def at(self, number: int) -> Any:
        return pl.ds(number * self.depth, self.depth)


def cut_row(columns: int, itemsize: int) -> Cut | None:
    """The widest vectors and then the largest pieces that divide a row; None where no cut is good."""
    width = 256 if columns % 256 == 0 else THREADS
    if columns % width:
        return None
    lines = columns // width

    def made(depth: int) -> Cut:
        each = depth * width // THREADS
        return Cut(lines, width, depth, math.gcd(each, 16 // itemsize))

    depths = [d for d in range(1, PIECE // width + 1) if lines % d == 0]
    best = max((made(d) for d in depths), key=lambda cut: (cut.vector, cut.depth))
    return best if best.pieces <= MOST_PIECES else None


def ring_candidates(call: Call, row_bytes: int, programs: Sequence[int]) -> Sequence[RingConfig]:
    """`programs` a multiprocessor, the best guess first; each gets a ring that keeps enough on the way."""
    made, cores = [], multiprocessors(call.target.device_kind)
    for count in dict.fromkeys(programs):
        for ahead in (AHEAD_BYTES, 2 * AHEAD_BYTES, RING_BYTES):
            stages = min(max(2, ahead // (count * row_bytes)), 16)
            if count * stages * row_bytes <= RING_BYTES and stages * row_bytes <= SMEM_BYTES - 4096:
                made.append(RingConfig(count * cores, stages))
    return list(dict.fromkeys(made))


def row_bytes(call: Call, names: Sequence[str]) -> int:
    """Bytes of one row of those of the operands that are present."""
    return sum(x.shape[-1] * x.dtype.itemsize for x in map(call.__getitem__, names) if x is not None)


def refuses_shape(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and np.dtype(given.dtype).name not in ("bfloat16", "float16", "float32"):
            return f"it takes bfloat16, float16 and float32; {name} is {given.dtype.name}"
    groups, rows, columns = sizes_of(call)
    if 0 in (groups, rows):
        return "x is empty"
    if columns > MOST_COLUMNS:
        return f"it takes up to {MOST_COLUMNS} columns, not {columns}"
    if cut_row(columns, call.need("x").dtype.itemsize) is None:
        return f"it takes rows that 128 threads can share in few equal pieces, a multiple of 128; not {columns} columns"
    if not call.op.implementations["hopper"].candidates(call):
        return f"a ring of rows of {columns} columns does not fit shared memory"
    return None


def ring(
    sources: Sequence[Any], buffers: Sequence[Any], arrived: Any, first: Any, stride: int, count: Any
) -> tuple[Any, Any]:
    """(wait, release) for a ring over rows first, first + stride, ...; what fits is on its way when this returns.

    `wait(turn)` returns the slot that holds the row; `release(turn)` hands it back, and the copy engine fills it again.
    """
    stages = buffers[0].shape[0]

    def fetch(turn: Any) -> None:
        slot = lax.rem(turn, stages)
        for source, buffer in zip(sources, buffers, strict=True):
            plgpu.copy_gmem_to_smem(source.at[first + turn * stride], buffer.at[slot], arrived.at[slot])

    for turn in range(stages):
        pl.when(count > turn)(functools.partial(fetch, jnp.int32(turn)))

    def wait(turn: Any) -> Any:
        slot = lax.rem(turn, stages)
        plgpu.barrier_wait(arrived.at[slot])
        return slot

    def release(turn: Any) -> None:
        plgpu.commit_smem()  # every thread has read the slot before the copy engine may write it
        pl.when(turn + stages < count)(functools.partial(fetch, turn + stages))

    return wait, release


def vector_pieces(ref: Any, group: Any, cut: Cut) -> Callable[[int], Any]:
    """A scale or bias in float32, piece by piece: read once for all rows where registers allow, else for each row."""

    def read(number: int) -> Any:
        return load(ref.at[group, cut.at(number)], cut.layout)

    # Held in its own type, which may take half of the registers.
    held = [read(number) for number in range(cut.pieces)] if cut.columns <= HELD_COLUMNS else None
    return lambda number: (read(number) if held is None else held[number]).astype(jnp.float32)


def programs_of_a_group(config: RingConfig, groups: int, rows: int) -> int:
    """Its share of those that run at a time, and no more than it has rows."""
    return max(1, min(rows, config.programs // groups))
