"""The codec for the TPU, in Pallas (Mosaic): a row a block, each number through VMEM once.

The grid is over tiles of blocks, all parallel, so both cores of a v4 chip have half. A loop takes 32 rows at a time,
what fills a packed register of int8. Scales travel as lanes: a column of one number a row would be padded to 128 in
memory.
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
from capibara.kernels import prng, vmem
from capibara.kernels.collective.compressed.reference import NOT_FINITE, codes_of, scales_of
from capibara.kernels.collective.compressed.rules import block_of
from capibara.kernels.context import current_interpret
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct

LANES = 128
CHUNK = 32  # rows computed at a time
LIVE = 6  # copies of a chunk, 32 bits a number, that may be alive at once: values, steps, draws, codes, masks


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Blocks of a tile."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < LANES or self.rows % LANES:
            raise rule_error(f"rows is a positive multiple of {LANES}", self, "use rows=512")


def candidates(call: Call) -> Sequence[TileConfig]:
    block = block_of(call)
    wide = call.args[0].dtype.itemsize if "seed" in call.op.operands else 4  # type: ignore[union-attr]
    free = vmem.limit(call) - 4 * LIVE * CHUNK * block
    # Two of every tile are kept; a scale passes through a scratch of one row of lanes.
    most = free // (2 * (wide + 1) * block + 4 * LANES + 2 * 8 * 4)
    rows = math.ceil(_blocks(call) / LANES) * LANES
    # Half a mebibyte of numbers hides what a step of the grid costs.
    return [TileConfig(n) for n in (512, 1024, 256, 128) if n <= most and n <= rows]


def _blocks(call: Call) -> int:
    numbers = call.args[0]
    assert numbers is not None
    return numbers.size // block_of(call)


def refuses(call: Call) -> str | None:
    numbers, block = call.args[0], block_of(call)
    assert numbers is not None
    for name, given in zip(call.op.operands, call.args, strict=True):
        if given is not None and given.dtype.name not in ("bfloat16", "float32", "int8", "uint32", "int32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {given.dtype.name}"
    if str(call.params.get("out_dtype", "float32")) not in ("bfloat16", "float32"):
        return f"a TPU's vector units make bfloat16 and float32, not {call.params['out_dtype']}"
    if block % LANES or numbers.shape[-1] % block:
        return (
            f"a block is a row of whole registers, of {LANES} lanes; blocks of {block} of {numbers.shape[-1]} are not"
        )
    if not numbers.size:
        return "there are no numbers"
    if not candidates(call):
        return f"{LANES} blocks of {block} do not fit the core's VMEM"
    return None


def _chunks(config: TileConfig, step: Any) -> None:
    def turn(number: Any, carry: None) -> None:
        step(pl.multiple_of(number * CHUNK, CHUNK))
        return carry

    lax.fori_loop(0, config.rows // CHUNK, turn, None)


def _encode_body(*refs: Any, config: TileConfig, seeded: bool) -> None:
    seed_ref, (x_ref, codes_ref, scales_ref, column_ref) = (refs[0], refs[1:]) if seeded else (None, refs)
    first = pl.program_id(0) * config.rows

    def step(start: Any) -> None:
        at = pl.ds(start, CHUNK)
        values = x_ref[at, :].astype(jnp.float32)
        # Not finite is what a difference with itself does not cancel: NaN and infinities alike.
        finite = values - values == 0.0
        values = jnp.where(finite, values, 0.0)
        scales = scales_of(jnp.abs(values).max(-1, keepdims=True))
        bits = None
        if seed_ref is not None:
            rows = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) + (first + start)
            keys = prng.row_keys((seed_ref[0], seed_ref[1]), rows)
            bits = prng.random_bits(keys, lax.broadcasted_iota(jnp.int32, values.shape, 1))
        codes_ref[at, :] = codes_of(values * (1.0 / scales), finite, bits).astype(jnp.int8)
        column_ref[at, :] = jnp.broadcast_to(scales, (CHUNK, LANES))

    _chunks(config, step)
    scales_ref[...] = column_ref[...].T[:1, :]


def _decode_body(codes_ref: Any, scales_ref: Any, x_ref: Any, column_ref: Any, *, config: TileConfig) -> None:
    column_ref[...] = jnp.broadcast_to(scales_ref[...], (LANES, config.rows)).T

    def step(start: Any) -> None:
        at = pl.ds(start, CHUNK)
        codes = codes_ref[at, :].astype(jnp.int32)
        values = codes.astype(jnp.float32) * column_ref[at, :][:, :1]
        x_ref[at, :] = jnp.where(codes == NOT_FINITE, jnp.nan, values).astype(x_ref.dtype)

    _chunks(config, step)


def _call(body: Any, name: str, config: TileConfig, blocks: int, block: int, like: jax.Array, *, into: Any) -> Any:
    """The Pallas call over tiles; `into` is the type of the numbers for decoding, None for encoding."""
    tile = pl.BlockSpec((config.rows, block), lambda i: (i, 0))
    lanes = pl.BlockSpec((1, config.rows), lambda i: (0, i))
    numbers = out_struct((blocks, block), jnp.int8 if into is None else into, like)
    scales = out_struct((1, blocks), jnp.float32, like)
    return functools.partial(
        pl.pallas_call,
        body,
        out_shape=numbers if into is not None else [numbers, scales],
        grid=(math.ceil(blocks / config.rows),),
        out_specs=tile if into is not None else [tile, lanes],
        scratch_shapes=[pltpu.VMEM((config.rows, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=current_interpret().pallas_argument(),
        name=name,
    ), [tile] if into is None else [tile, lanes]


def _a_tile(x: jax.Array, axis: int) -> jax.Array:
    """A few blocks filled up to the smallest tile; more are left as they are, and the last tile may be cut."""
    missing = max(LANES - x.shape[axis], 0)
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(2)]) if missing else x


def encode(
    x: jax.Array, seed: jax.Array | None = None, *, config: TileConfig, block: int
) -> tuple[jax.Array, jax.Array]:
    """One Pallas call over tiles of blocks; see the module's text."""
    count = x.size // block
    operands = [_a_tile(x.reshape(count, block), 0)]
    blocks = operands[0].shape[0]
    body = functools.partial(_encode_body, config=config, seeded=seed is not None)
    call, specs = _call(body, "capibara_encode_int8", config, blocks, block, x, into=None)
    if seed is not None:
        operands.insert(0, lax.bitcast_convert_type(seed, jnp.int32))
        specs.insert(0, pl.BlockSpec(memory_space=pltpu.SMEM))
    codes, scales = call(in_specs=specs)(*operands)
    return codes[:count].reshape(x.shape), scales[0, :count].reshape(*x.shape[:-1], x.shape[-1] // block)


def decode(codes: jax.Array, scales: jax.Array, *, config: TileConfig, block: int, out_dtype: str) -> jax.Array:
    """One Pallas call over tiles of blocks; see the module's text."""
    count = codes.size // block
    rows = _a_tile(codes.reshape(count, block), 0)
    lanes = _a_tile(scales.astype(jnp.float32).reshape(1, count), 1)
    body = functools.partial(_decode_body, config=config)
    call, specs = _call(body, "capibara_decode_int8", config, rows.shape[0], block, codes, into=jnp.dtype(out_dtype))
    return call(in_specs=specs)(rows, lanes)[:count].reshape(codes.shape)


def _implementation(fn: Any) -> Implementation:
    return Implementation(
        "pallas_tpu",
        fn,
        platforms=("tpu",),
        refuses=refuses,
        rank=lambda call: 5,  # below XLA, which fuses it with its neighbours, until it has been timed
        kernel=True,
        config_type=TileConfig,
        default_config=lambda call: candidates(call)[0],
        candidates=candidates,
    )


ENCODE = _implementation(encode)
DECODE = _implementation(decode)
