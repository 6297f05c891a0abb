"""Who wants to know of training steps: a recovery manager, an autoscaler. They listen while their context is entered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["Listener", "listening", "report"]

Listener = Callable[[int, Any], None]
"""Called with the number of a step that is done and the state after it."""

_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("capibara_step_listeners", default=())


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Steps that are done inside are told to the listener."""
    before = _LISTENERS.get()
    _LISTENERS.set((*before, listener))
    try:
        yield
    finally:
        _LISTENERS.set(before)


def report(step: int, state: Any) -> None:
    """Tell every listener, the outermost first."""
    for listener in _LISTENERS.get():
        listener(step, state)
