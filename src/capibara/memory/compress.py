"""Cold tensors in fewer bytes: int8 with a scale a row, or bfloat16, each with a bound on its error.

A row is the last axis. Its scale is a power of two, so that every number that comes back is one that the code has
exactly: a tensor that was compressed once loses nothing when it is compressed again.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.memory.limits import checked_choice
from capibara.memory.live import bytes_by_device

__all__ = ["CODES", "Packed", "check_code", "pack", "packed_bytes", "packing_bytes", "unpack", "unpack_on_host"]

CODES: dict[str, tuple[str, ...]] = {"int8": ("float32", "bfloat16", "float16"), "bfloat16": ("float32",)}
"""Code -> the types that it makes smaller."""

_LARGEST = 127
_SMALLEST_EXPONENT = {"float32": -126, "bfloat16": -126, "float16": -24}
"""Of a scale: below it, multiples of the scale are no numbers of the type."""


@dataclass(frozen=True)
class Packed:
    """A tensor in fewer bytes, and what that cost."""

    code: str
    values: jax.Array
    scales: jax.Array | None
    dtype: Any
    error_bound: float
    """The most by which a number can differ from what it was."""
    measured_error: float
    """The most by which one does."""

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)


def check_code(code: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Refuse a tensor that the code does not make smaller."""
    checked_choice("code", code, CODES)
    if str(dtype) not in CODES[code] or not shape:
        raise rule_error(
            f"{code} compresses arrays of {', '.join(CODES[code])}",
            f"{dtype}{list(shape)}",
            'keep its bits by policy="offload"',
        )


def packed_bytes(code: str, shape: tuple[int, ...], sharding: Any) -> dict[Any, int]:
    """What the packed form takes of each device, at the most: a row's scale is counted wherever a part of it lies."""
    values = bytes_by_device(shape, jnp.dtype(code), sharding)
    if code == "bfloat16":
        return values
    rows = (*shape[:-1], 1)
    scales = int(np.prod(rows)) * 4
    return {device: count + scales for device, count in values.items()}


def packing_bytes(code: str, shape: tuple[int, ...], sharding: Any) -> dict[Any, int]:
    """What packing takes beside the tensor, at the most: the packed form, and a float32 copy that some compilers (the
    CPU's) keep while they measure the loss."""
    wide = bytes_by_device(shape, jnp.dtype("float32"), sharding)
    return {device: count + wide[device] for device, count in packed_bytes(code, shape, sharding).items()}


def pack(array: jax.Array, code: str) -> Packed | None:
    """The tensor in the code, on the same devices; None for one with an infinity or not-a-number, which have no code.

    int8: a number differs by at most 1/127 of the largest in its row. bfloat16: by at most 1/256 of itself.
    (By at most half the smallest scale, 2^-126 for float32, where that is more.)

    >>> import jax.numpy as jnp
    >>> packed = pack(jnp.linspace(-1.0, 1.0, 1000).reshape(2, 500), "int8")
    >>> packed.measured_error <= packed.error_bound <= 1 / 127
    True
    """
    check_code(code, array.shape, array.dtype)
    scales_of, values_of, loss_of = _packers(code, str(array.dtype), array.sharding)
    scales = scales_of(array)
    values = values_of(array, scales)
    bound, error = map(float, loss_of(array, values, scales))
    return Packed(code, values, scales, array.dtype, bound, error) if math.isfinite(error) else None


def unpack(packed: Packed) -> jax.Array:
    """The tensor in its own type, where its values lie."""
    return _unpacker(packed.code, str(packed.dtype), packed.values.sharding)(*packed.arrays)


def unpack_on_host(values: np.ndarray, scales: np.ndarray | None, dtype: Any) -> np.ndarray:
    """The same numbers, where a device has no room for both forms."""
    return np.asarray(_decoded(values, scales, str(dtype), np))


@functools.lru_cache(maxsize=256)
def _packers(code: str, dtype: str, sharding: Any) -> tuple[Any, Any, Any]:
    """Scales, values, and what is lost: three programs, as one would keep a float32 copy of the tensor between its
    loops, when there is little memory to spare."""

    def scales_of(x: jax.Array) -> Any:
        return None if code == "bfloat16" else _scale(jnp.max(jnp.abs(_wide(x)), axis=-1, keepdims=True), dtype)

    def values_of(x: jax.Array, scales: Any) -> jax.Array:
        if scales is None:
            return x.astype(jnp.bfloat16)
        return jnp.clip(jnp.round(_wide(x) / scales), -_LARGEST, _LARGEST).astype(jnp.int8)

    def loss_of(x: jax.Array, values: jax.Array, scales: Any) -> tuple[Any, ...]:
        # What is not finite counts as infinitely far: a maximum by itself may pass over what is not a number.
        differs = jnp.abs(_wide(_decoded(values, scales, dtype, jnp)) - _wide(x))
        error = jnp.max(jnp.where(jnp.isfinite(x), differs, jnp.inf))
        if scales is None:
            # Half a unit in the last of eight binary places.
            bound = jnp.maximum(jnp.max(jnp.abs(_wide(x))) / 256, 2.0**-126)
        else:
            bound = jnp.max(scales) / 2
        return bound, error

    return jax.jit(scales_of), jax.jit(values_of, out_shardings=sharding), jax.jit(loss_of)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _scale(largest: jax.Array, dtype: str) -> jax.Array:
    """The smallest power of two of which 127 reach the largest number."""
    fraction, exponent = jnp.frexp(largest / _LARGEST)  # fraction is from 1/2 to below 1
    exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponent, _SMALLEST_EXPONENT[dtype], 127))


@functools.lru_cache(maxsize=256)
def _unpacker(code: str, dtype: str, sharding: Any) -> Any:
    return jax.jit(lambda values, scales=None: _decoded(values, scales, dtype, jnp), out_shardings=sharding)


def _decoded(values: Any, scales: Any, dtype: str, numbers: Any) -> Any:
    """By jax.numpy or by numpy, as `numbers` is."""
    if scales is None:
        return values.astype(jnp.dtype(dtype))
    most = float(jnp.finfo(dtype).max)  # the largest numbers of a type round up to more than it has
    with np.errstate(over="ignore"):
        return numbers.clip(values.astype(np.float32) * scales, -most, most).astype(jnp.dtype(dtype))
