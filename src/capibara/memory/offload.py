"""An array in the host's memory, and back where it lay: the same bits, the same sharding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

__all__ = ["HOST_KINDS", "HostCopy", "host_kind", "is_host_copy", "put"]

HOST_KINDS = ("pinned_host", "unpinned_host")
"""Memories of the host that a device's programs know, the faster one to copy from first."""


@functools.lru_cache(maxsize=64)
def host_kind(device: Any) -> str | None:
    """The host's memory that copies of this device's arrays go to; None where it knows none, and numpy keeps them."""
    kinds = {memory.kind for memory in device.addressable_memories()} - {device.default_memory().kind}
    return next((kind for kind in HOST_KINDS if kind in kinds), None)


def put(array: Any, sharding: Any) -> jax.Array:
    """The array there, in memory of its own: whoever has the other may change or delete it once this has arrived."""
    if isinstance(array, np.ndarray) and next(iter(sharding.device_set)).platform == "cpu":
        # Where numpy's memory is well aligned jax shares it, also when it is told not to.
        array = np.array(array)
    return jax.device_put(array, sharding, may_alias=False)


def _in_host_memory(array: Any, sharding: Any) -> jax.Array:
    return put(array, sharding)


def is_host_copy(frame: Any) -> bool:
    """Whether this frame of a memory profile made a copy in the host's memory, which is none of the device's."""
    return bool(frame.file == __file__ and frame.function == _in_host_memory.__name__)


class HostCopy:
    """A copy of an array in the host's memory, made with each part beside the device that has it.

    >>> import jax, jax.numpy as jnp
    >>> array = jnp.arange(4.0)
    >>> copy = HostCopy(array)
    >>> array.delete()
    >>> copy.to_device()
    Array([0., 1., 2., 3.], dtype=float32)
    """

    def __init__(self, array: Any, sharding: Any = None) -> None:
        """`sharding` is where it goes back to: where it lies by default; a numpy array needs one."""
        self.sharding = array.sharding if sharding is None else sharding
        self.shape, self.dtype = tuple(array.shape), array.dtype
        self.kind = host_kind(next(iter(self.sharding.device_set)))
        self._parts: dict[Any, np.ndarray] = {}
        self._array: jax.Array | None = None
        if self.kind is not None:
            self._array = _in_host_memory(array, self.sharding.with_memory_kind(self.kind))
        elif isinstance(array, jax.Array):
            placed = jax.device_put(array, self.sharding)
            self._parts = {part.device: np.array(part.data) for part in placed.addressable_shards}
        else:
            indices = self.sharding.addressable_devices_indices_map(self.shape)
            self._parts = {device: np.array(array[index]) for device, index in indices.items()}

    @property
    def nbytes(self) -> int:
        """Of the host's memory that this process has for it."""
        if self._array is None:
            return sum(part.nbytes for part in self._parts.values())
        shape = self.sharding.shard_shape(self.shape)
        return len(self.sharding.addressable_devices) * int(np.prod(shape)) * self.dtype.itemsize

    def wait(self) -> HostCopy:
        """Until every byte has arrived: what it was copied from can go."""
        if self._array is not None:
            self._array.block_until_ready()
        return self

    def to_device(self) -> jax.Array:
        """The array again. The copy to the device may still be under way: whoever uses the array waits for it."""
        if self._array is not None:
            return jax.device_put(self._array, self.sharding, may_alias=False)
        parts = [jax.device_put(part, device, may_alias=False) for device, part in self._parts.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)

    def to_numpy(self) -> np.ndarray:
        """The whole array, of which this process has every part."""
        if self._array is not None:
            return np.asarray(self._array)
        whole = np.empty(self.shape, self.dtype)
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            whole[index] = self._parts[device]
        return whole
