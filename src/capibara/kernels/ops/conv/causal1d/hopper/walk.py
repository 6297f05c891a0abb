"""What both passes of causal_conv1d on Hopper share: which channels and which stretch of time a program has.

A program is one warpgroup and several of them share a multiprocessor. It keeps to a piece of the channels, a few
neighbours to each thread, and walks along a stretch of one sequence's time, tile after tile. The copy engine brings
the tiles into a ring ahead of it, with zeros for what lies before the first input, after the last and past the last
channel, and takes back the results, which a thread has written over the inputs that it had read. What a filter reaches
of the tile before stays in registers, so that every number is read once and written once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.pallas.hopper import LANE, SMEM_BYTES, multiprocessors, refuses_chip, smem_bytes, write_rows

THREADS = 128  # of a warpgroup
VECTORS = (8, 4, 2, 1)  # neighbouring channels of a thread
VECTOR_BYTES = 16  # at most, of one load
LINES = (256, 128, 64)  # channels of a line: what the copy engine takes along one axis is 256 at most
FEWEST_TAPS, MOST_TAPS = 2, 8  # no ring for less, no registers for more
FLOATS = ("bfloat16", "float16", "float32")
REGISTERS = 1 << 16  # of a multiprocessor
THREAD_REGISTERS = 255  # of a thread, at most
RESERVED = 1024  # bytes of shared memory that each program of a multiprocessor takes besides its own
START_TILES = 1.5  # what it takes a program to begin and to end, in tiles that pass meanwhile
TIMED_VECTOR = 4  # channels of a thread at every row of measured evidence
TIMED_NUMBERS = 1 << 22  # of x; the smallest row has 5.8 million

# Threads meet where a tile is handed to the copy engine; between, each reads and writes numbers of its own.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=LANE)


@dataclasses.dataclass(frozen=True)
class WalkConfig:
    """What a tile is, how many of them a ring holds, and how many programs share a sequence's time.

    Attributes:
      rows: inputs of a tile, one after another in time.
      vector: neighbouring channels of a thread.
      stages: tiles of the ring, the one at work among them.
      splits: stretches of time, a program each.
    """

    rows: int
    vector: int
    stages: int
    splits: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.vector not in VECTORS or self.stages < 2 or self.splits < 1:
            raise rule_error(
                "rows and splits are 1 or more, stages 2 or more, and vector is 8, 4, 2 or 1", self,
                "use rows=8, vector=4, stages=3, splits=8",
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cut:
    """Channels as [lines, width] in memory, of which a program has `depth` lines, `vector` channels a thread.

    Where a piece is not a divisor the last one has lines past the end: they are read as 0 and not written.
    """

    lines: int
    width: int
    depth: int
    vector: int

    @property
    def pieces(self) -> int:
        return -(-self.lines // self.depth)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.depth, self.width), vec_size=self.vector)

    def at(self, piece: Any) -> Any:
        return pl.ds(piece * self.depth, self.depth)


def cut_channels(channels: int, vector: int) -> Cut | None:
    """None where the channels are not whole lines, or fewer than a program has threads for."""
    for width in LINES:
        if channels % width == 0 and (THREADS * vector) % width == 0:
            cut = Cut(channels // width, width, THREADS * vector // width, vector)
            return cut if cut.depth <= cut.lines else None
    return None


def cut_for(channels: int, config: WalkConfig, tail: int) -> Cut:
    """The cut of a config that was asked for, whose ring must have room for a tail of so many rows."""
    cut = cut_channels(channels, config.vector)
    if cut is None:
        raise rule_error(f"128 threads share {channels} channels in whole lines", config, "use a smaller vector")
    if config.rows * config.stages < tail:
        raise rule_error(f"A ring holds the {tail} rows that a program begins with", config, "use more stages")
    return cut


class Stretch(NamedTuple):
    """What a program walks along: a piece of the channels of one sequence, `count` tiles from `first` on."""

    number: Any
    sequence: Any
    piece: Any
    first: Any
    count: Any


def stretch(cut: Cut, tiles: int, splits: int) -> Stretch:
    """This program's. Neighbours have neighbouring channels, so that whole rows are on their way at a time."""
    program = lax.axis_index("program")
    piece, number = lax.rem(program, cut.pieces), lax.div(program, cut.pieces)
    split, sequence = lax.rem(number, splits), lax.div(number, splits)
    first = lax.div(split * tiles, splits)
    return Stretch(number, sequence, piece, first, lax.div((split + 1) * tiles, splits) - first)


