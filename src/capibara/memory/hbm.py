"""A stream of arrays through the devices' memory: what stays, what is brought ahead of its use, what goes for it."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.cost.padding import padded_bytes
from capibara.errors import rule_error
from capibara.hardware.devices import default
from capibara.memory.eviction import POLICIES, EvictionOrder
from capibara.memory.limits import checked_choice, checked_size, gib_for, limit_error
from capibara.memory.live import in_device_memory, nbytes_of
from capibara.memory.offload import host_kind, put
from capibara.memory.staging import Staging, staging_kind
from capibara.program.chip import Buffer

__all__ = ["ACCESS_PATTERNS", "HBMOptimizer", "Placement", "StreamPlan"]

ACCESS_PATTERNS = ("sequential", "random", "mixed")
_GB = 10**9
_NO_WORSE = 1.01
"""Of two prefetch distances the shorter is taken when it is so near to the best: it needs less memory."""


@dataclass(frozen=True)
class Placement:
    """How one array lies in a stream."""

    where: str
    """ "resident": brought once, and there until the end; "streamed": goes again to make room."""
    bytes: int
    """Of a device, with what its layout there pads: tiles of 8 x 128 on a TPU."""
    loads: int
    """How often it is brought."""


@dataclass(frozen=True)
class StreamPlan:
    """What a stream does, access by access."""

    layout: dict[Hashable, Placement]
    prefetch_distance: int
    """How many accesses ahead of its use an array is asked for."""
    evictions: tuple[tuple[int, Hashable], ...]
    """(position in the order, name): what goes before that access."""
    loads: tuple[tuple[int, Hashable], ...]
    """(position in the order, name): what is asked for at that access."""
    seconds: float
    """The whole stream's: transfers one after the other at the bandwidth limit, accesses as they have arrived."""
    bytes_moved: int
    most_bytes: int
    """There at a time."""


