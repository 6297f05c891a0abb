"""What jax compiled while something ran, counted by the events that jax itself reports (`jax.monitoring`).

A program that comes from the cache on disk is asked of the compiler like any other, and answered without compiling:
`programs` counts both, `from_disk` those, and `compiled` the rest. Times are of the wall clock, each moment once: a
function that is traced inside of another is part of its time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["CompileCounts", "count_compilations"]

_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


class CompileCounts:
    """Counts that grow while the context is open, of all threads."""

    def __init__(self) -> None:
        self.programs = 0
        """That were asked of the compiler."""
        self.from_disk = 0
        """Of them, those that the cache on disk had."""
        self.names: list[str] = []
        """Of the functions, in the order in which their programs were ready; the last thousand."""
        self._spans: dict[str, list[tuple[float, float]]] = {_TRACE: [], _LOWER: [], _COMPILE: []}
        self._lock = threading.Lock()

    @property
    def compiled(self) -> int:
        """Programs that the compiler made."""
        return self.programs - self.from_disk

    @property
    def trace_seconds(self) -> float:
        """In which functions were traced and lowered: what no cache of programs saves."""
        with self._lock:
            return _covered(self._spans[_TRACE] + self._spans[_LOWER])

    @property
    def compile_seconds(self) -> float:
        """In which programs were compiled, or read from disk."""
        with self._lock:
            return _covered(self._spans[_COMPILE])

    def __repr__(self) -> str:
        return (
            f"CompileCounts({self.compiled} compiled, {self.from_disk} from disk, traced in {self.trace_seconds:.2f} s,"
            f" compiled or read in {self.compile_seconds:.2f} s)"
        )

    def _event(self, event: str, **_: str | int) -> None:
        if event == _HIT:
            with self._lock:
                self.from_disk += 1

    def _span(self, event: str, start_time: float, end_time: float, **about: str | int) -> None:
        spans = self._spans.get(event)
        if spans is None:
            return
        with self._lock:
            spans.append((start_time, end_time))
            if len(spans) > 4096:  # a process may live for months
                spans[:] = _merged(spans)[-2048:]
            if event == _COMPILE:
                self.programs += 1
                self.names.append(str(about.get("fun_name", "")))
                del self.names[:-1000]


@contextlib.contextmanager
def count_compilations() -> Iterator[CompileCounts]:
    """Counts what is compiled inside, whoever jitted it.

    >>> import jax
    >>> with count_compilations() as counts:
    ...     _ = jax.jit(lambda x: x * 3 + 4)(5)
    >>> counts.programs
    1
    """
    from jax import monitoring

    counts = CompileCounts()
    event, span = counts._event, counts._span
    monitoring.register_event_listener(event)
    monitoring.register_event_time_span_listener(span)
    try:
        yield counts
    finally:
        with contextlib.suppress(ValueError, AssertionError):  # somebody cleared all listeners
            monitoring.unregister_event_listener(event)
            monitoring.unregister_event_time_span_listener(span)


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _covered(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in _merged(spans))