def lined(x: Any, cut: Cut) -> Any:
    """An array with its channels, which are its last axis, as lines."""
    return x.reshape(*x.shape[:-1], cut.lines, cut.width)


class Ring:
    """Tiles in shared memory, of `rows` inputs each, one after another.

    A loop hands its slot on: the rest of a division by three stages would be taken in 64 bits, and cost registers.
    """

    def __init__(self, ref: Any, rows: int) -> None:
        self.ref, self.rows, self.stages = ref, rows, ref.shape[0] // rows

    def tile(self, slot: Any) -> Any:
        return self.ref.at[pl.ds(slot * self.rows, self.rows)]

    def row(self, slot: Any, row: int) -> Any:
        return self.ref.at[slot * self.rows + row]

    def slot_after(self, slot: Any) -> Any:
        return jnp.where(slot == self.stages - 1, 0, slot + 1)

    def slot_before(self, slot: Any) -> Any:
        return jnp.where(slot == 0, self.stages - 1, slot - 1)

    def tail(self, rows: int) -> Any:
        """Its last rows, for what is read once, before the tiles that have their place there are fetched."""
        return self.ref.at[pl.ds(self.ref.shape[0] - rows, rows)]

    def before_tail(self, rows: int) -> int:
        """Tiles whose place is not in that."""
        return (self.ref.shape[0] - rows) // self.rows


def write_back(ring: Ring, slot: Any, memory: Any, own: Stretch, first: Any, cut: Cut) -> None:
    """A tile's results into memory, where its first row is `first`."""

    def copy(rows: int) -> None:
        place = own.sequence, pl.ds(first, rows), cut.at(own.piece)
        plgpu.copy_smem_to_gmem(ring.ref.at[pl.ds(slot * ring.rows, rows)], memory.at[place])

    write_rows(copy, first, ring.rows, memory.shape[1], whole=cut.pieces == 1)


def scratch(rings: int, x: Any, w: Any, bias: Any, cut: Cut, rows: int, stages: int) -> dict[str, Any]:
    """What a program allocates: a ring for the tiles of each of its sources, its filters and its bias."""
    piece = (cut.depth, cut.width)
    begins_with = rings + (1 if bias is None else 2)  # a tail of each ring, the filters and the bias
    allocated = {
        "buffers": [plgpu.SMEM((stages * rows, *piece), x.dtype) for _ in range(rings)],
        "taps": plgpu.SMEM((w.shape[0], *piece), w.dtype),
        "arrived": plgpu.Barrier(num_arrivals=rings, num_barriers=stages),
        "begun": plgpu.Barrier(num_arrivals=begins_with),
    }
    return allocated if bias is None else allocated | {"bias": plgpu.SMEM(piece, bias.dtype)}


def dot(taps: Sequence[Any], numbers: Sequence[Any], start: Any = None) -> Any:
    """Σ taps · numbers, and `start` where there is one, in this order."""
    total = start
    for tap, number in zip(taps, numbers, strict=True):
        total = tap * number if total is None else total + tap * number
    return total


