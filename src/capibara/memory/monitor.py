"""How much of the devices' memory is in use, the most that was, and a thread that looks now and then."""

from __future__ import annotations

import atexit
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from capibara.errors import say_once
from capibara.hardware.facts import GiB
from capibara.memory import active
from capibara.memory.limits import checked_share, checked_size, limit_in_force
from capibara.memory.live import live_bytes, used_bytes

__all__ = ["Sampler", "TpuMemoryMonitor"]

_log = logging.getLogger(__name__)
_LOOK_EVERY = 0.05


class Sampler:
    """A thread that looks every so many seconds, inside of a `with`; it also ends when the interpreter does."""

    def __init__(self, look: Callable[[], Any], every: float = _LOOK_EVERY) -> None:
        self._look = look
        self._every = every
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._look()
            # An array that its owner deletes while it is copied, a device that has no room to compress in: the next
            # look may do, and without the thread nobody would see to the limit.
            except Exception as error:  # noqa: BLE001
                say_once(_log, (type(error), str(error)), "The devices' memory was not seen to this time: %s", error)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Sampler:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="capibara-memory-look", daemon=True)
        self._thread.start()
        _SAMPLERS.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        _SAMPLERS.discard(self)


_SAMPLERS: weakref.WeakSet[Sampler] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # A thread that is inside of jax while the interpreter is taken down would bring it down with an error.
    for sampler in list(_SAMPLERS):
        sampler.stop()


class TpuMemoryMonitor:
    """The memory in use on this process's devices, and its high-water mark, in GiB of the fullest device.

    `usage` only looks. `check` looks, and past the threshold frees what nobody needs: arrays that only unreachable
    objects hold, then what the library's caches have on the devices, least recently used first. Inside of
    `with monitor:` a thread checks every `look_every` seconds.

    Args:
      memory_limit_gb: GiB of one device that may be used.
      cleanup_threshold: the share of that past which `check` frees.
      look_every: seconds between two looks inside of `with monitor:`.

    Examples:
        >>> import jax.numpy as jnp
        >>> monitor = TpuMemoryMonitor(memory_limit_gb=32.0, cleanup_threshold=0.85)
        >>> array = jnp.ones((1024, 1024))
        >>> 4 / 1024 <= monitor.usage() <= monitor.peak()
        True
        >>> monitor.over_threshold()
        False
    """

    def __init__(
        self, memory_limit_gb: float, cleanup_threshold: float = 0.85, *, look_every: float = _LOOK_EVERY
    ) -> None:
        self.asked_limit_bytes = checked_size("memory_limit_gb", memory_limit_gb)
        self.cleanup_threshold = checked_share("cleanup_threshold", cleanup_threshold)
        self._look_every = look_every
        self._samplers: list[Sampler] = []
        self._lock = threading.Lock()
        self._limit: int | None = None
        self._peaks: dict[Any, int] = {}
        self._allocator_peaks = _allocator_peaks()

    @property
    def limit_bytes(self) -> int:
        """Of one device: what was asked for, or what programs may have of a device where that is less."""
        if self._limit is None:
            self._limit = limit_in_force(self.asked_limit_bytes)
        return self._limit

    @property
    def threshold_bytes(self) -> int:
        return int(self.limit_bytes * self.cleanup_threshold)

    def used(self) -> dict[Any, int]:
        """Bytes in use on each local device; the high-water mark is kept up."""
        found = used_bytes()
        with self._lock:
            for device, count in found.items():
                self._peaks[device] = max(count, self._peaks.get(device, 0))
        return found

    def usage(self) -> float:
        """GiB in use on the fullest device: by its allocator, or by the live arrays where it does not say."""
        return max(self.used().values()) / GiB

    def peak(self) -> float:
        """The most GiB in use on a device since this monitor was made.

        An allocator that keeps its own mark has seen every moment; elsewhere (a CPU) it is the most that was there at
        a look: those of this object, and of its thread inside of `with monitor:`.
        """
        return max(self.peaks().values()) / GiB

    def peaks(self) -> dict[Any, int]:
        """The same in bytes, device by device."""
        self.used()
        now = _allocator_peaks()
        with self._lock:
            found = dict(self._peaks)
        for device, mark in now.items():
            if mark > self._allocator_peaks.get(device, 0):  # it was set since; an older mark says nothing of us
                found[device] = max(mark, found.get(device, 0))
        return found

    def over_threshold(self) -> bool:
        """Whether a device has more in use than the threshold's share of the limit."""
        return max(self.used().values()) > self.threshold_bytes

    def check(self) -> int:
        """Look, and past the threshold free what nobody needs; the bytes that were freed on all devices."""
        before = self.used()
        if max(before.values()) <= self.threshold_bytes:
            return 0
        gc.collect()
        now = self.used()
        for device, count in now.items():
            over = count - self.threshold_bytes
            for cache in active.caches():
                if over <= 0:
                    break
                over -= cache.shrink(device, over)
        after = self.used()
        return sum(max(before[device] - after[device], 0) for device in before)

    def report(self) -> dict[str, Any]:
        """The figures in bytes, device by device, with what live arrays make up of them."""
        used, peaks, arrays = self.used(), self.peaks(), live_bytes()
        return {
            "limit_bytes": self.limit_bytes,
            "threshold_bytes": self.threshold_bytes,
            "devices": {
                str(device): {
                    "used_bytes": count,
                    "peak_bytes": peaks[device],
                    "live_array_bytes": arrays[device],
                }
                for device, count in used.items()
            },
        }

    def __enter__(self) -> TpuMemoryMonitor:
        self._samplers.append(Sampler(self.check, self._look_every).__enter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._samplers.pop().__exit__(kind, error, traceback)
        self.used()


def _allocator_peaks() -> dict[Any, int]:
    stats = {device: device.memory_stats() or {} for device in jax.local_devices()}
    return {device: int(one["peak_bytes_in_use"]) for device, one in stats.items() if "peak_bytes_in_use" in one}
