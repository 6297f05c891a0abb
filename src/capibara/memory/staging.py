"""Arrays of numpy on their way to a device, by way of memory of the host that the device reads by itself.

What lies in ordinary memory is copied by the driver, a piece at a time, while nothing else can be sent. So it is copied
into pinned memory first, by threads of its own, ahead of the transfer: while one array goes to the device, the next are
being copied. A few buffers are there at a time, however long the stream is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import jax

from capibara.memory.offload import host_kind, put

__all__ = ["BUFFERS", "Staging", "staging_kind"]

BUFFERS = 3
"""Staged arrays that are there at a time: one that goes to the device, and one that each thread fills."""
_THREADS = BUFFERS - 1


def staging_kind(sharding: Any) -> str | None:
    """The memory that arrays are staged in on their way there; None where there is none that helps.

    A CPU's memories are all the same.
    """
    device = next(iter(sharding.device_set))
    kind = None if device.platform == "cpu" else host_kind(device)
    return kind if kind == "pinned_host" else None


class Staging:
    """Stages arrays in an order, a few ahead of whoever takes them.

    Args:
        arrays: in the order in which they are taken; an array may come several times.
        sharding: where they go afterwards.
        kind: the memory they are staged in.
        stage: makes the staged one of an array and a sharding, and waits for it.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        sharding: Any,
        kind: str,
        stage: Callable[[Any, Any], jax.Array] = lambda array, where: put(array, where).block_until_ready(),
    ) -> None:
        self._where = sharding.with_memory_kind(kind)
        self._stage = stage
        self._turn = threading.Condition()
        self._taken = self._most = self._there = 0
        self._seconds = 0.0
        self._stopped = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="capibara-memory-staging")
        self._staged: deque[Future[jax.Array]] = deque(
            self._threads.submit(self._copied, number, array) for number, array in enumerate(arrays)
        )

    def send(self, transfer: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The next array, `transfer`red from where it was staged; its buffer is free again afterwards."""
        future = self._staged.popleft()  # and whoever had it in mind lets go of its buffer
        try:
            return transfer(future.result())
        finally:
            del future
            with self._turn:
                self._taken += 1
                self._there -= 1
                self._turn.notify_all()

    def stop(self) -> None:
        """Nobody takes more. Returns when no thread reads from the arrays any longer."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._staged.clear()

    def stats(self) -> dict[str, float]:
        """Arrays that were staged and taken, the most that were there at a time, and the threads' seconds."""
        return {"staged": self._taken, "most_staged": self._most, "staging_seconds": self._seconds}

    def _copied(self, number: int, array: Any) -> jax.Array:
        with self._turn:
            # By number, so that the one that is wanted next has a buffer whatever the others do.
            self._turn.wait_for(lambda: self._stopped or number < self._taken + BUFFERS)
            if self._stopped:
                raise CancelledError
            self._there += 1
            self._most = max(self._most, self._there)
        started = time.perf_counter()
        staged = self._stage(array, self._where)
        with self._turn:
            self._seconds += time.perf_counter() - started
        return staged