class HBMOptimizer:
    """Plans a stream of arrays through a memory that does not hold all of them, and runs it.

    Args:
      access_pattern: "sequential": the order is followed, and arrays are asked for ahead of their use, as far ahead as
        it takes and fits. "random": what comes next is not known when it is planned for, so nothing is asked for ahead
        and all room keeps what was used. "mixed": both: at most half of the room is for what is ahead, and an array
        that is used once goes right after it, so that it does not push out what is used again.
      cache_policy: what makes room first: "lru", "lfu" or "fifo".
      bandwidth_limit_gbps: GB (10^9 bytes) a second that the stream may bring at the most.

    Examples:
        >>> optimizer = HBMOptimizer(access_pattern="sequential", cache_policy="lru", bandwidth_limit_gbps=900)
        >>> plan = optimizer.plan({"a": (1024, 1024), "b": (1024, 1024)}, order=["a", "b", "a"])
        >>> plan.layout["a"].where, plan.evictions, plan.bytes_moved
        ('resident', (), 8388608)
    """

    def __init__(
        self, access_pattern: str = "sequential", cache_policy: str = "lru", bandwidth_limit_gbps: float = 900.0
    ) -> None:
        self.access_pattern = checked_choice("access pattern", access_pattern, ACCESS_PATTERNS)
        self.cache_policy = checked_choice("cache policy", cache_policy, POLICIES)
        number = isinstance(bandwidth_limit_gbps, int | float) and not isinstance(bandwidth_limit_gbps, bool)
        if not number or not 0 < bandwidth_limit_gbps < math.inf:
            raise rule_error(
                "bandwidth_limit_gbps is a number of GB a second above 0",
                repr(bandwidth_limit_gbps),
                "use 900, or what the link to the host reaches",
            )
        self.bandwidth_limit_gbps = float(bandwidth_limit_gbps)
        self.last_stream: dict[str, float] = {}
        """Of the stream that ended last: seconds, bytes, loads, waited_seconds (for arrays that had not arrived),
        transfer_seconds (of the thread that brings them), and, where arrays were staged, staged, most_staged and
        staging_seconds."""

    def plan(
        self,
        shapes: Mapping[Hashable, Any] | Sequence[Any],
        order: Sequence[Hashable] | None = None,
        *,
        capacity_gb: float | None = None,
        compute_seconds: float = 0.0,
        sharding: Any = None,
    ) -> StreamPlan:
        """What a stream would do, without doing it.

        Args:
          shapes: by name, or a sequence whose names are 0, 1, ...: arrays, `jax.ShapeDtypeStruct`s, or shapes, which
            stand for float32.
          order: the names in the order of their uses; each once by default.
          capacity_gb: GiB of a device that the stream may take; what programs may have of it by default.
          compute_seconds: what is done with an array takes, before the next is wanted.
          sharding: where they go: a device then has its part of each. Whole, by default.
        """
        named = _named(shapes)
        uses = list(named) if order is None else list(order)
        unknown = [name for name in uses if name not in named]
        if unknown:
            raise rule_error("order has names of shapes", repr(unknown[0]), f"use {list(named)[:8]}")
        if not compute_seconds >= 0:
            raise rule_error("compute_seconds is 0 or more", repr(compute_seconds), "leave it out")
        sizes = {name: _stored_bytes(one, sharding) for name, one in named.items()}
        capacity = _capacity(capacity_gb)
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        if largest is not None and sizes[largest] > capacity:
            raise limit_error(
                f"Each array of a stream fits its memory, {capacity} bytes",
                f"{largest!r} of {sizes[largest]} bytes",
                f"set capacity_gb={gib_for(sizes[largest])} or more, or cut the array up",
            )
        walk = _Walk(self, sizes, uses, capacity, compute_seconds)
        if self.access_pattern == "random":
            return walk.run(0)
        plans = []
        distance = 1
        while distance <= max(len(uses) - 1, 1):
            plans.append(walk.run(distance))
            distance *= 2
        best = min(plan.seconds for plan in plans)
        return next(plan for plan in plans if plan.seconds <= best * _NO_WORSE)

    def stream(
        self,
        arrays: Mapping[Hashable, Any] | Sequence[Any],
        order: Sequence[Hashable] | None = None,
        *,
        capacity_gb: float | None = None,
        compute_seconds: float = 0.0,
        sharding: Any = None,
        stage: bool | None = None,
    ) -> Iterator[jax.Array]:
        """The arrays on a device one after the other, as `plan` says: brought by a thread ahead of their use, no faster
        than the bandwidth limit.

        Args:
          arrays: numpy arrays or arrays in the host's memory. One that lies on a device already is given as it is.
          order, capacity_gb, compute_seconds: as in `plan`.
          sharding: where they go; the first local device by default.
          stage: whether numpy arrays are copied into pinned memory of the host on their way, a few ahead of their
            transfer: a device reads that by itself. By default where the platform has such memory and the pattern asks
            ahead; not on a CPU. What is staged is read ahead of its use, so do not change it before.
        """
        named = _named(arrays)
        there = {name: one for name, one in named.items() if isinstance(one, jax.Array) and in_device_memory(one)}
        uses = list(named) if order is None else list(order)
        moved = {name: one for name, one in named.items() if name not in there}
        plan = self.plan(
            moved,
            [name for name in uses if name not in there],
            capacity_gb=capacity_gb,
            compute_seconds=compute_seconds,
            sharding=sharding,
        )
        where = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return self._streamed(plan, uses, there, moved, where, self._staging_kind(stage, where))

    def _staging_kind(self, stage: bool | None, where: Any) -> str | None:
        if stage is None:
            return None if self.access_pattern == "random" else staging_kind(where)
        if not stage:
            return None
        if self.access_pattern == "random":
            raise rule_error(
                "Arrays are staged ahead of their use, in an order that is known",
                'stage=True with access_pattern="random"',
                'use "sequential" or "mixed"',
            )
        kind = host_kind(next(iter(where.device_set)))
        if kind is None:
            raise rule_error(
                "Arrays are staged where the platform has a memory of the host beside the device's",
                f"stage=True on a {next(iter(where.device_set)).platform}",
                "leave stage out",
            )
        return kind

    def _streamed(
        self,
        plan: StreamPlan,
        uses: list[Hashable],
        there: dict[Hashable, Any],
        moved: dict[Hashable, Any],
        where: Any,
        staged_in: str | None,
    ) -> Iterator[jax.Array]:
        started = time.perf_counter()
        throttle = _Throttle(self.bandwidth_limit_gbps * _GB)
        loads, evictions = _by_position(plan.loads), _by_position(plan.evictions)
        arrived: dict[Hashable, Future[jax.Array]] = {}
        counts: Counter[str] = Counter()
        waited = sending = 0.0
        position = 0
        staging = None
        if staged_in is not None:
            # In the order of the loads, which is the one that `bring` takes them in.
            through = [moved[name] for _, name in plan.loads if isinstance(moved[name], np.ndarray)]
            staging = Staging(through, where, staged_in)

        def sent(array: Any) -> jax.Array:
            nonlocal sending
            throttle.take(array.nbytes)
            counts["loads"] += 1
            counts["bytes"] += array.nbytes
            begun = time.perf_counter()
            try:
                # Until it is there: a transfer that has been started is not yet one that the limit allows the next
                # after.
                return put(array, where).block_until_ready()
            finally:
                sending += time.perf_counter() - begun

        def bring(name: Hashable) -> jax.Array:
            array = moved[name]
            return staging.send(sent) if staging is not None and isinstance(array, np.ndarray) else sent(array)

        worker = ThreadPoolExecutor(1, thread_name_prefix="capibara-memory-stream")
        try:
            for name in uses:
                if name in there:
                    yield there[name]
                    continue
                for gone in evictions.get(position, ()):
                    del arrived[gone]  # whoever was given it may still have it, and frees it when done
                for wanted in loads.get(position, ()):
                    arrived[wanted] = worker.submit(bring, wanted)
                asked = time.perf_counter()
                array = arrived[name].result()
                waited += time.perf_counter() - asked
                position += 1
                yield array
                del array
        finally:
            throttle.stop()
            # What waits for its turn to be staged ends first: `bring` may wait for it.
            if staging is not None:
                staging.stop()
            worker.shutdown(wait=True, cancel_futures=True)
            self.last_stream = {
                "seconds": time.perf_counter() - started, "waited_seconds": waited, "bytes": counts["bytes"],
                "loads": counts["loads"], "transfer_seconds": sending, **({} if staging is None else staging.stats()),
            }  # fmt: skip


