"""gemm with a bound on how much of the contraction is multiplied at a time.

The TPU kernel has that bound as its tile's `block_k`. Any other implementation multiplies a block of the
contraction after the other in a loop, and adds the products up in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, say_once
from capibara.kernels.core import tables, varying
from capibara.kernels.core.dispatch import select
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.linalg.gemm.api import GEMM, gemm, leading_axes
from capibara.kernels.ops.linalg.gemm.reference import epilogue
from capibara.kernels.ops.linalg.gemm.rules import DTYPES
from capibara.kernels.ops.linalg.gemm.tpu import forward as gemm_tpu
from capibara.kernels.ops.linalg.placement import on_their_device, target_for
from capibara.kernels.ops.linalg.rounding import rounded
from capibara.kernels.pallas import vmem

logger = logging.getLogger("capibara.kernels")

LANES = gemm_tpu.LANES
_KERNEL = gemm_tpu.IMPLEMENTATION.name


def gemm_chunked(
    a: Any,
    b: Any,
    chunk_size: int | None,
    *,
    bias: Any = None,
    residual: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """gemm, with at most `chunk_size` of the contraction in one block; None leaves the block to dispatch.

    On a TPU the Pallas kernel runs where it takes the call, with `chunk_size` as its `block_k`: rounded down
    to a multiple of 128 (up to 128 when it is less, which is logged once), and cut to what fits the core's
    memory. Everywhere else, and where `implementation` names another, it is a loop over blocks of exactly
    `chunk_size`, the last one shorter. The other arguments are gemm's.
    """
    block = None if chunk_size is None else _checked_chunk(chunk_size)
    return _blocked(
        a,
        b,
        bias,
        residual,
        block=block,
        tile=None,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        activation=activation,
        precision=precision,
        out_dtype=out_dtype,
        implementation=implementation,
    )


def gemm_tiled(
    a: Any, b: Any, block_size: int = LANES, *, use_bfloat16: bool = True, implementation: str | None = None
) -> jax.Array:
    """gemm by square tiles: block_size is all three sides of the TPU kernel's tile, else the loop's block.

    `use_bfloat16` rounds the operands to bfloat16; sums are float32, and the result has the type that the
    operands promote to either way. `block_size` is a multiple of 128, the width of the chip's registers.
    """
    if not isinstance(block_size, int | np.integer) or block_size <= 0 or block_size % LANES:
        raise rule_error(f"block_size is a positive multiple of {LANES}", repr(block_size), f"use {LANES} or 256")
    block = int(block_size)
    a, b = as_array("gemm", "a", a), as_array("gemm", "b", b)
    out = jnp.result_type(a, b)
    if use_bfloat16 and jnp.issubdtype(out, jnp.floating):
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    tile = gemm_tpu.TileConfig(block, block, block)
    return _blocked(a, b, None, None, block=block, tile=tile, out_dtype=out, implementation=implementation)


def wait(out: Any, use_async: bool) -> Any:
    """The result at once, while jax computes it, or once it is there; under a trace nothing differs."""
    return out if use_async else jax.block_until_ready(out)


def _checked_chunk(chunk_size: Any) -> int:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise rule_error(
            "chunk_size is the most of the contraction in one block: a positive whole number, or None",
            repr(chunk_size),
            "use 1024, or leave it out",
        )
    return int(chunk_size)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What of a call is not an array."""

    transpose_a: bool
    transpose_b: bool
    activation: str | None
    precision: str | None
    out_dtype: str
    implementation: str | None


