"""The bodies of the codec's TPU kernels, for the two ways that numbers lie in a TPU's memory.

A matrix is kept in tiles of 8 rows and 128 lanes, and one line of numbers in registers of 1024. To make one of the
other moves every number, and for int8 the compiler writes it out register by register: it took 40 s for 64 MiB. So
there is a body for each:

- in rows: [rows, columns] as they are; a block is a run of columns;
- in a line: 128 lanes a row, which is how a line lies already; a block is a run of rows, read with a stride.

Both put the same lanes of many blocks under each other, a slice of 128 numbers of each block at a time. What a slice
goes through is common to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from capibara.kernels.ops.collective.compressed.reference import MOST, NOT_FINITE, codes_of, scales_of
from capibara.kernels.pallas import prng

LANES = 128
PART = 32  # blocks computed at a time: what fills a packed register of int8
TOGETHER = 4  # parts in one turn of a loop: one alone leaves most slots of an instruction empty
TURN = PART * TOGETHER

# A float32 of this size has no bits below one, so adding it rounds to the nearest, and halves to even; what was added
# is then in the low bits. A TPU v4 has no such instruction, and the usual form takes three times as many.
_ROUNDING = 1.5 * 2.0**23
_ROUNDING_BITS = 0x4B400000


def encode_slices(slices: Sequence[jax.Array], keys: Any) -> tuple[list[jax.Array], jax.Array]:
    """Codes as int32, slice by slice, and scales [n, 1], of float32 slices [n, 128] of n blocks."""
    # Not finite is what a difference with itself does not cancel: NaN and infinities alike.
    finite = [x - x == 0.0 for x in slices]
    values = [jnp.where(good, x, 0.0) for good, x in zip(finite, slices, strict=True)]
    scales = scales_of(functools.reduce(jnp.maximum, map(jnp.abs, values)).max(-1, keepdims=True))
    steps = 1.0 / scales
    columns = lax.broadcasted_iota(jnp.int32, slices[0].shape, 1)
    codes = []
    for number, (x, good) in enumerate(zip(values, finite, strict=True)):
        if keys is None:
            codes.append(jnp.where(good, _nearest(x * steps), NOT_FINITE))
        else:
            codes.append(codes_of(x * steps, good, prng.random_bits(keys, columns + number * LANES)))
    return codes, scales


def _nearest(steps: jax.Array) -> jax.Array:
    """The nearest whole number, as int32.

    The minimum changes nothing, for no rounding takes 127 to 128. Without it a CPU that emulates the kernel joins the
    product before it with the sum, which rounds once less than a TPU does.
    """
    return lax.bitcast_convert_type(jnp.minimum(steps, float(MOST)) + _ROUNDING, jnp.int32) - _ROUNDING_BITS


def decode_slice(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Float32 numbers of a slice of int32 codes [n, 128] and scales that broadcast against it."""
    return jnp.where(codes == NOT_FINITE, jnp.nan, codes.astype(jnp.float32) * scales)


def _keys(seed: Any, blocks: jax.Array) -> Any:
    return None if seed is None else prng.row_keys((seed[0], seed[1]), blocks)


def _column(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size, 1), 0)


# In rows.