@functools.lru_cache(maxsize=1024)
def splits_for(groups: int, tiles: int, slots: int) -> int:
    """Into how many stretches a sequence is cut, with `groups` of pieces and sequences and so many programs at a time.

    Programs that do not run at once wait for those before them to end: few long stretches, of which all run together,
    or short ones, of which the last round is a small part.
    """

    def rounds(splits: int) -> float:
        return math.ceil(groups * splits / slots) * (math.ceil(tiles / splits) + START_TILES)

    return min(range(1, min(tiles, max(1, 4 * slots // groups)) + 1), key=lambda splits: (rounds(splits), splits))


def refuses(call: Call) -> str | None:
    """Why neither pass takes it."""
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and np.dtype(given.dtype).name not in FLOATS:
            return f"it takes {', '.join(FLOATS)}; {name} is {given.dtype.name}"
    x, w = call.need("x"), call.need("w")
    if call["initial_state"] is not None:
        return "it begins with zeros, and there is an initial state"
    if 0 in x.shape:
        return "x is empty"
    if not FEWEST_TAPS <= w.shape[0] <= MOST_TAPS:
        return f"it keeps what the filter reaches in registers, of {FEWEST_TAPS} to {MOST_TAPS} taps; not {w.shape[0]}"
    if call.params["activation"] is not None and np.dtype(x.dtype).name != "bfloat16":
        return f"its tanh is an instruction good to 11 bits, which is enough for bfloat16; x is {x.dtype.name}"
    if not call.op.implementations["hopper"].candidates(call):
        return (
            f"128 threads share lines of {LINES[-1]} channels, a load of 4 bytes or more each: a multiple of "
            f"{LINES[-1]} from 256 on, or 128 of float32; not {x.shape[2]}"
        )
    return None


def vectors_for(call: Call) -> list[int]:
    """Those that cut the channels, the best first: loads of 8 bytes, unless others leave fewer threads idle."""
    x = call.need("x")
    itemsize, channels = x.dtype.itemsize, x.shape[2]
    cuts = [cut_channels(channels, v) for v in VECTORS if 4 <= v * itemsize <= VECTOR_BYTES]

    def order(cut: Cut) -> tuple[bool, int]:
        idle = cut.pieces * cut.depth / cut.lines - 1
        return idle > 0.1, abs(cut.vector * itemsize - 8)

    return [cut.vector for cut in sorted((cut for cut in cuts if cut is not None), key=order)]


def like_the_timed(call: Call) -> bool:
    """Whether a call is cut as those were that both passes were timed at on an H200, where every result was right.

    Others wait for rows of their own: float16 and float32, less than 4 million numbers, lines of less than 256
    channels, two channels a thread, and one piece for all channels. Of the last there was a row, held back, which was
    wrong before the rows past a sequence's end were left out (bf16[5,5483,256]); no chip has run it since.
    """
    x = call.need("x")
    if np.dtype(x.dtype).name != "bfloat16" or math.prod(x.shape) < TIMED_NUMBERS or x.shape[2] % LINES[0]:
        return False
    cut = cut_channels(x.shape[2], vectors_for(call)[0])
    return cut is not None and cut.vector == TIMED_VECTOR and cut.pieces > 1


def configs_for(
    call: Call,
    shapes: Sequence[tuple[int, int]],
    scratch: Callable[[Cut, int, int], Any],
    registers: Callable[[int], int],
) -> list[WalkConfig]:
    """Configs of these (rows, stages), each for every vector, with as many splits as fill the chip.

    `scratch(cut, rows, stages)` is what a program allocates, `registers(vector)` what a thread takes: so many programs
    as have room for both run on a multiprocessor.
    """
    (batch, time, channels), cores = call.need("x").shape, multiprocessors(call.target.device_kind)
    configs = []
    for vector in vectors_for(call):
        cut = cut_channels(channels, vector)
        assert cut is not None  # vectors_for has seen to it
        if registers(vector) > THREAD_REGISTERS:
            continue
        most = REGISTERS // (THREADS * math.ceil(registers(vector) / 8) * 8)
        for rows, stages in shapes:
            used = smem_bytes(scratch(cut, rows, stages))
            together = min(most, (SMEM_BYTES + RESERVED) // (used + RESERVED))
            if together:
                splits = splits_for(batch * cut.pieces, -(-time // rows), together * cores)
                configs.append(WalkConfig(rows, vector, stages, splits))
    return list(dict.fromkeys(configs))
