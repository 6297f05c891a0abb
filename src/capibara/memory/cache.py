"""A cache of arrays that is bounded in bytes: on the devices with the host behind it, or on the host alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from capibara.errors import rule_error
from capibara.memory import active
from capibara.memory.eviction import EvictionOrder
from capibara.memory.limits import checked_size, gib_for, limit_error
from capibara.memory.live import bytes_by_device
from capibara.memory.offload import HostCopy, put

__all__ = ["ArrayCache", "create_optimized_cache"]

_STAGED = 4
"""Of a cache on the host, the part of its size that arrays brought to the devices ahead of their use may take there."""


def create_optimized_cache(
    cache_size_gb: float,
    use_hbm: bool = True,
    prefetch_enabled: bool = True,
    *,
    cache_policy: str = "lru",
    load: Callable[[Hashable], Any] | None = None,
) -> ArrayCache:
    """A cache of arrays: `cache[key] = array`, `cache[key]`, `in`, `del`, `.prefetch(keys)`, `.stats()`.

    Args:
      cache_size_gb: GiB of one device (of the host, without `use_hbm`) that its arrays take at the most.
      use_hbm: keep them in the devices' memory; what has to make room goes to the host's, up to the same size, before
        it is dropped. Without, they are kept in the host's memory alone and come to the devices when they are read.
      prefetch_enabled: `prefetch` brings arrays to the devices in the background. Without, it does nothing.
      cache_policy: what makes room first: "lru", "lfu" or "fifo".
      load: makes the array of a key that is not there, so that reading it is no KeyError.

    Examples:
        >>> import jax.numpy as jnp
        >>> cache = create_optimized_cache(cache_size_gb=4.0, use_hbm=True, prefetch_enabled=True)
        >>> cache["layer 0"] = jnp.arange(3)
        >>> cache["layer 0"], "layer 1" in cache
        (Array([0, 1, 2], dtype=int32), False)
        >>> cache.stats()["hits"]
        1
    """
    return ArrayCache(checked_size("cache_size_gb", cache_size_gb), use_hbm, prefetch_enabled, cache_policy, load)


@dataclass
class _Entry:
    sharding: Any
    bytes: dict[Any, int]
    """Of each device, when it is there."""
    array: jax.Array | None = None
    host: HostCopy | None = None
    prefetched: bool = False


class ArrayCache(MutableMapping[Hashable, jax.Array]):
    """See `create_optimized_cache`. Threads may share it; `close` ends it and lets go of everything."""

    def __init__(
        self,
        size_bytes: int,
        use_hbm: bool,
        prefetch_enabled: bool,
        cache_policy: str = "lru",
        load: Callable[[Hashable], Any] | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self.use_hbm = use_hbm
        self.prefetch_enabled = prefetch_enabled
        self.closed = False
        self._load = load
        self._lock = threading.RLock()
        self._entries: dict[Hashable, _Entry] = {}
        self._on_device: EvictionOrder[Hashable] = EvictionOrder(cache_policy)
        self._on_host: EvictionOrder[Hashable] = EvictionOrder(cache_policy)
        self._device_bytes: dict[Any, int] = {}
        self._host_bytes = 0
        self._pending: dict[Hashable, Future[None]] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._counts = dict.fromkeys(
            ("hits", "misses", "loads", "evictions", "dropped", "prefetched", "prefetch_hits", "transfers"), 0
        )
        self._device_limit = size_bytes if use_hbm else size_bytes // _STAGED
        active.add_cache(self)

    # As a dictionary.

    def __setitem__(self, key: Hashable, value: Any) -> None:
        self._await(key)
        self._put(key, value)

    def _put(self, key: Hashable, value: Any) -> _Entry:
        array = _checked_array(key, value)
        with self._lock:
            self._open()
            sharding = array.sharding if isinstance(array, jax.Array) else _default_place()
            entry = _Entry(sharding, bytes_by_device(array.shape, array.dtype, sharding))
            one = max(entry.bytes.values(), default=0) if self.use_hbm else sum(entry.bytes.values())
            if one > self.size_bytes:
                raise limit_error(
                    "An entry of a cache is at most as large as the cache",
                    f"{key!r} of {one} bytes{' on a device' if self.use_hbm else ''}, in a cache of {self.size_bytes}",
                    f"use cache_size_gb={gib_for(one)} or more, or cut the array",
                )
            self._remove(key)
            self._entries[key] = entry
            if self.use_hbm:
                self._room_on_device(entry, key)
                entry.array = array if isinstance(array, jax.Array) else put(array, sharding)
                self._arrived(key, entry)
            else:
                self._to_host(key, entry, array)
            return entry

    def __getitem__(self, key: Hashable) -> jax.Array:
        made = None
        while True:
            self._await(key)
            if self._load is not None and made is None and key not in self:
                made = self._load(key)  # without the lock: it may take long, and read other keys
            with self._lock:
                self._open()
                if self._there(key) is None and made is None and self._load is not None:
                    continue  # other threads' entries took its place since it was looked for
                return self._read(key, made)

    def _read(self, key: Hashable, made: Any) -> jax.Array:
        """The entry's array, or what was made of it where there is none; under the lock."""
        entry = self._there(key)
        if entry is None:
            self._counts["misses"] += 1
            if made is None:
                raise KeyError(key)
            self._counts["loads"] += 1
            entry = self._put(key, made)
        elif entry.array is not None or not self.use_hbm:
            self._counts["hits"] += 1
            self._counts["prefetch_hits"] += entry.prefetched
        else:
            self._counts["misses"] += 1
        array = entry.array
        if array is None:
            array = self._bring(key, entry, keep=self.use_hbm)
        entry.prefetched = False
        for order in (self._on_device, self._on_host):
            if key in order:
                order.use(key)
        if not self.use_hbm:
            self._leave_device(key, entry)  # a copy that was brought ahead is for one read; the host has the array
        return array

    def _there(self, key: Hashable) -> _Entry | None:
        """The entry; none where its array was deleted by whoever read it, a donation for one, and the host has none."""
        entry = self._entries.get(key)
        if entry is not None and entry.array is not None and entry.array.is_deleted():
            self._leave_device(key, entry)
            if entry.host is None:
                self._remove(key)
                return None
        return entry

    def __delitem__(self, key: Hashable) -> None:
        self._await(key)
        with self._lock:
            self._open()
            if key not in self._entries:
                raise KeyError(key)
            self._remove(key)

    def _remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._leave_device(key, entry)
            self._leave_host(key, entry)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        with self._lock:
            return iter(list(self._entries))

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    # Ahead of its use.

    def prefetch(self, keys: Iterable[Hashable]) -> int:
        """Bring these to the devices in the background; how many are on their way.

        Keys that are there already are none of them, nor those that nobody knows, where there is no `load`.
        """
        if not self.prefetch_enabled:
            return 0
        started = 0
        for key in keys:
            with self._lock:
                self._open()
                entry = self._entries.get(key)
                there = self._load is None if entry is None else entry.array is not None
                if there or key in self._pending:
                    continue
                if self._worker is None:
                    self._worker = ThreadPoolExecutor(1, thread_name_prefix="capibara-memory-prefetch")
                self._pending[key] = self._worker.submit(self._prefetched, key)
                started += 1
        return started

    def _prefetched(self, key: Hashable) -> None:
        made = None
        try:
            with self._lock:
                missing = key not in self._entries
            if missing and self._load is not None:
                made = self._load(key)  # without the lock: it may take long, and read other keys
            with self._lock:
                if self.closed:
                    return
                if made is not None and key not in self._entries:
                    self._counts["loads"] += 1
                    self._put(key, made)
                entry = self._there(key)
                if entry is None:
                    return
                if entry.array is None and max(entry.bytes.values(), default=0) <= self._device_limit:
                    self._bring(key, entry, keep=True)
                if entry.array is not None:
                    entry.prefetched = True
                    self._counts["prefetched"] += 1
        finally:
            with self._lock:
                self._pending.pop(key, None)

    def _await(self, key: Hashable) -> None:
        with self._lock:
            pending = self._pending.get(key)
        if pending is not None:  # waited for without the lock, which the transfer takes
            pending.result()

    # Making room.

    def shrink(self, device: Any, wanted: int) -> int:
        """Let go of at least so many bytes on a device, if they are there; how many went. They stay on the host."""
        freed = 0
        with self._lock:
            while freed < wanted:
                gone = self._evict_first(device)
                if not gone:
                    break
                freed += gone
        return freed

    def _evict_first(self, device: Any, spare: Hashable | None = None) -> int:
        """Move what goes first from a device to the host; its bytes there, 0 where there is nothing to move."""
        for key in self._on_device:
            entry = self._entries[key]
            if key != spare and (there := entry.bytes.get(device)):
                self._evict(key, entry, spare)
                return there
        return 0

    def _room_on_device(self, entry: _Entry, key: Hashable) -> None:
        for device, count in entry.bytes.items():
            while self._device_bytes.get(device, 0) + count > self._device_limit:
                if not self._evict_first(device, spare=key):
                    break

    def _evict(self, key: Hashable, entry: _Entry, spare: Hashable | None) -> None:
        """From the devices to the host; a copy that is there already is the same array."""
        assert entry.array is not None
        self._counts["evictions"] += 1
        if entry.host is None and not entry.array.is_deleted():
            self._to_host(key, entry, entry.array, spare)
        self._leave_device(key, entry)
        if entry.host is None:
            self._remove(key)

    def _to_host(self, key: Hashable, entry: _Entry, array: Any, spare: Hashable | None = None) -> None:
        """`spare` is on its way to the devices: its copy here is the last to go, and it stays an entry."""
        size = sum(entry.bytes.values())
        # The host has the parts of every device.
        limit = self.size_bytes * (max(len(self._device_bytes), 1) if self.use_hbm else 1)
        while self._host_bytes + size > limit and len(self._on_host):
            other = next((one for one in self._on_host if one != spare), spare)
            there = self._entries[other]
            self._leave_host(other, there)
            if there.array is None and other != spare:
                del self._entries[other]
                self._counts["dropped"] += 1
        entry.host = HostCopy(array, entry.sharding).wait()
        self._host_bytes += entry.host.nbytes
        self._on_host.add(key)

    def _bring(self, key: Hashable, entry: _Entry, keep: bool) -> jax.Array:
        copy = entry.host
        assert copy is not None
        self._counts["transfers"] += 1
        if keep:
            self._room_on_device(entry, key)
        array = copy.to_device()
        if keep:
            entry.array = array
            self._arrived(key, entry)
        return array

    def _arrived(self, key: Hashable, entry: _Entry) -> None:
        self._on_device.add(key)
        for device, count in entry.bytes.items():
            self._device_bytes[device] = self._device_bytes.get(device, 0) + count

    def _leave_device(self, key: Hashable, entry: _Entry) -> None:
        # Let go of, not deleted: whoever read the array may still have it.
        if entry.array is not None:
            entry.array = None
            self._on_device.remove(key)
            for device, count in entry.bytes.items():
                self._device_bytes[device] -= count

    def _leave_host(self, key: Hashable, entry: _Entry) -> None:
        if entry.host is not None:
            self._host_bytes -= entry.host.nbytes
            entry.host = None
            self._on_host.remove(key)

    def stats(self) -> dict[str, Any]:
        """Counts since it was made, and bytes now: `device_bytes` of the fullest device, `host_bytes` of the host."""
        with self._lock:
            return {
                **self._counts,
                "entries": len(self._entries),
                "size_bytes": self.size_bytes,
                "device_bytes": max(self._device_bytes.values(), default=0),
                "host_bytes": self._host_bytes,
            }

    def _open(self) -> None:
        if self.closed:
            raise rule_error("A cache is used before it is closed", "a closed cache", "create another one")

    def close(self) -> None:
        """Let go of every array; a thread that brings arrays ends."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._entries.clear()
            self._pending.clear()
            for order in (self._on_device, self._on_host):
                for key in list(order):
                    order.remove(key)
            self._device_bytes.clear()
            self._host_bytes = 0

    def __enter__(self) -> ArrayCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    __hash__ = object.__hash__  # a Mapping compares by its entries; which cache is open is a question of identity

    def __eq__(self, other: object) -> bool:
        return self is other


def _default_place() -> Any:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _checked_array(key: Hashable, value: Any) -> Any:
    if not isinstance(value, jax.Array | np.ndarray):
        raise rule_error(
            "A cache of arrays keeps jax and numpy arrays", f"{type(value).__name__} for {key!r}", "pass an array"
        )
    return value