def _each_block(blocks: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`step(block, carry)` over the blocks of a tile's rows, several a turn."""
    together = TOGETHER if blocks % TOGETHER == 0 else 1

    def turn(number: Any, carry: Any) -> Any:
        for i in range(together):
            carry = step(number * together + i, carry)
        return carry

    return lax.fori_loop(0, blocks // together, turn, carry)


def _slice_of(block: Any, size: int, number: int) -> Any:
    return pl.ds(pl.multiple_of(block * size + number * LANES, LANES), LANES)


def _inside(tiles: int, body: Callable[[], None]) -> None:
    """`body` where the step has a tile of its own: a register of scales may be the last, and have fewer."""
    pl.when(pl.program_id(1) * pl.num_programs(2) + pl.program_id(2) < tiles)(body)


def encode_rows(*refs: Any, block: int, blocks: int, blocks_a_row: int, seeded: bool) -> None:
    """Grid (rows, register of scales, tile): a tile is `blocks` blocks of each row, and fills as many of the lanes."""
    seed_ref, (x_ref, codes_ref, scales_ref) = (refs[0], refs[1:]) if seeded else (None, refs)
    lanes = lax.broadcasted_iota(jnp.int32, scales_ref.shape, 1)
    row = pl.program_id(0) * x_ref.shape[0] + _column(x_ref.shape[0])
    before, tile = pl.program_id(1) * LANES, pl.program_id(2)

    def step(at: Any, scales: jax.Array) -> jax.Array:
        places = [_slice_of(at, block, i) for i in range(block // LANES)]
        lane = tile * blocks + at
        keys = _keys(seed_ref, row * blocks_a_row + (before + lane))
        codes, found = encode_slices([x_ref[:, place].astype(jnp.float32) for place in places], keys)
        for place, made in zip(places, codes, strict=True):
            codes_ref[:, place] = made.astype(jnp.int8)
        return jnp.where(lanes == lane, found, scales)

    def body() -> None:
        found = jnp.where(tile == 0, 0.0, scales_ref[...])
        scales_ref[...] = _each_block(blocks, step, found)

    _inside(-(-blocks_a_row // blocks), body)


def decode_rows(codes_ref: Any, scales_ref: Any, x_ref: Any, *, block: int, blocks: int, blocks_a_row: int) -> None:
    """The same grid."""
    tile = pl.program_id(2)

    def body() -> None:
        scales = scales_ref[...]
        lanes = lax.broadcasted_iota(jnp.int32, scales.shape, 1)

        def step(at: Any, carry: None) -> None:
            # A sum of one number and zeros is that number: it is how a lane that is only known here is read.
            own = jnp.where(lanes == tile * blocks + at, scales, 0.0).sum(-1, keepdims=True)
            for i in range(block // LANES):
                place = _slice_of(at, block, i)
                x_ref[:, place] = decode_slice(codes_ref[:, place].astype(jnp.int32), own).astype(x_ref.dtype)
            return carry

        _each_block(blocks, step, None)

    _inside(-(-blocks_a_row // blocks), body)


# In a line.


def _each_turn(blocks: int, block: int, step: Callable[[Any, Any, Any], None]) -> None:
    """`step(first block, blocks, rows)` over a tile, 128 blocks a turn: where their scales are, and their numbers."""
    tall = block // LANES * TURN

    def turn(number: Any, carry: None) -> None:
        first = pl.multiple_of(number * TURN, TURN)
        step(first, pl.ds(first, TURN), pl.ds(pl.multiple_of(number * tall, tall), tall))
        return carry

    lax.fori_loop(0, blocks // TURN, turn, None)


def _parts(block: int) -> list[list[Any]]:
    """Where the slices of the blocks of each part are, in a turn's rows."""
    each = block // LANES
    return [[pl.ds(part * PART * each + i, PART, stride=each) for i in range(each)] for part in range(TOGETHER)]


def encode_line(*refs: Any, block: int, blocks: int, seeded: bool) -> None:
    """A tile of `blocks` blocks. Scales are a column here and lanes in memory, where a column is padded to 128."""
    seed_ref, refs = (refs[0], refs[1:]) if seeded else (None, refs)
    x_ref, codes_ref, scales_ref, numbers_ref, made_ref = refs
    lanes = lax.broadcasted_iota(jnp.int32, (PART, LANES), 1)
    before = pl.program_id(0) * blocks

    def step(first: Any, at: Any, rows: Any) -> None:
        numbers_ref[...] = x_ref[rows, :].astype(jnp.float32)
        found = jnp.zeros((1, LANES), jnp.float32)
        for part, places in enumerate(_parts(block)):
            own = _column(PART) + part * PART
            keys = _keys(seed_ref, before + first + own)
            codes, scales = encode_slices([numbers_ref[place, :] for place in places], keys)
            for place, made in zip(places, codes, strict=True):
                made_ref[place, :] = made
            # A column turned into lanes: each row keeps its own lane, and the others add nothing.
            found = found + jnp.where(lanes == own, scales, 0.0).sum(0, keepdims=True)
        codes_ref[rows, :] = made_ref[...].astype(jnp.int8)
        scales_ref[:, at] = found

    _each_turn(blocks, block, step)


def decode_line(
    codes_ref: Any, scales_ref: Any, x_ref: Any, numbers_ref: Any, made_ref: Any, *, block: int, blocks: int
) -> None:
    def step(first: Any, at: Any, rows: Any) -> None:
        made_ref[...] = codes_ref[rows, :].astype(jnp.int32)
        scales = jnp.broadcast_to(scales_ref[:, at], (LANES, TURN)).T
        for part, places in enumerate(_parts(block)):
            for place in places:
                numbers_ref[place, :] = decode_slice(made_ref[place, :], scales[part * PART : (part + 1) * PART])
        x_ref[rows, :] = numbers_ref[...].astype(x_ref.dtype)

    _each_turn(blocks, block, step)
