"""Norm for Hopper, in Pallas (Mosaic GPU): rows stream through shared memory, each number read and written once.

Several programs of one warpgroup share a multiprocessor, and each takes every so many rows. A program fetches rows by
the copy engine into a ring that runs ahead of it, so that tens of kilobytes are on their way at any time; it reads a
row from shared memory once for each of its sums and once for its result, and stores the result from registers. All
128 threads hold neighbouring pieces of 16 bytes where the width allows.

An odd multiple of 64 columns, such as 2880, has no equal pieces for 128 threads. There the last piece ends with the
row, and begins inside of the piece before it: the few numbers that both have are computed twice and stored twice, the
same, and counted once in the sums along the row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.norm.reference import outputs, shrink_of
from capibara.kernels.ops.layers.norm.rules import MOST_COLUMNS, sizes, sizes_of
from capibara.kernels.pallas.hopper import (
    REDUCTION_BYTES,
    SMEM_BYTES,
    Pieces,
    load,
    multiprocessors,
    named,
    refuses_chip,
    smem_bytes,
)
from capibara.kernels.pallas.scratch import scratch_bytes

THREADS = 128  # of a warpgroup
NARROW = 64  # columns of a line, where 128 do not divide a row
PIECE = 4096  # numbers handled at a time, at most: 32 a thread
MOST_PIECES = 16
REGISTER_COLUMNS = 4096  # up to so many, scale and bias stay in registers from row to row
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
class Cut(Pieces):
    """A row in pieces, of which a thread has `vector` numbers at a time."""

    vector: int

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.depth, self.width), vec_size=self.vector)

    def at(self, number: int) -> Any:
        return pl.ds(min(number * self.depth, self.lines - self.depth), self.depth)

    def once(self, number: int, terms: Any) -> Any:
        """A piece's terms of a sum along the row, without those that the piece before it has too."""
        if self.overlap == 0 or number < self.pieces - 1:
            return terms
        line = plgpu.broadcasted_iota(jnp.int32, (self.depth, self.width), 0, layout=self.layout)
        return jnp.where(line < self.overlap, 0.0, terms)


def overlaps(columns: int) -> bool:
    """Whether a row has no equal pieces for the threads."""
    return columns % THREADS == NARROW


