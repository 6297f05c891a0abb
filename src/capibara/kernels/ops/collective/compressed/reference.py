"""Blockwise int8 codes in plain JAX: the specification of `encode_int8` and `decode_int8`.

Everything is defined in float32, whatever the type of the numbers, so that every implementation can give the same
codes. A block's scale is its largest magnitude over 127, and never below the smallest normal float32: so nothing is
divided by zero, and a block of zeros is zeros again. The code -128 stands for a number that was not finite.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.pallas import prng

MOST = 127
NOT_FINITE = -128
SMALLEST = float(np.finfo(np.float32).tiny)
ONE_OVER_MOST = float(np.float32(1 / MOST))


def encode(x: jax.Array, seed: jax.Array | None = None, *, block: int = 256) -> tuple[jax.Array, jax.Array]:
    """Codes int8 [..., n] and scales float32 [..., blocks] of x [..., n], cut into blocks along its last axis.

    Without a seed a number goes to the nearest code, halves to the even one. With a seed (two 32-bit words) it goes up
    with the probability of its distance from the code below, so that the expected value is the number.
    """
    *lead, count = x.shape
    values = in_blocks(x.astype(jnp.float32), block)
    finite = jnp.isfinite(values)
    values = jnp.where(finite, values, 0.0)
    scales = scales_of(jnp.abs(values).max(-1, keepdims=True))
    bits = None
    if seed is not None:
        rows = jnp.arange(values.size // block, dtype=jnp.int32).reshape(*values.shape[:-1], 1)
        bits = prng.random_bits(prng.row_keys(seed, rows), jnp.arange(block, dtype=jnp.int32))
    codes = codes_of(values * (1.0 / scales), finite, bits).astype(jnp.int8)
    # Float64 is only given by a check in a wider type, which wants its own back; the numbers are the same.
    scales = scales[..., 0].astype(jnp.promote_types(jnp.float32, x.dtype))
    return codes.reshape(*lead, values.shape[-2] * block)[..., :count], scales


def decode(codes: jax.Array, scales: jax.Array, *, block: int = 256, out_dtype: str = "float32") -> jax.Array:
    """code · scale of its block, computed in float32 or wider and rounded once; NaN where the number was not finite."""
    *lead, count = codes.shape
    cut = in_blocks(codes, block)
    wide = jnp.promote_types(jnp.float32, out_dtype)
    values = jnp.where(cut == NOT_FINITE, jnp.nan, cut.astype(wide) * scales.astype(wide)[..., None])
    return values.reshape(*lead, cut.shape[-2] * block)[..., :count].astype(out_dtype)


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """[..., n] as [..., blocks, block], filled up with zeros."""
    *lead, count = x.shape
    blocks = -(-count // block)
    if blocks * block != count:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, blocks * block - count)])
    return x.reshape(*lead, blocks, block)


def scales_of(largest: jax.Array) -> jax.Array:
    """The step between two codes, from the largest magnitude."""
    return jnp.maximum(largest * ONE_OVER_MOST, SMALLEST)


def codes_of(steps: jax.Array, finite: Any, bits: jax.Array | None) -> jax.Array:
    """The codes, as int32, of numbers counted in steps; by `bits` (int32 or uint32) at random, else the nearest."""
    if bits is None:
        codes = jnp.round(steps)
    else:
        below = jnp.floor(steps)
        # 24 bits are what a float32 between 0 and 1 can hold. The difference is exact.
        drawn = lax.shift_right_logical(bits, jnp.full(bits.shape, 8, bits.dtype)).astype(jnp.int32)
        up = drawn.astype(jnp.float32) * (0.5**24) < steps - below
        codes = below + jnp.where(up, 1.0, 0.0)
    # The largest number may come out a rounding above 127.
    codes = jnp.clip(codes, -float(MOST), float(MOST)).astype(jnp.int32)
    return jnp.where(finite, codes, NOT_FINITE)
