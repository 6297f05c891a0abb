"""The codec for the TPU, in Pallas (Mosaic): each number through VMEM once, in the order that it has in memory.

A TPU keeps a matrix in tiles of 8 rows and 128 lanes, and one line of numbers in registers of 1024. To make one of the
other moves every number, and for int8 the compiler writes it out register by register: it took 40 s for 64 MiB. So
there is a kernel for each. Both put the same lanes of many blocks under each other, a slice of 128 numbers of each
block at a time; what a slice goes through is common to them.

- In rows: [rows, columns] as they are, where there are eight rows or more; a block is a run of columns. Tiles have 32
  rows, what a packed register of int8 holds; the scales of 128 blocks are a register of lanes, and the tiles that fill
  one follow each other. All other steps of the grid may run in any order, so both cores of a v4 chip have half.
- In a line: 128 lanes a row, which is how a line lies already; a block is a run of rows, read with a stride.

Two leading axes or more are one where that leaves the float32 numbers where they are. What is left, a matrix of few
rows among it, is laid out as a line first, which XLA writes out register by register. So calls for which anything is
copied are taken by name only (`in_order`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation, describe
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.collective.compressed.reference import MOST, NOT_FINITE, codes_of, scales_of
from capibara.kernels.ops.collective.compressed.rules import block_of
from capibara.kernels.pallas import prng, vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES = 128
LIVE = 6  # copies of a part, 32 bits a number, that may be alive at once: values, steps, draws, codes, masks
COMPILED = 256  # the largest block that the TPU compiler was asked about
SUBLANES = 8
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
        codes, own = encode_slices([x_ref[:, place].astype(jnp.float32) for place in places], keys)
        for place, code in zip(places, codes, strict=True):
            codes_ref[:, place] = code.astype(jnp.int8)
        return jnp.where(lanes == lane, own, scales)

    def body() -> None:
        scales = jnp.where(tile == 0, 0.0, scales_ref[...])
        scales_ref[...] = _each_block(blocks, step, scales)

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
    x_ref, codes_ref, scales_ref, numbers_ref, wide_codes_ref = refs
    lanes = lax.broadcasted_iota(jnp.int32, (PART, LANES), 1)
    before = pl.program_id(0) * blocks

    def step(first: Any, at: Any, rows: Any) -> None:
        numbers_ref[...] = x_ref[rows, :].astype(jnp.float32)
        scale_lanes = jnp.zeros((1, LANES), jnp.float32)
        for part, places in enumerate(_parts(block)):
            own = _column(PART) + part * PART
            keys = _keys(seed_ref, before + first + own)
            codes, scales = encode_slices([numbers_ref[place, :] for place in places], keys)
            for place, code in zip(places, codes, strict=True):
                wide_codes_ref[place, :] = code
            # A column turned into lanes: each row keeps its own lane, and the others add nothing.
            scale_lanes = scale_lanes + jnp.where(lanes == own, scales, 0.0).sum(0, keepdims=True)
        codes_ref[rows, :] = wide_codes_ref[...].astype(jnp.int8)
        scales_ref[:, at] = scale_lanes

    _each_turn(blocks, block, step)


def decode_line(
    codes_ref: Any, scales_ref: Any, x_ref: Any, numbers_ref: Any, wide_codes_ref: Any, *, block: int, blocks: int
) -> None:
    def step(first: Any, at: Any, rows: Any) -> None:
        wide_codes_ref[...] = codes_ref[rows, :].astype(jnp.int32)
        scales = jnp.broadcast_to(scales_ref[:, at], (LANES, TURN)).T
        for part, places in enumerate(_parts(block)):
            for place in places:
                numbers_ref[place, :] = decode_slice(wide_codes_ref[place, :], scales[part * PART : (part + 1) * PART])
        x_ref[rows, :] = numbers_ref[...].astype(x_ref.dtype)

    _each_turn(blocks, block, step)


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Blocks of a tile; of a matrix, a 32nd of them in each of 32 rows."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < TURN or self.rows % TURN:
            raise rule_error(f"rows is a positive multiple of {TURN}", self, "use rows=512")


def in_rows(shape: Sequence[int]) -> bool:
    """Whether the numbers are taken as a matrix: rows fill a register, and leading axes are one in float32's tiles."""
    return len(shape) > 1 and math.prod(shape[:-1]) >= SUBLANES and (len(shape) == 2 or shape[-2] % SUBLANES == 0)