def cut_row(columns: int, itemsize: int) -> Cut | None:
    """The widest vectors and then the largest pieces that divide a row; None where no cut is good."""
    if overlaps(columns):
        return _overlapping_cut(columns // NARROW, itemsize)
    width = 256 if columns % 256 == 0 else THREADS
    if columns % width:
        return None
    lines = columns // width

    def cut_in(depth: int) -> Cut:
        each = depth * width // THREADS
        return Cut(lines, width, depth, math.gcd(each, 16 // itemsize))

    depths = [d for d in range(1, PIECE // width + 1) if lines % d == 0]
    best = max((cut_in(d) for d in depths), key=lambda cut: (cut.vector, cut.depth))
    return best if best.pieces <= MOST_PIECES else None


def _overlapping_cut(lines: int, itemsize: int) -> Cut | None:
    """For an odd number of narrow lines: the least work, then the largest pieces; None where there is but one line."""

    def work(cut: Cut) -> float:
        # A number takes about as many instructions as two accesses to memory. Predicted, not read from a kernel.
        return cut.pieces * cut.depth * (2 + 1 / cut.vector)

    cuts = [
        Cut(lines, NARROW, depth, vector)
        for vector in (1, 2, 4, 8)
        for depth in range(2 * vector, min(lines, PIECE // NARROW) + 1, 2 * vector)
        if vector * itemsize <= 16
    ]
    few = [cut for cut in cuts if cut.pieces <= MOST_PIECES]
    return min(few, key=lambda cut: (work(cut), -cut.vector, -cut.depth), default=None)


def ring_scratch(sources: Sequence[Any], cut: Cut, stages: int) -> dict[str, Any]:
    """What a program allocates: `stages` rows of every source, and a barrier for each."""
    return {
        "arrived": plgpu.Barrier(num_arrivals=len(sources), num_barriers=stages),
        "buffers": [plgpu.SMEM((stages, cut.lines, cut.width), source.dtype) for source in sources],
    }


def ring_candidates(call: Call, sources: Sequence[str], programs: Sequence[int]) -> Sequence[RingConfig]:
    """`programs` a multiprocessor, the best guess first; each gets a ring that keeps enough on the way."""
    x = call.need("x")
    cut = cut_row(x.shape[-1], x.dtype.itemsize)
    if cut is None:
        return []
    present = [source for source in map(call.__getitem__, sources) if source is not None]
    row_bytes = scratch_bytes(ring_scratch(present, cut, 1))
    configs, cores = [], multiprocessors(call.target.device_kind)
    for count in dict.fromkeys(programs):
        for ahead in (AHEAD_BYTES, 2 * AHEAD_BYTES, RING_BYTES):
            stages = min(max(2, ahead // (count * row_bytes)), 16)
            ring = ring_scratch(present, cut, stages)
            fits = smem_bytes(ring, REDUCTION_BYTES) <= SMEM_BYTES
            if fits and count * scratch_bytes(ring) <= RING_BYTES:
                configs.append(RingConfig(count * cores, stages))
    return list(dict.fromkeys(configs))


def refuses_shape(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float16", "float32"):
            return f"it takes bfloat16, float16 and float32; {name} is {x.dtype.name}"
    groups, rows, columns = sizes_of(call)
    if 0 in (groups, rows):
        return "x is empty"
    if columns > MOST_COLUMNS:
        return f"it takes up to {MOST_COLUMNS} columns, not {columns}"
    if cut_row(columns, call.need("x").dtype.itemsize) is None:
        return f"it takes a multiple of 64 columns, 128 or more, that threads can share in few pieces; not {columns}"
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

    # In its own type, which may take half of the registers.
    registers = [read(number) for number in range(cut.pieces)] if cut.columns <= REGISTER_COLUMNS else None
    return lambda number: (read(number) if registers is None else registers[number]).astype(jnp.float32)


def programs_of_a_group(config: RingConfig, groups: int, rows: int) -> int:
    """Its share of those that run at a time, and no more than it has rows."""
    return max(1, min(rows, config.programs // groups))


def candidates(call: Call) -> Sequence[RingConfig]:
    columns = sizes_of(call).columns
    # A short row is soon done and its sums wait for each other, so more programs take turns: six took 0.90 of the
    # time of three at 5120 columns on an H200, and 0.97 at 8192.
    first = 8 if columns <= 4096 else 6 if columns <= 8192 else 3 if columns <= 16384 else 1
    return ring_candidates(call, ("x", "residual"), (first, max(1, first - 1), first + 2, 2 * first, 2, 1))


# Shorter rows wait for their sums longer than for their numbers.
FEWEST_COLUMNS = 512
FEW_ROWS = 128


def _ahead_of(call: Call) -> tuple[str, ...]:
    """What its model of times does not know. On an H200, beside xla's form, by the device's clock: 0.95 to 1.5 times as
    fast from 768 to 4096 columns; up to 8192 RMS norms 0.97 to 1.11 and layer norms 1.5; 1.3 to 2.0 with a residual,
    and 0.3 at 128 columns. Of 100 rows of 5120, 0.8."""
    n = sizes_of(call)
    few = n.rows < FEW_ROWS and n.columns > REGISTER_COLUMNS and call["residual"] is None
    return () if few or n.columns < FEWEST_COLUMNS else ("xla",)


def _program(
    *refs: Any, cut: Cut, config: RingConfig, rows: int, stride: int, kind: str, eps: float, offset: float,
    has: tuple[bool, bool, bool], summed: bool, stats: int,
) -> None:  # fmt: skip
    x_hbm, *rest = refs
    scale_hbm, bias_hbm, residual_hbm = (rest.pop(0) if present else None for present in has)
    y_hbm = rest.pop(0)
    sum_hbm = rest.pop(0) if summed else None
    stat_hbm = rest[:stats]
    sources = [x_hbm] if residual_hbm is None else [x_hbm, residual_hbm]
    shrink = shrink_of(eps)
    scratch = ring_scratch(sources, cut, config.stages)

    def _scoped(buffers: Any, arrived: Any) -> None:
        group, program = lax.axis_index("group"), lax.axis_index("program")
        first = group * rows + program
        count = lax.div(rows - program + (stride - 1), stride)
        wait, release = ring(sources, buffers, arrived, first, stride, count)

        scale, bias = (None if ref is None else vector_pieces(ref, group, cut) for ref in (scale_hbm, bias_hbm))

        def step(turn: Any, carry: None) -> None:
            row = first + turn * stride
            slot = wait(turn)

            def total(number: int) -> Any:
                """x + residual, as it is rounded."""
                value = load(buffers[0].at[slot, cut.at(number)], cut.layout)
                if residual_hbm is None:
                    return value
                other = load(buffers[1].at[slot, cut.at(number)], cut.layout)
                return (value.astype(jnp.float32) + other.astype(jnp.float32)).astype(x_hbm.dtype)

            def values(number: int) -> Any:
                return total(number).astype(jnp.float32)

            def mean_of(term: Any) -> Any:
                added = term(0)
                for number in range(1, cut.pieces):
                    added = added + cut.once(number, term(number))
                return jnp.sum(added) * (1 / cut.columns)

            mean = mean_of(values) if kind == "layer" else None

            def centred(number: int) -> Any:
                value = values(number)
                return value if mean is None else value - mean

            def square(number: int) -> Any:
                value = centred(number) * shrink
                return value * value

            rstd = lax.rsqrt(mean_of(square) + eps * shrink**2) * shrink
            for number in range(cut.pieces):
                if sum_hbm is not None:
                    sum_hbm.at[row, cut.at(number)][...] = total(number)
                y = centred(number) * rstd
                if scale is not None:
                    y = y * (scale(number) + offset)
                if bias is not None:
                    y = y + bias(number)
                y_hbm.at[row, cut.at(number)][...] = y.astype(y_hbm.dtype)
            for ref, statistic in zip(stat_hbm, [s for s in (mean, rstd) if s is not None], strict=False):
                ref[row] = statistic
            release(turn)
            return carry

        lax.fori_loop(0, count, step, None)

    pl.run_scoped(_scoped, **scratch)


def norm_forward(
    x: jax.Array, scale: jax.Array | None = None, bias: jax.Array | None = None, residual: jax.Array | None = None,
    *, config: RingConfig, kind: str, eps: float, offset: float, return_residual: bool, return_stats: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (groups, programs); see the module's text."""
    n = sizes(x, scale, bias)
    cut = cut_row(n.columns, x.dtype.itemsize)
    assert cut is not None  # refuses_shape has seen to it
    shape = (n.groups * n.rows, cut.lines, cut.width)
    operands = [x.reshape(shape)]
    operands += [v.reshape(n.groups, cut.lines, cut.width) for v in (scale, bias) if v is not None]
    if residual is not None:
        operands.append(residual.reshape(shape))
    stats = (2 if kind == "layer" else 1) if return_stats else 0
    summed = return_residual and residual is not None
    stride = programs_of_a_group(config, n.groups, n.rows)
    y, *rest = plgpu.kernel(
        named("norm", _program, cut=cut, config=config, rows=n.rows, stride=stride, kind=kind, eps=eps, offset=offset,
            has=(scale is not None, bias is not None, residual is not None), summed=summed, stats=stats,
        ),
        out_type=[out_struct(shape, x.dtype, x)] * (2 if summed else 1)
        + [out_struct(shape[:1], jnp.float32, x)] * stats,
        grid=(n.groups, stride),
        grid_names=("group", "program"),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    total = rest.pop(0).reshape(x.shape) if summed else x
    numbers = [v.reshape(x.shape[:-1]) for v in rest]
    mean, rstd = numbers if len(numbers) == 2 else (None, *numbers) if numbers else (None, None)
    return outputs(y.reshape(x.shape), total, mean, rstd, kind, return_residual, return_stats)


IMPLEMENTATION = Implementation(
    "hopper",
    norm_forward,
    platforms=("gpu",),
    refuses=refuses_shape,
    ahead_of=_ahead_of,
    kernel=True,
    config_type=RingConfig,
    candidates=candidates,
)