class _Throttle:
    """Says when so many bytes may go, at a rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free = time.perf_counter()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Nobody wants more: who waits, waits no longer."""
        self._stopped.set()

    def take(self, count: int) -> None:
        # They may go when the limit would have brought the last of them: no stretch of time has more than its share.
        now = time.perf_counter()
        self._free = max(self._free, now) + count / self._rate
        if self._stopped.wait(max(self._free - now, 0)):
            raise CancelledError


class _Walk:
    """One walk along the order, with arrays asked for so many accesses ahead."""

    def __init__(
        self,
        optimizer: HBMOptimizer,
        sizes: Mapping[Hashable, int],
        uses: Sequence[Hashable],
        capacity: int,
        compute_seconds: float,
    ) -> None:
        self.policy = optimizer.cache_policy
        self.rate = optimizer.bandwidth_limit_gbps * _GB
        self.sizes, self.uses, self.capacity, self.compute = sizes, uses, capacity, compute_seconds
        mixed = optimizer.access_pattern == "mixed"
        self.ahead_capacity = capacity // 2 if mixed else capacity
        counted = Counter(uses)
        self.once = {name for name in counted if counted[name] == 1} if mixed else set()

    def run(self, distance: int) -> StreamPlan:
        order: EvictionOrder[Hashable] = EvictionOrder(self.policy)
        used = most = 0
        evictions: list[tuple[int, Hashable]] = []
        loads: list[tuple[int, Hashable]] = []
        arrives: dict[Hashable, float] = {}
        now = link_free = 0.0
        for position, name in enumerate(self.uses):
            window = self.uses[position : position + distance + 1]
            if position and self.uses[position - 1] in self.once:
                gone = self.uses[position - 1]
                order.remove(gone)
                used -= self.sizes[gone]
                evictions.append((position, gone))
            for step, wanted in enumerate(window):
                if wanted in order:
                    continue
                size = self.sizes[wanted]
                ahead = sum(self.sizes[one] for one in set(window[1 : step + 1]))
                if step and ahead > self.ahead_capacity:
                    break
                going = []
                room = self.capacity - used
                for other in order:
                    if room >= size:
                        break
                    if other not in window:
                        going.append(other)
                        room += self.sizes[other]
                if room < size:
                    if step:
                        break  # what is ahead waits until there is room
                    # What was asked for ahead makes room for what is wanted now.
                    going += [other for other in order if other not in going]
                    room = self.capacity
                for other in going:
                    order.remove(other)
                    used -= self.sizes[other]
                    evictions.append((position, other))
                order.add(wanted)
                used += size
                most = max(most, used)
                loads.append((position, wanted))
                link_free = max(link_free, now) + size / self.rate
                arrives[wanted] = link_free
            now = max(now, arrives[name]) + self.compute
            order.use(name)
        return self._plan(distance, evictions, loads, now, most)

    def _plan(
        self,
        distance: int,
        evictions: list[tuple[int, Hashable]],
        loads: list[tuple[int, Hashable]],
        seconds: float,
        most: int,
    ) -> StreamPlan:
        brought = Counter(name for _, name in loads)
        went = {name for _, name in evictions}
        layout = {
            name: Placement("streamed" if name in went else "resident", size, brought[name])
            for name, size in self.sizes.items()
        }
        moved = sum(self.sizes[name] for _, name in loads)
        return StreamPlan(layout, distance, tuple(evictions), tuple(loads), seconds, moved, most)


def _named(arrays: Mapping[Hashable, Any] | Sequence[Any]) -> dict[Hashable, Any]:
    return dict(arrays) if isinstance(arrays, Mapping) else dict(enumerate(arrays))


def _by_position(events: tuple[tuple[int, Hashable], ...]) -> dict[int, list[Hashable]]:
    found: dict[int, list[Hashable]] = {}
    for position, name in events:
        found.setdefault(position, []).append(name)
    return found


def _stored_bytes(one: Any, sharding: Any) -> int:
    shape = tuple(one.shape if hasattr(one, "shape") else one)
    shape = shape if sharding is None else sharding.shard_shape(shape)
    dtype = jnp.dtype(one.dtype if hasattr(one, "dtype") else "float32")
    return math.ceil(padded_bytes(Buffer(0, nbytes_of(shape, dtype), shape, str(dtype)), default().platform))


def _capacity(capacity_gb: float | None) -> int:
    if capacity_gb is not None:
        return checked_size("capacity_gb", capacity_gb)
    limit = default().memory_limit_bytes
    if limit is None:
        raise rule_error(
            "A stream has a size", f"a {default().device_kind} that does not say how much it has", "pass capacity_gb"
        )
    return limit