def in_order(shape: Sequence[int]) -> bool:
    """Whether numbers and codes stay where they are: as a matrix, or as the one line that they are.

    Codes lie in tiles of 32 rows, so rows under a leading axis are one with it, without a copy, where they fill those.
    """
    whole_tiles = len(shape) == 2 or (len(shape) > 2 and shape[-2] % PART == 0)
    return math.prod(shape[:-1]) == 1 or (in_rows(shape) and whole_tiles)


def _numbers(call: Call) -> jax.ShapeDtypeStruct:
    """What is encoded, or its codes."""
    numbers = call.args[0]
    assert numbers is not None
    return numbers


def candidates(call: Call) -> Sequence[TileConfig]:
    numbers, block = _numbers(call), block_of(call)
    dtype = numbers.dtype if "seed" in call.op.operands else jnp.float32  # decoding, as if to float32

    def fits(config: TileConfig) -> bool:
        layout = _layout(numbers.shape, block, config)
        blocks = [(layout.tile, dtype), (layout.tile, jnp.int8), (layout.scale_tile, jnp.float32)]
        return vmem_bytes(blocks, layout.scratch) + 4 * LIVE * PART * block <= vmem.limit(call)

    tiled = math.ceil(numbers.size // block / TURN) * TURN
    # Half a mebibyte of numbers hides what a step of the grid costs.
    configs = [TileConfig(n) for n in (512, 1024, 256, 128) if n <= tiled]
    return [config for config in configs if fits(config)]


def refuses(call: Call) -> str | None:
    numbers, block = _numbers(call), block_of(call)
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and x.dtype.name not in ("bfloat16", "float32", "int8", "uint32", "int32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {x.dtype.name}"
    if str(call.params.get("out_dtype", "float32")) not in ("bfloat16", "float32"):
        return f"a TPU's vector units make bfloat16 and float32, not {call.params['out_dtype']}"
    if block % LANES:
        return f"a block fills whole registers, of {LANES} lanes; this one has {block} values"
    if numbers.shape[-1] % block:
        return f"it takes whole blocks; the last of {describe(numbers)} in blocks of {block} is shorter"
    if not numbers.size:
        return "there are no numbers"
    if not candidates(call):
        return f"a tile of blocks of {block} does not fit the core's VMEM"
    return None


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the kernel sees the numbers: shapes, tiles, and where a step of the grid finds its own."""

    numbers: tuple[int, int]
    scales: tuple[int, int]
    tile: pl.BlockSpec
    scale_tile: pl.BlockSpec
    grid: tuple[int, ...]
    parallel: int
    """Leading axes of the grid whose steps may run in any order."""
    static: dict[str, int]
    """What the body knows of it."""
    scratch: tuple[Any, ...] = ()
    rows: bool = False


def _layout(shape: tuple[int, ...], block: int, config: TileConfig) -> _Layout:
    return (_matrix if in_rows(shape) else _line)(shape, block, config)


def _matrix(shape: tuple[int, ...], block: int, config: TileConfig) -> _Layout:
    height, width = math.prod(shape[:-1]), shape[-1]
    if LANES % (config.rows // PART):
        raise rule_error(
            f"Tiles of a matrix fill a register of {LANES} scales", config, "use TileConfig(rows=512), or 128, 256, ..."
        )
    of_row = width // block
    lanes = min(of_row, LANES)
    rows, blocks = min(height, PART), min(config.rows // PART, lanes)
    steps, tiles = math.ceil(lanes / blocks), math.ceil(of_row / blocks)
    return _Layout(
        (height, width),
        (height, of_row),
        # The last register may have fewer tiles: there the last tile stays.
        pl.BlockSpec((rows, blocks * block), lambda i, j, s: (i, jnp.minimum(j * steps + s, tiles - 1))),
        pl.BlockSpec((rows, lanes), lambda i, j, s: (i, j)),
        (math.ceil(height / rows), math.ceil(of_row / lanes), steps),
        2,
        {"block": block, "blocks": blocks, "blocks_a_row": of_row},
        rows=True,
    )


def _line(shape: tuple[int, ...], block: int, config: TileConfig) -> _Layout:
    # A few blocks are filled up to the smallest tile; more are left as they are, and the last tile may be cut.
    count, each = max(math.prod(shape) // block, TURN), block // LANES
    return _Layout(
        (count * each, LANES),
        (1, count),
        pl.BlockSpec((config.rows * each, LANES), lambda i: (i, 0)),
        pl.BlockSpec((1, config.rows), lambda i: (0, i)),
        (math.ceil(count / config.rows),),
        1,
        {"block": block, "blocks": config.rows},
        scratch=tuple(pltpu.VMEM((TURN * each, LANES), kind) for kind in (jnp.float32, jnp.int32)),
    )


def _laid_out(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    missing = math.prod(shape) - x.size
    return (jnp.pad(x.reshape(-1), (0, missing)) if missing else x).reshape(shape)


def _restored(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    return (x.reshape(-1)[:size] if size != x.size else x).reshape(shape)


def _call(body: Any, name: str, layout: _Layout, specs: list[Any], out_shape: Any, out_specs: Any) -> Any:
    others = len(layout.grid) - layout.parallel
    semantics: Any = ("parallel",) * layout.parallel + ("arbitrary",) * others
    return pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=layout.grid,
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=layout.scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=current_interpret().pallas_argument(),
        name=name,
    )


def encode(
    x: jax.Array, seed: jax.Array | None = None, *, config: TileConfig, block: int
) -> tuple[jax.Array, jax.Array]:
    """One Pallas call over tiles of blocks; see the module's text."""
    layout = _layout(x.shape, block, config)
    body = functools.partial(encode_rows if layout.rows else encode_line, seeded=seed is not None, **layout.static)
    operands, specs = [_laid_out(x, layout.numbers)], [layout.tile]
    if seed is not None:
        operands.insert(0, lax.bitcast_convert_type(seed, jnp.int32))
        specs.insert(0, pl.BlockSpec(memory_space=pltpu.SMEM))
    outs = [out_struct(layout.numbers, jnp.int8, x), out_struct(layout.scales, jnp.float32, x)]
    call = _call(body, "capibara_encode_int8", layout, specs, outs, [layout.tile, layout.scale_tile])
    codes, scales = call(*operands)
    return _restored(codes, x.shape), _restored(scales, (*x.shape[:-1], x.shape[-1] // block))


def decode(codes: jax.Array, scales: jax.Array, *, config: TileConfig, block: int, out_dtype: str) -> jax.Array:
    """One Pallas call over tiles of blocks; see the module's text."""
    layout = _layout(codes.shape, block, config)
    body = functools.partial(decode_rows if layout.rows else decode_line, **layout.static)
    out = out_struct(layout.numbers, jnp.dtype(out_dtype), codes)
    call = _call(body, "capibara_decode_int8", layout, [layout.tile, layout.scale_tile], out, layout.tile)
    numbers = call(_laid_out(codes, layout.numbers), _laid_out(scales.astype(jnp.float32), layout.scales))
    return _restored(numbers, codes.shape)


def _beyond_evidence(call: Call) -> str | None:
    """Where something has to be moved for the kernel, or blocks are larger than any that was compiled.

    Two rows, which are moved, take more bundles than XLA's form already for 65 blocks (1,641 and 959), and so do the
    codes of [8, 8, 512] (248 and 166).
    """
    if not in_order(_numbers(call).shape):
        return f"{describe(_numbers(call))} would be copied into another order for the kernel"
    if block_of(call) > COMPILED:
        return f"the TPU compiler was asked about blocks of up to {COMPILED}"
    return None


def _implementation(fn: Any) -> Implementation:
    return Implementation(
        "pallas_tpu",
        fn,
        platforms=("tpu",),
        refuses=refuses,
        beyond_evidence=_beyond_evidence,
        kernel=True,
        config_type=TileConfig,
        candidates=candidates,
    )


ENCODE = _implementation(encode)
DECODE = _implementation(decode)