def _blocked(
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    *,
    block: int | None,
    tile: gemm_tpu.TileConfig | None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    bias, residual = (as_array("gemm", name, x, optional=True) for name, x in (("bias", bias), ("residual", residual)))
    given = {
        "bias": bias,
        "residual": residual,
        "transpose_a": transpose_a,
        "transpose_b": transpose_b,
        "activation": activation,
    }
    a, b = as_array("gemm", "a", a), as_array("gemm", "b", b)
    # The operands are rounded whole: fp8 has one scale for all blocks.
    a, b, precision, out = rounded(a, b, precision, out_dtype)
    takes = all(np.dtype(x.dtype).name in DTYPES and x.ndim >= 2 for x in (a, b))
    k = a.shape[-2 if transpose_a else -1] if takes else 0
    if block is None or not takes or (tile is None and block >= k) or k != b.shape[-1 if transpose_b else -2]:
        # Nothing to cut, or a mistake for gemm to name.
        return gemm(a, b, **given, precision=precision, out_dtype=out, implementation=implementation)
    call = _call(a, b, given, precision, out)
    if implementation is not None:
        select(call, implementation)  # an unknown name or a refusal, in dispatch's own words
    if _kernel_takes(call, implementation):
        config = _kernel_tile(call, block, tile)
        return gemm(a, b, **given, precision=precision, out_dtype=out, implementation=_KERNEL, config=config)
    if block >= k:
        return gemm(a, b, **given, precision=precision, out_dtype=out, implementation=implementation)
    options = _Options(
        transpose_a, transpose_b, activation, precision, out or str(jnp.result_type(a, b)), implementation
    )
    with on_their_device((a, b)):
        return _loop(a, b, bias, residual, block, options, tables.generation())


def _call(a: Any, b: Any, given: dict[str, Any], precision: str | None, out: str | None) -> Call:
    """The call that gemm makes of these: leading axes are folded into one."""
    count = math.prod(leading_axes(a, b))

    def folded(x: Any) -> Any:
        if x is None or x.ndim <= 2:
            return x
        return jax.ShapeDtypeStruct((count, *x.shape[-2:]), x.dtype)

    params = {name: given[name] for name in ("transpose_a", "transpose_b", "activation")}
    arrays = (folded(a), folded(b), given["bias"], folded(given["residual"]))
    return GEMM.call(*arrays, target=target_for((a, b)), precision=precision, out_dtype=out, **params)


def _kernel_takes(call: Call, implementation: str | None) -> bool:
    """Asked for by name, or on a TPU: a loop around XLA's product would carry the sums through HBM."""
    if implementation is not None:
        return implementation == _KERNEL
    return call.target.platform == "tpu" and GEMM.implementations[_KERNEL].refusal(call) is None


def _kernel_tile(call: Call, block: int, tile: gemm_tpu.TileConfig | None) -> gemm_tpu.TileConfig:
    """The kernel's best predicted tile with a contraction of `block`, or the nearest below that fits."""
    limit = vmem.limit(call)
    if tile is not None:
        if gemm_tpu.tile_bytes(call, tile) > limit:
            raise rule_error(
                f"A tile's operands, twice, and its sum fit the {limit:,} bytes that a core has",
                f"a block_size of {block}, which takes {gemm_tpu.tile_bytes(call, tile):,}",
                "use a smaller block_size",
            )
        return tile
    legal = max(block // LANES, 1) * LANES
    if legal != block:
        text = "chunk_size=%d is block_k=%d for the TPU kernel: a multiple of %d"
        say_once(logger, (block, legal), text, block, legal, LANES)
    tiles = gemm_tpu.candidates(call)
    while True:
        for one in tiles:
            made = dataclasses.replace(one, block_k=legal)
            if gemm_tpu.tile_bytes(call, made) <= limit:
                return made
        # A candidate has a block of its own that fits, so this ends at 128 at the latest.
        legal = max(legal // 2 // LANES, 1) * LANES


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _loop(a: Any, b: Any, bias: Any, residual: Any, block: int, options: _Options, tuned: int) -> jax.Array:
    # `tuned` is part of jit's key: a choice that was traced before a table changed is made again.
    wide = jnp.promote_types(jnp.float32, jnp.result_type(a, b))
    a_axis = a.ndim - (2 if options.transpose_a else 1)
    b_axis = b.ndim - (1 if options.transpose_b else 2)
    whole, rest = divmod(a.shape[a_axis], block)

    def product(left: Any, right: Any) -> jax.Array:
        return gemm(
            left,
            right,
            transpose_a=options.transpose_a,
            transpose_b=options.transpose_b,
            precision=options.precision,
            out_dtype=wide,
            implementation=options.implementation,
        )

    # Without the checkpoint the backward pass would keep a second copy of both operands, block by block.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(start: Any, a: Any, b: Any) -> jax.Array:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
        return product(cut(a, axis=a_axis), cut(b, axis=b_axis))

    def step(total: jax.Array, start: Any) -> tuple[jax.Array, None]:
        return total + one(start, a, b), None

    struct = jax.eval_shape(one, jnp.int32(0), a, b)
    (total, *_) = varying.vary_alike((jnp.zeros(struct.shape, wide), a, b))
    total, _ = jax.lax.scan(step, total, np.arange(whole, dtype=np.int32) * block)
    if rest:
        last = functools.partial(jax.lax.slice_in_dim, start_index=whole * block, limit_index=None)
        total = total + product(last(a, axis=a_axis), last(b, axis=b_axis))
    return epilogue(total, bias, residual, options.activation).astype(options.out_dtype)
