"""The codec for the TPU, in Pallas (Mosaic): each number through VMEM once, in the order that it has in memory.

A matrix of eight rows or more is taken as it is, in tiles of 32 rows, what a packed register of int8 holds; the scales
of 128 blocks are a register of lanes, and the tiles that fill one follow each other. One line of numbers is taken as
rows of 128, which is the order it has. All other steps of the grid may run in any order, so both cores of a v4 chip
have half. Two leading axes or more are one where that leaves the float32 numbers where they are. What is left, a matrix
of few rows among it, is laid out as a line first, which XLA writes out register by register. So calls for which
anything is copied are taken by name only (`in_order`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
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
from capibara.kernels.ops.collective.compressed import pallas_tpu_bodies as bodies
from capibara.kernels.ops.collective.compressed.pallas_tpu_bodies import LANES, PART, TURN
from capibara.kernels.ops.collective.compressed.rules import block_of
from capibara.kernels.pallas import vmem

SUBLANES = 8
COMPILED = 256  # the largest block that the TPU compiler was asked about
LIVE = 6  # copies of a part, 32 bits a number, that may be alive at once: values, steps, draws, codes, masks


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
    wide = numbers.dtype.itemsize if "seed" in call.op.operands else 4
    free = vmem.limit(call) - 4 * LIVE * PART * block
    # Two of every tile are kept: numbers, codes, and scales.
    each = 2 * (wide + 1) * block
    if in_rows(numbers.shape):
        free -= 2 * 4 * PART * LANES
    else:  # a turn of the loop is copied twice, and scales are one row of eight
        free -= 2 * 4 * TURN * block
        each += 2 * 4 * SUBLANES
    most = free // each
    tiled = math.ceil(numbers.size // block / TURN) * TURN
    # Half a mebibyte of numbers hides what a step of the grid costs.
    return [TileConfig(n) for n in (512, 1024, 256, 128) if n <= min(most, tiled)]


def refuses(call: Call) -> str | None:
    numbers, block = _numbers(call), block_of(call)
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and given.dtype.name not in ("bfloat16", "float32", "int8", "uint32", "int32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {given.dtype.name}"
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


def _as_given(made: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    return (made.reshape(-1)[:size] if size != made.size else made).reshape(shape)


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
    body = functools.partial(
        bodies.encode_rows if layout.rows else bodies.encode_line, seeded=seed is not None, **layout.static
    )
    operands, specs = [_laid_out(x, layout.numbers)], [layout.tile]
    if seed is not None:
        operands.insert(0, lax.bitcast_convert_type(seed, jnp.int32))
        specs.insert(0, pl.BlockSpec(memory_space=pltpu.SMEM))
    made = [out_struct(layout.numbers, jnp.int8, x), out_struct(layout.scales, jnp.float32, x)]
    call = _call(body, "capibara_encode_int8", layout, specs, made, [layout.tile, layout.scale_tile])
    codes, scales = call(*operands)
    return _as_given(codes, x.shape), _as_given(scales, (*x.shape[:-1], x.shape[-1] // block))


def decode(codes: jax.Array, scales: jax.Array, *, config: TileConfig, block: int, out_dtype: str) -> jax.Array:
    """One Pallas call over tiles of blocks; see the module's text."""
    layout = _layout(codes.shape, block, config)
    body = functools.partial(bodies.decode_rows if layout.rows else bodies.decode_line, **layout.static)
    made = out_struct(layout.numbers, jnp.dtype(out_dtype), codes)
    call = _call(body, "capibara_decode_int8", layout, [layout.tile, layout.scale_tile], made, layout.tile)
    numbers = call(_laid_out(codes, layout.numbers), _laid_out(scales.astype(jnp.float32), layout.scales))
    return _as_given(numbers, codes.shape)


def _rank(call: Call) -> int:
    """Above XLA's 10 by the TPU compiler's own count for 64 MiB, where nothing has to be moved for the kernel.

    XLA's form moves nine times the bytes to encode and over four times to decode. Two rows, which are moved, take more
    bundles than XLA's form already for 65 blocks (1,641 and 959), and so do the codes of [8, 8, 512] (248 and 166).
    Neither has been timed on a TPU. Of larger blocks none was compiled.
    """
    return 15 if block_of(call) <= COMPILED and in_order(_numbers(call).shape) else 5


def _remark(call: Call) -> str:
    if not in_order(_numbers(call).shape):
        return f"{describe(_numbers(call))} would be copied into another order for the kernel"
    if block_of(call) > COMPILED:
        return f"the TPU compiler was asked about blocks of up to {COMPILED}"
    return "by the TPU compiler's count it moves each number once, and XLA's form several times"


def _implementation(fn: Any) -> Implementation:
    return Implementation(
        "pallas_tpu",
        fn,
        platforms=("tpu",),
        refuses=refuses,
        rank=_rank,
        remark=_remark,
        kernel=True,
        config_type=TileConfig,
        default_config=lambda call: candidates(call)[0],
        candidates=candidates,
    )


ENCODE = _implementation(encode)
DECODE = _implementation(decode)
