"""A chunk's logits into their gradient on Hopper, in Pallas (Mosaic GPU): both passes over a row by one program.

A program has a multiprocessor to itself and takes every so many rows. The copy engine fills a ring of pieces of a row
in shared memory and runs ahead, so that memory is busy while a row is worked on.

A row that fits the ring, with the beginning of the next, is read once: its maximum is known when the last piece has
arrived, its exponentials are put in its place, and what they are a share of is known after those.

Of a longer row the maximum and the sum go along with the pieces, and a second pass makes the gradient. That begins with
what the ring still holds and goes backwards, from what was read last, which is in the chip's cache, to what was read
first. The next row's first pieces follow in the order in which slots become free: in each round of the ring the last
piece comes first.

XLA takes two passes over memory, and its reduction of several sums at once reads at half of the memory's rate (2.2 TB/s
on an H200).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.cross_entropy.rules import sizes_of
from capibara.kernels.pallas.hopper import (
    REDUCTION_BYTES,
    SMEM_BYTES,
    Pieces,
    load,
    multiprocessors,
    named,
    refuses_chip,
)

THREADS = 128  # of a warpgroup
WIDTHS = (256, 128, 64)  # columns of a line
PIECE = 8192  # columns of a piece, at most: 64 numbers a thread
VECTOR = 4  # neighbouring columns of a thread
MOST_SLOTS = 32  # barriers that one array of them has
RING_BYTES = SMEM_BYTES - REDUCTION_BYTES - 1024  # and barriers
LOWEST = -1e30  # the maximum of nothing: finite, so that no difference of two maxima is a NaN
# Memory is either read or written, and what is handed back waits for all threads: the barriers that Pallas would put
# around every store are not needed.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class Ring(Pieces):
    """A row in pieces, for which shared memory has so many slots. Lines that two pieces have in common have one share
    in the sums, and are written twice, the same."""

    slots: int

    @property
    def holds_a_row(self) -> bool:
        """And a part of the next."""
        return self.slots > self.pieces


def ring_of(vocabulary: int) -> Ring | None:
    """Pieces of nearly one size, as large as they may be; None of a row that is no whole number of lines.

    >>> [ring_of(size) for size in (32000, 151936, 50257)]
    [Ring(lines=125, width=256, depth=32, slots=7), Ring(lines=1187, width=128, depth=64, slots=7), None]
    """
    width = next((width for width in WIDTHS if vocabulary % width == 0), None)
    if width is None:
        return None
    lines, unit = vocabulary // width, THREADS * VECTOR // width
    pieces = pl.cdiv(vocabulary, PIECE)
    depth = min(pl.cdiv(pl.cdiv(lines, pieces), unit), lines // unit) * unit
    if not depth:
        return None
    return Ring(lines, width, depth, min(MOST_SLOTS, RING_BYTES // (4 * width * depth)))


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if call.need("hidden").dtype.itemsize != 2:
        return f"it takes operands of 16 bits, not {call.need('hidden').dtype.name}"
    for name in ("soft_cap", "narrow"):
        if call.params[name]:
            return f"it has no {name}"
    size = sizes_of(call).vocabulary
    if not sizes_of(call).tokens:
        return "there are no tokens"
    if ring_of(size) is None:
        return f"a row of logits is cut into lines of {WIDTHS[-1]}, and has {THREADS * VECTOR} or more: not {size}"
    return None


def logit_rows(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, *, words: int, label_smoothing: float, z_loss: float,
    dtype: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """(each row's lse, its label's logit[, the sum of its logits], the gradient of the logits in `dtype`).

    Args:
      logits: float32 [rows, columns].
      labels: [rows]; one that is no column has a logit of 0.
      weights: float32 [rows], what each row's loss is multiplied by.
      words: of the vocabulary, which smoothing spreads a share over.
      label_smoothing, z_loss: of the loss; the sums have a third where the first is not 0.
    """
    rows, columns = logits.shape
    ring = ring_of(columns)
    assert ring is not None  # `refuses` has seen to it
    lines = (rows, ring.lines, ring.width)
    numbers = 3 if label_smoothing else 2
    programs = min(rows, multiprocessors(current_target().device_kind))
    lse, picked, *total, flow = plgpu.kernel(
        named("cross_entropy_rows", _program, ring=ring, rows=rows, programs=programs, words=words,
            label_smoothing=label_smoothing, z_loss=z_loss,
        ),
        out_type=[out_struct((rows,), jnp.float32, logits)] * numbers + [out_struct(lines, dtype, logits)],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(logits.reshape(lines), logits, labels.astype(jnp.int32), weights)  # fmt: skip
    return lse, picked, *total, flow.reshape(rows, columns)


def _program(
    lines_hbm: Any, logits_hbm: Any, labels_hbm: Any, weights_hbm: Any, *outputs: Any, ring: Ring, rows: int,
    programs: int, words: int, label_smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    *numbers_hbm, flow_hbm = outputs
    shape, layout = (ring.depth, ring.width), plgpu.Layout.WG_STRIDED((ring.depth, ring.width), vec_size=VECTOR)
    smooth = bool(label_smoothing)

    def filled(value: float) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def first_line(piece: Any) -> Any:
        return jnp.minimum(piece * ring.depth, ring.lines - ring.depth)

    def _scoped(buffer: Any, arrived: Any) -> None:
        first = lax.axis_index("program")
        count = lax.div(rows - first + (programs - 1), programs)
        line, place = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))
        column = line * ring.width + place

        def once(piece: Any, terms: Any) -> Any:
            """A piece's terms of a sum, without those that the piece before it has too."""
            if ring.overlap == 0:
                return terms
            return jnp.where(line < jnp.where(piece == ring.pieces - 1, ring.overlap, 0), 0.0, terms)

        def fetch(turn: Any, piece: Any, slot: Any) -> None:
            source = lines_hbm.at[first + turn * programs, pl.ds(first_line(piece), ring.depth)]
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], arrived.at[slot])

        def tell(row: Any, lse: Any, total: Any, all_logits: Any) -> Callable[[Any, Any], None]:
            """Write the row's numbers; what makes a piece's gradient of its exponentials, which sum up to `total`."""
            label, weight = labels_hbm[row], weights_hbm[row]
            is_column = (label >= 0) & (label < ring.columns)
            picked = jnp.where(is_column, logits_hbm[row, jnp.clip(label, 0, ring.columns - 1)], 0.0)
            numbers = [lse, picked, *([all_logits] if smooth else [])]
            for ref, number in zip(numbers_hbm, numbers, strict=True):
                ref[row] = number
            share = weight * (1 + 2 * z_loss * lse) / total
            of_picked, of_all = weight * -(1 - label_smoothing), weight * (-label_smoothing / words)

            def write(piece: Any, exponentials: Any) -> None:
                flow = exponentials * share
                flow = jnp.where(column == label - first_line(piece) * ring.width, flow + of_picked, flow)
                flow = flow + of_all if smooth else flow
                flow_hbm.at[row, pl.ds(first_line(piece), ring.depth)][...] = flow.astype(flow_hbm.dtype)
                plgpu.commit_smem()  # every thread has read the slot before the copy engine may write it

            return write

        def short_row(turn: Any, carry: None) -> None:
            start = turn * ring.pieces

            def slot_of(piece: Any) -> Any:
                return lax.rem(start + piece, ring.slots)

            def arrive(piece: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
                slot = slot_of(piece)
                plgpu.barrier_wait(arrived.at[slot])
                value = load(buffer.at[slot], layout)
                return jnp.maximum(found[0], value), *(x + once(piece, value) for x in found[1:])

            found = lax.fori_loop(0, ring.pieces, arrive, (filled(LOWEST), *([filled(0.0)] if smooth else [])))
            highest = jnp.max(found[0])

            def exponentials(piece: Any, added: Any) -> Any:
                slot = slot_of(piece)
                value = jnp.exp(load(buffer.at[slot], layout) - highest)
                buffer.at[slot][...] = value
                return added + once(piece, value)

            total = jnp.sum(lax.fori_loop(0, ring.pieces, exponentials, filled(0.0)))
            all_logits = jnp.sum(found[1]) if smooth else None
            write = tell(first + turn * programs, highest + jnp.log(total), total, all_logits)

            def leave(piece: Any, carry: None) -> None:
                write(piece, load(buffer.at[slot_of(piece)], layout))
                fetch_number(start + piece + ring.slots)
                return carry

            lax.fori_loop(0, ring.pieces, leave, None)

        def fetch_number(number: Any) -> None:
            """The piece of this number, over all rows of the program, one after another."""
            turn = lax.div(number, ring.pieces)
            pl.when(turn < count)(lambda: fetch(turn, lax.rem(number, ring.pieces), lax.rem(number, ring.slots)))

        def long_row(turn: Any, carry: None) -> None:
            def arrive(step: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
                begin = lax.div(step, ring.slots) * ring.slots
                # The last piece of a round of the ring comes first.
                piece = 2 * begin + jnp.minimum(ring.slots, ring.pieces - begin) - 1 - step
                slot = lax.rem(piece, ring.slots)
                plgpu.barrier_wait(arrived.at[slot])
                value = load(buffer.at[slot], layout)
                highest = jnp.maximum(found[0], jnp.max(value))
                total = found[1] * jnp.exp(found[0] - highest) + once(piece, jnp.exp(value - highest))
                sums = tuple(x + once(piece, value) for x in found[2:])

                @pl.when(piece + ring.slots < ring.pieces)
                def _next() -> None:
                    plgpu.commit_smem()
                    fetch(turn, piece + ring.slots, slot)

                return highest, total, *sums

            nothing = (jnp.float32(LOWEST), filled(0.0), *([filled(0.0)] if smooth else []))
            highest, totals, *sums = lax.fori_loop(0, ring.pieces, arrive, nothing)
            total = jnp.sum(totals)
            all_logits = jnp.sum(sums[0]) if smooth else None
            write = tell(first + turn * programs, highest + jnp.log(total), total, all_logits)

            def leave(step: Any, carry: None) -> None:
                piece = ring.pieces - 1 - step
                slot = lax.rem(piece, ring.slots)
                pl.when(piece < ring.pieces - ring.slots)(lambda: plgpu.barrier_wait(arrived.at[slot]))
                write(piece, jnp.exp(load(buffer.at[slot], layout) - highest))
                pl.when(piece >= ring.slots)(lambda: fetch(turn, piece - ring.slots, slot))
                pl.when((piece < ring.slots) & (turn + 1 < count))(lambda: fetch(turn + 1, piece, slot))
                return carry

            lax.fori_loop(0, ring.pieces, leave, None)

        if ring.holds_a_row:
            for number in range(ring.slots):
                fetch_number(jnp.int32(number))
        else:
            for piece in reversed(range(ring.slots)):
                fetch(0, piece, piece)
        lax.fori_loop(0, count, short_row if ring.holds_a_row else long_row, None)

    pl.run_scoped(
        _scoped,
        buffer=plgpu.SMEM((ring.slots, ring.depth, ring.width), jnp.float32),
        arrived=plgpu.Barrier(num_barriers=ring.slots),
    )
