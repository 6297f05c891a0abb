"""What lies in the memory of this process's devices now, device by device."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "bytes_by_device",
    "in_device_memory",
    "live_arrays",
    "live_bytes",
    "looking",
    "nbytes_of",
    "used_bytes",
]

_LOOKING = threading.RLock()


@contextmanager
def looking() -> Iterator[None]:
    """Inside, no other thread of this room holds a list of the live arrays: what counts references waits for it."""
    with _LOOKING:
        yield


def nbytes_of(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array's numbers."""
    return math.prod(shape) * dtype.itemsize


def in_device_memory(array: jax.Array) -> bool:
    """Whether it lies in the devices' own memory, and not in the host's as their programs see it."""
    kind = array.sharding.memory_kind
    device: Any = next(iter(array.sharding.device_set))
    return kind is None or kind == device.default_memory().kind


def bytes_by_device(shape: tuple[int, ...], dtype: Any, sharding: Any) -> dict[Any, int]:
    """What an array takes of each of this process's devices: its part of it, or all of it where it is replicated."""
    part = nbytes_of(sharding.shard_shape(tuple(shape)), dtype)
    return dict.fromkeys(sharding.addressable_devices, part)


def live_arrays() -> list[jax.Array]:
    """The arrays in the devices' memory, each buffer once, the largest first."""
    with _LOOKING:
        found = [
            array
            for array in jax.live_arrays()
            if not array.is_deleted()
            if not jnp.issubdtype(array.dtype, jax.dtypes.extended)  # a key's words are an array too
            if in_device_memory(array)
        ]
        # An array that was put where it lay is a second object with the first one's memory.
        alone: dict[tuple[Any, int], jax.Array] = {}
        divided = []
        for array in found:
            if len(array.sharding.device_set) > 1:
                divided.append(array)
            else:
                (device,) = array.sharding.device_set
                alone.setdefault((device, _pointer(array)), array)
        # So is each part of a divided array that somebody has looked at, and jax then keeps them beside it. Looking at
        # the parts makes such objects, so only arrays are asked whose parts could be among those that are there.
        shapes = {(array.shape, array.dtype) for array in alone.values()}
        for array in divided:
            if (array.sharding.shard_shape(array.shape), array.dtype) in shapes:
                for part in array.addressable_shards:
                    alone.pop((part.device, _pointer(part.data)), None)
        return sorted([*alone.values(), *divided], key=lambda array: -array.nbytes)


def _pointer(array: jax.Array) -> int:
    try:
        return array.unsafe_buffer_pointer()
    except (RuntimeError, NotImplementedError, ValueError):  # deleted meanwhile, or empty
        return id(array)


def live_bytes() -> dict[Any, int]:
    """Bytes of the live arrays on each local device."""
    found = dict.fromkeys(jax.local_devices(), 0)
    with _LOOKING:
        for array in live_arrays():
            for device, count in bytes_by_device(array.shape, array.dtype, array.sharding).items():
                found[device] = found.get(device, 0) + count
    return found


def used_bytes() -> dict[Any, int]:
    """Bytes in use on each local device: by its allocator, which also counts running programs' temporaries; where it
    does not say (a CPU), by the live arrays."""
    stats = {device: device.memory_stats() or {} for device in jax.local_devices()}
    if all("bytes_in_use" in one for one in stats.values()):
        return {device: int(one["bytes_in_use"]) for device, one in stats.items()}
    arrays = live_bytes()
    return {device: int(one.get("bytes_in_use", arrays[device])) for device, one in stats.items()}
