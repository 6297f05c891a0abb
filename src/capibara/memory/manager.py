"""Tensors under a limit of device memory: the ones in use are there, the others wait on the host or compressed."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from capibara.errors import rule_error, say_once
from capibara.memory import active
from capibara.memory.autopsy import autopsy, examine
from capibara.memory.compress import Packed, check_code, pack, packed_bytes, packing_bytes, unpack, unpack_on_host
from capibara.memory.eviction import EvictionOrder
from capibara.memory.limits import MemoryLimitError, checked_choice, gib_for, limit_error, limit_in_force
from capibara.memory.live import bytes_by_device, looking
from capibara.memory.monitor import Sampler, TpuMemoryMonitor
from capibara.memory.offload import HostCopy, put

__all__ = ["POLICIES", "TpuMemoryManager"]

_log = logging.getLogger(__name__)

POLICIES = ("keep", "offload", "compress_int8", "compress_bfloat16")
"""What may be done with a registered tensor to make room: nothing; moved to the host's memory, bit for bit; kept on
the device in fewer bytes, within a bound on its error."""


@dataclass
class _Tensor:
    """A registered tensor: on the device, packed there, on the host, or several of them at once."""

    policy: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    bytes: dict[Any, int]
    """Of each device, when it is there whole."""
    array: jax.Array | None = None
    host: HostCopy | None = None
    """Stays when the array is back: arrays do not change, so that it need not be copied to the host a second time."""
    packed: Packed | None = None
    packed_on_host: list[HostCopy] = field(default_factory=list)
    error_bound: float = 0.0
    measured_error: float = 0.0
    handed_out: bool = False
    prefetched: bool = False

    @property
    def code(self) -> str | None:
        return self.policy.removeprefix("compress_") if self.policy.startswith("compress_") else None

    @property
    def lost(self) -> bool:
        """Whether its array was deleted by somebody else, a donation for one, and there is no other form of it."""
        deleted = self.array is not None and self.array.is_deleted()
        return deleted and self.host is None and self.packed is None

    @property
    def state(self) -> str:
        if self.lost:
            return "deleted elsewhere"
        if self.array is not None:
            return "device"
        if self.packed is not None:
            return "compressed on the host" if self.packed_on_host else "compressed"
        return "host"


class _Shortage(NamedTuple):
    """Of a device: the bytes that were to come, and those that are there and stay."""

    device: Any
    need: int
    used: int


def _references(tensor: _Tensor) -> int:
    return sys.getrefcount(tensor.array)


_OURS = _references(_Tensor("keep", (), None, None, {}, array=object()))  # type: ignore[arg-type]
"""References to an array that nobody but its entry has, as `_references` counts them."""


class TpuMemoryManager:
    """Keeps the devices' memory under a limit, with what is registered here as its reserve.

    A tensor that is registered is the manager's from then on: `get` gives it, wherever it is. To make room the manager
    frees, in this order, until the fullest device is under the threshold: what the library's caches have there, least
    recently used first; then registered tensors, least recently used first, each as its policy says. Their device
    memory is given back at once, also where the caller still has the array that was registered. What `get` gave is
    left alone for as long as somebody has it.

    Args:
      memory_limit_gb: GiB of each device that may be in use, by this process as a whole. Where a device's programs
        can have less (30.75 of a v4's 32 GiB), that is the limit.
      cleanup_threshold: the share of the limit past which room is made.
      prefetch_enabled: after a `get`, the tensor that followed this one last time (at first: that was registered
        next) is brought back in the background, while it is not needed yet.
      compression_enabled: tensors whose policy allows it are compressed; without, they are moved to the host.

    Examples:
        >>> import jax.numpy as jnp
        >>> manager = TpuMemoryManager(
        ...     memory_limit_gb=32.0, cleanup_threshold=0.85, prefetch_enabled=True, compression_enabled=True
        ... )
        >>> with manager.managed_context():
        ...     manager.register("weights", jnp.arange(4.0), policy="offload")
        ...     manager.offload("weights")
        ...     back = manager.get("weights")
        >>> back
        Array([0., 1., 2., 3.], dtype=float32)
        >>> manager.stats()["offloads"]
        1
    """

    def __init__(
        self,
        memory_limit_gb: float,
        cleanup_threshold: float = 0.85,
        prefetch_enabled: bool = True,
        compression_enabled: bool = False,
    ) -> None:
        self.monitor = TpuMemoryMonitor(memory_limit_gb, cleanup_threshold)
        self.prefetch_enabled = prefetch_enabled
        self.compression_enabled = compression_enabled
        self._lock = threading.RLock()
        self._tensors: dict[str, _Tensor] = {}
        self._order: EvictionOrder[str] = EvictionOrder("lru")
        self._followed_by: dict[str, str] = {}
        self._last: str | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._counts: Counter[str] = Counter()
        self._waited = 0.0
        active.add_manager(self)

    @property
    def limit_bytes(self) -> int:
        """Of one device."""
        return self.monitor.limit_bytes

    @contextmanager
    def managed_context(self) -> Iterator[TpuMemoryManager]:
        """Inside, a thread watches the devices' memory and makes room past the threshold, whoever uses it.

        An out-of-memory error that comes up inside gets an autopsy (`capibara.memory.autopsy`).
        """
        with active.inside(), autopsy(), Sampler(self.clean):
            self.clean()
            yield self

    # Tensors.

    def register(self, name: str, array: Any, policy: str = "offload") -> None:
        """Hand a tensor over; under a name that is taken, it takes the other's place.

        Args:
          name: what `get` asks for.
          array: a jax array, or a numpy array, which stays on the host until it is asked for.
          policy: "keep", "offload", "compress_int8" or "compress_bfloat16": what may be done with it to make room.

        Raises:
          MemoryLimitError: it is larger than the limit, and could never be used.
        """
        checked_choice("policy", policy, POLICIES)
        if not isinstance(array, jax.Array | np.ndarray):
            raise rule_error("A tensor is a jax or numpy array", type(array).__name__, "pass jnp.asarray(it)")
        dtype = jax.dtypes.canonicalize_dtype(array.dtype) if isinstance(array, np.ndarray) else array.dtype
        sharding = (
            array.sharding
            if isinstance(array, jax.Array)
            else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        )
        tensor = _Tensor(policy, tuple(array.shape), dtype, sharding, bytes_by_device(array.shape, dtype, sharding))
        if tensor.code is not None:
            check_code(tensor.code, tensor.shape, dtype)
        largest = max(tensor.bytes.values(), default=0)
        if largest > self.limit_bytes:
            raise _with_autopsy(
                limit_error(
                    f"A tensor fits the limit by itself: {self.limit_bytes} bytes of a device",
                    f"{name!r}, {dtype}{list(tensor.shape)} of {largest} bytes on a device",
                    f"{_larger_limit(largest)}divide it over more devices, or cut it up",
                )
            )
        with self._lock:
            self.release(name)
            if isinstance(array, jax.Array):
                tensor.array = array
            else:
                tensor.host = HostCopy(np.asarray(array, dtype), sharding).wait()
            self._tensors[name] = tensor
            self._order.add(name)
            self.clean()

    def get(self, name: str) -> jax.Array:
        """The tensor on its devices, brought back if it was away: bit for bit, or compressed, within its bound.

        It stays there for as long as the caller has it. In a loop, let go of one tensor before the next is asked for
        (`del x`), or there has to be room for both.

        Raises:
          MemoryLimitError: what is in use leaves no room for it.
        """
        started = time.perf_counter()
        with self._lock:
            tensor = self._known(name)
            if tensor.array is not None:
                self._counts["hits"] += 1
                self._counts["prefetch_hits"] += tensor.prefetched
            else:
                self._counts["misses"] += 1
                short = self._bring(name, tensor)
                if short is not None:
                    raise self._refusal(short)
            tensor.prefetched = False
            tensor.handed_out = True
            self._order.use(name)
            if self._last is not None and self._last != name:
                self._followed_by[self._last] = name
            self._last = name
            array = tensor.array
            if self.prefetch_enabled:
                self._start_prefetch(name)
            self._waited += time.perf_counter() - started
            assert array is not None
            return array

    def offload(self, name: str) -> None:
        """Move a tensor to the host now, or compress it, as its policy says."""
        with self._lock:
            tensor = self._known(name)
            if tensor.policy == "keep":
                raise rule_error('A tensor of policy "keep" stays', repr(name), 'register it with policy="offload"')
            if self._in_use(tensor):
                raise rule_error("A tensor that somebody has is not moved", repr(name), "let go of it first: del x")
            if tensor.array is not None:
                self._move_away(tensor, room=self._room())

    def release(self, name: str) -> None:
        """Forget a tensor, wherever it is. Its array is not deleted: the caller may have it."""
        with self._lock:
            self._tensors.pop(name, None)
            self._order.remove(name)
            self._followed_by.pop(name, None)
            self._followed_by = {one: then for one, then in self._followed_by.items() if then != name}
            self._last = None if self._last == name else self._last

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._tensors

    def _known(self, name: str) -> _Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise rule_error(
                "A tensor is registered before it is used", repr(name), f"use one of {list(self._tensors)}"
            )
        if tensor.lost:
            self.release(name)
            raise rule_error(
                "A registered tensor is deleted by its manager alone",
                f"{name!r}, which was donated or deleted elsewhere",
                "register what the computation gave in its place",
            )
        if tensor.array is not None and tensor.array.is_deleted():
            tensor.array = None  # the host has what was registered
        return tensor

    # Room.

    def clean(self) -> int:
        """Make room if a device is past the threshold; the bytes that registered tensors and caches gave back."""
        with self._lock:
            before = self._counts["freed_bytes"]
            self._make_room({})
            return self._counts["freed_bytes"] - before

    def make_room(self, bytes_per_device: int) -> int:
        """Free until so many bytes more fit under the limit on every device, before a large program is run.

        Returns the bytes that were freed for it.

        Raises:
          MemoryLimitError: what is in use leaves too little.
        """
        with self._lock:
            before = self._counts["freed_bytes"]
            short = self._make_room(dict.fromkeys(jax.local_devices(), bytes_per_device))
            if short is not None:
                raise self._refusal(short)
            return self._counts["freed_bytes"] - before

    def _room(self) -> dict[Any, int]:
        return {device: self.limit_bytes - count for device, count in self.monitor.used().items()}

    def _in_use(self, tensor: _Tensor) -> bool:
        """Whether somebody has the array that `get` gave."""
        if tensor.array is None or not tensor.handed_out:
            return False
        with looking():
            return _references(tensor) > _OURS

    def _make_room(self, need: Mapping[Any, int], spare: Collection[str] = ()) -> _Shortage | None:
        """Free until the need fits under the threshold, as far as that goes; what is short of the limit itself."""
        wanted = {device: count + need.get(device, 0) for device, count in self.monitor.used().items()}
        target = self.monitor.threshold_bytes
        for device in wanted:
            for cache in active.caches():
                if wanted[device] > target:
                    gone = cache.shrink(device, wanted[device] - target)
                    wanted[device] -= gone
                    self._counts["freed_bytes"] += gone
        # The whole tensors first, by age; then what is compressed already, to the host.
        for whole in (True, False):
            for name in self._order:
                over = {device for device, count in wanted.items() if count > target}
                tensor = self._tensors[name]
                if name in spare or not over & set(tensor.bytes) or not self._can_go(tensor, whole):
                    continue
                room = {device: self.limit_bytes - count + need.get(device, 0) for device, count in wanted.items()}
                for device, gone in self._move_away(tensor, room).items():
                    wanted[device] -= gone
                    self._counts["freed_bytes"] += gone
        return next(
            (
                _Shortage(device, need[device], count - need[device])
                for device, count in wanted.items()
                if count > self.limit_bytes and need.get(device)
            ),
            None,
        )

    def _can_go(self, tensor: _Tensor, whole: bool) -> bool:
        # One that is lost has nothing to give back: whoever asks for it is told.
        if tensor.policy == "keep" or tensor.lost or self._in_use(tensor):
            return False
        packed = tensor.array is None and tensor.packed is not None and not tensor.packed_on_host
        return tensor.array is not None if whole else packed

    def _refusal(self, short: _Shortage) -> MemoryLimitError:
        in_use = [name for name, tensor in self._tensors.items() if self._in_use(tensor)]
        kept = [name for name, tensor in self._tensors.items() if tensor.policy == "keep" and tensor.array is not None]
        held = f"; in use: {', '.join(in_use)}" * bool(in_use) + f"; kept by policy: {', '.join(kept)}" * bool(kept)
        return _with_autopsy(
            limit_error(
                f"At most {self.limit_bytes} bytes of a device are in use",
                f"{short.need} bytes more on {short.device}, beside {short.used} that nothing here can free{held}",
                f"{_larger_limit(short.used + short.need)}let go of arrays that are done with",
            )
        )

    # Away and back.

    def _move_away(self, tensor: _Tensor, room: Mapping[Any, int]) -> dict[Any, int]:
        """Give a tensor's device memory back; the bytes, device by device."""
        if tensor.array is None:
            return self._pack_to_host(tensor)
        if tensor.array.is_deleted():
            tensor.array = None
            return {}
        code = tensor.code
        left: dict[Any, int] = {}
        if code is not None and self.compression_enabled and tensor.host is None and tensor.packed is None:
            size = packed_bytes(code, tensor.shape, tensor.sharding)
            smaller = all(count < tensor.bytes[device] for device, count in size.items())
            while_packing = packing_bytes(code, tensor.shape, tensor.sharding)
            if smaller and all(count <= room.get(device, count) for device, count in while_packing.items()):
                tensor.packed = pack(tensor.array, code)
                self.monitor.used()
            if tensor.packed is not None:
                # Of the worst time: compressed again, a tensor differs from itself by nothing.
                tensor.error_bound = max(tensor.error_bound, tensor.packed.error_bound)
                tensor.measured_error = max(tensor.measured_error, tensor.packed.measured_error)
                left = size
                self._counts["compressions"] += 1
        if tensor.packed is None and tensor.host is None:
            tensor.host = HostCopy(tensor.array).wait()
        if tensor.packed is None:
            self._counts["offloads"] += 1
        tensor.array.delete()
        tensor.array = None
        tensor.handed_out = tensor.prefetched = False
        return {device: count - left.get(device, 0) for device, count in tensor.bytes.items()}

    def _pack_to_host(self, tensor: _Tensor) -> dict[Any, int]:
        assert tensor.packed is not None
        assert tensor.code is not None
        if tensor.packed_on_host:
            return {}
        size = packed_bytes(tensor.code, tensor.shape, tensor.sharding)
        tensor.packed_on_host = [HostCopy(array).wait() for array in tensor.packed.arrays]
        for array in tensor.packed.arrays:
            array.delete()
        self._counts["offloads"] += 1
        return size

    def _bring(self, name: str, tensor: _Tensor, spare: Collection[str] = ()) -> _Shortage | None:
        """Put it on its devices, where there is room; else what is short."""
        spare = {name, *spare}
        if tensor.packed is None:
            short = self._make_room(tensor.bytes, spare)
            if short is None:
                assert tensor.host is not None
                tensor.array = tensor.host.to_device()
        else:
            short = self._unpack(tensor, spare)
        if short is None:
            self._counts["returns"] += 1
            self.monitor.used()
        return short

    def _unpack(self, tensor: _Tensor, spare: Collection[str]) -> _Shortage | None:
        assert tensor.packed is not None
        assert tensor.code is not None
        both = Counter(tensor.bytes)
        if tensor.packed_on_host:
            both.update(packed_bytes(tensor.code, tensor.shape, tensor.sharding))
        if self._make_room(both, spare) is None:
            packed = tensor.packed
            if tensor.packed_on_host:
                values, *scales = (copy.to_device() for copy in tensor.packed_on_host)
                packed = replace(packed, values=values, scales=scales[0] if scales else None)
            tensor.array = unpack(packed).block_until_ready()
            for array in packed.arrays:
                array.delete()
        else:
            # One form at a time on the device.
            self._pack_to_host(tensor)
            short = self._make_room(tensor.bytes, spare)
            if short is not None:
                return short
            on_host, *scales_on_host = (copy.to_numpy() for copy in tensor.packed_on_host)
            whole = unpack_on_host(on_host, scales_on_host[0] if scales_on_host else None, tensor.dtype)
            tensor.array = put(whole, tensor.sharding)
        tensor.packed, tensor.packed_on_host = None, []
        return None

    # Ahead of its use.

    def _start_prefetch(self, name: str) -> None:
        then = self._followed_by.get(name)
        if then is None:
            names = list(self._tensors)
            then = names[(names.index(name) + 1) % len(names)]
        if then == name or self._tensors[then].array is not None:
            return
        if self._pending is not None and not self._pending.done():
            return  # one at a time: what comes after it is known when it is used
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="capibara-memory-prefetch")
        self._pending = self._worker.submit(self._prefetch, then, name)
        self._pending.add_done_callback(_tell_failure)

    def _prefetch(self, name: str, before: str) -> None:
        with self._lock:
            tensor = self._tensors.get(name)
            if tensor is None or tensor.array is not None:
                return
            if self._bring(name, tensor, spare=(before,)) is not None:
                # No room beside what is in use: it is brought when it is asked for, and refused then.
                self._counts["prefetch_skipped"] += 1
                return
            tensor.prefetched = True
            self._order.add(name)
            self._counts["prefetched"] += 1

    def holds_away(self) -> bool:
        """Whether a tensor is offloaded or compressed now."""
        with self._lock:
            return any(tensor.array is None for tensor in self._tensors.values())

    def stats(self) -> dict[str, Any]:
        """Counts since it was made, bytes now, and each tensor's state.

        `used_bytes` and `peak_bytes` are of the fullest device and of the whole process; `waited_seconds` is what
        callers of `get` waited.
        """
        with self._lock:
            used, peaks = self.monitor.used(), self.monitor.peaks()
            counted = (
                "hits", "misses", "offloads", "compressions", "returns", "prefetched", "prefetch_hits",
                "prefetch_skipped", "freed_bytes",
            )  # fmt: skip
            hosts = [copy for one in self._tensors.values() for copy in (one.host, *one.packed_on_host) if copy]
            return {
                "limit_bytes": self.limit_bytes,
                "threshold_bytes": self.monitor.threshold_bytes,
                "used_bytes": max(used.values()),
                "peak_bytes": max(peaks.values()),
                "host_bytes": sum(copy.nbytes for copy in hosts),
                **{name: self._counts[name] for name in counted},
                "waited_seconds": self._waited,
                "tensors": {
                    name: {
                        "state": one.state,
                        "policy": one.policy,
                        "bytes": max(one.bytes.values(), default=0),
                        "error_bound": one.error_bound,
                        "measured_error": one.measured_error,
                    }
                    for name, one in self._tensors.items()
                },
            }


def _larger_limit(count: int) -> str:
    """The beginning of a fix: the limit that would do, where the devices have that much."""
    return f"set memory_limit_gb={gib_for(count)} or more, " if limit_in_force(count) >= count else ""


def _tell_failure(prefetch: Future[None]) -> None:
    """Nobody waits for a prefetch: `get` brings the tensor itself, and raises what is wrong with it."""
    if not prefetch.cancelled() and (error := prefetch.exception()) is not None:
        say_once(_log, type(error).__name__, "A tensor could not be brought ahead of its use: %s", error)


def _with_autopsy(error: MemoryLimitError) -> MemoryLimitError:
    """The refusal with what lies in memory at this moment."""
    error.autopsy = examine(error)
    error.add_note(str(error.autopsy))
    return error
