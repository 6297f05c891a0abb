"""When the devices had done what they were given, as the host can tell without a trace.

A result that somebody has says when it is there. A program whose results were all dropped does not: a small program is
put behind it in the device's queue, and waited for. That takes a while on an empty queue too (a launch, a kernel, the
way back to the host), which is not the program's time: it is measured once the queue is empty, and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

__all__ = ["FLUSH", "Queues", "last_ready", "still_computed"]

FLUSH = "capibara_flush"
"""What the small program is called; rows of it in a trace are not the user's."""
_TRIES = 5
# Of a flush that takes no longer than this many times one on an empty queue, nobody can say that it waited.
_SAME = 1.5


class Queues:
    """The queues of some devices.

    Args:
        flush: Put a small program at the end of every queue, and wait for all; None for those of this process's
            devices. A CPU has no queue.
        clock: In seconds.
    """

    def __init__(self, flush: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._flush, self._clock = flush, clock
        self._made = flush is not None
        self.idle_seconds: float | None = None
        """What a flush takes on empty queues; None before it was measured, or where there are none."""

    def calibrate(self) -> None:
        """Empty the queues, and measure what that takes when they are."""
        flush = self._flusher()
        if flush is None:
            return
        flush()
        # The shortest: others make it longer, and what is taken off is then too much.
        self.idle_seconds = min(self._timed(flush) for _ in range(_TRIES))

    def emptied(self, ready: float) -> float:
        """When the queues were empty. They are now, and `ready`, a time that has passed, is the least it can be."""
        flush = self._flusher()
        if flush is None:
            return ready
        asked = self._clock()
        flush()
        empty = self._clock()
        if self.idle_seconds is None:
            self.calibrate()
        assert self.idle_seconds is not None
        return ready if empty - asked <= _SAME * self.idle_seconds else max(ready, empty - self.idle_seconds)

    def _timed(self, flush: Callable[[], None]) -> float:
        started = self._clock()
        flush()
        return self._clock() - started

    def _flusher(self) -> Callable[[], None] | None:
        if not self._made:
            self._flush, self._made = _device_flush(), True
        return self._flush


def _device_flush() -> Callable[[], None] | None:
    def capibara_flush(x: jax.Array) -> jax.Array:
        return x + 1

    programs = []
    for device in jax.local_devices():
        if device.platform != "cpu":
            zero = jax.device_put(0.0, device).block_until_ready()
            programs.append((jax.jit(capibara_flush).lower(zero).compile(), zero))
    if not programs:
        return None

    def flush() -> None:
        jax.block_until_ready([program(zero) for program, zero in programs])

    return flush


def last_ready(asked: float, arrays: Iterable[Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """When the last of these arrays was there: now, where one has to be waited for, or else when it was asked."""
    waiting = [array for array in arrays if still_computed(array)]
    if not waiting:
        return asked
    jax.block_until_ready([array for array in waiting if not array.is_deleted()])
    return clock()


def still_computed(array: Any) -> bool:
    """Whether a device has yet to finish it. One that was donated or deleted says nothing."""
    return not array.is_deleted() and not array.is_ready()
