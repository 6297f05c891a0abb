"""Who takes part in training steps: a recovery manager that runs them again, an autoscaler that counts them.

A model's `train_step` and the trainer run their steps by `run` and tell of them by `report`; those who take part say so
while their context is entered. This room lies below theirs, and knows none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

__all__ = ["Holder", "Listener", "Runner", "listening", "report", "run", "running"]

R = TypeVar("R")


class Holder(Protocol):
    """What has a training state that can be taken and put back."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


Listener = Callable[[int, Any], None]
"""Called with the number of a step that is done and the state after it."""
Runner = Callable[..., Any]
"""Called with a holder, its step, and the step's arguments; it gives what the step gives."""

_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("capibara_step_listeners", default=())
_RUNNER: ContextVar[Runner | None] = ContextVar("capibara_step_runner", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Steps that are done inside are told to the listener."""
    before = _LISTENERS.get()
    _LISTENERS.set((*before, listener))
    try:
        yield
    finally:
        _LISTENERS.set(before)


@contextlib.contextmanager
def running(runner: Runner) -> Iterator[None]:
    """Steps that are run inside are run by the runner."""
    before = _RUNNER.get()
    _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.set(before)


def report(step: int, state: Any) -> None:
    """Tell every listener, the outermost first."""
    for listener in _LISTENERS.get():
        listener(step, state)


def run(holder: Holder, step: Callable[..., R], *args: Any) -> R:
    """The step of something that holds a state, by the runner in force; as it is without one."""
    runner = _RUNNER.get()
    return step(*args) if runner is None else runner(holder, step, *args)
