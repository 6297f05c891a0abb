"""Who wants to know of training steps, and who runs them: a recovery manager, an autoscaler, while their context is on.

A listener is told of each step that is done. A guard runs the step itself, and so can run it again. A placer says on
which devices the next step runs; a server asks it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

__all__ = [
    "Guard",
    "Listener",
    "Load",
    "Placer",
    "StateHolder",
    "called_off",
    "devices_wanted",
    "guarded",
    "guarding",
    "is_guarded",
    "is_placed",
    "listening",
    "placing",
    "report",
]

T = TypeVar("T")

Listener = Callable[[int, Any], None]
"""Called with the number of a step that is done and the state after it."""


class StateHolder(Protocol):
    """What has a state that can be taken and put back: a model, a trainer."""

    @property
    def steps_done(self) -> int: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


Guard = Callable[[StateHolder, Callable[[], Any]], Any]
"""Called with whose step it is and the step, which it runs; what the step returned."""

Load = Callable[[], Mapping[str, Any]]
"""What there is to do, by whoever does it: "utilization", a share of what the devices can; "waiting_minutes", what they
would take for all that waits; "steps" that were done."""


class Placer(Protocol):
    """Says where work goes on."""

    def place(self, devices: Sequence[Any], load: Load | None = None) -> Sequence[Any] | None:
        """Called between two steps with the devices that they run on: those for the next, or None to stay."""
        ...

    def called_off(self, devices: Sequence[Any]) -> None:
        """What `place` said last was not done: these are the devices still."""
        ...


_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("capibara_step_listeners", default=())
_GUARD: ContextVar[Guard | None] = ContextVar("capibara_step_guard", default=None)
_PLACER: ContextVar[Placer | None] = ContextVar("capibara_step_placer", default=None)


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


@contextlib.contextmanager
def guarding(guard: Guard) -> Iterator[None]:
    """Steps inside are run by the guard; by the innermost, where there are several."""
    before = _GUARD.get()
    _GUARD.set(guard)
    try:
        yield
    finally:
        _GUARD.set(before)


def guarded(holder: StateHolder, step: Callable[[], T]) -> T:
    """Run a step of the holder's state, by the guard where there is one. After a failure it may be run again."""
    guard = _GUARD.get()
    if guard is None:
        return step()
    result: T = guard(holder, step)
    return result


def is_guarded() -> bool:
    """Whether a guard runs steps here: then they are waited for inside of it."""
    return _GUARD.get() is not None


@contextlib.contextmanager
def placing(placer: Placer) -> Iterator[None]:
    """The placer says on which devices steps inside run, where their loop can move; the innermost, of several."""
    before = _PLACER.get()
    _PLACER.set(placer)
    try:
        yield
    finally:
        _PLACER.set(before)


def is_placed() -> bool:
    """Whether anybody says on which devices steps run."""
    return _PLACER.get() is not None


def devices_wanted(devices: Sequence[Any], load: Load | None = None) -> list[Any] | None:
    """The devices for the next step, where a placer wants others than these.

    Args:
      load: asked what there is to do, where a decision is due; without it the placer looks for itself.
    """
    placer = _PLACER.get()
    wanted = None if placer is None else placer.place(devices, load)
    return None if wanted is None or set(wanted) == set(devices) else list(wanted)


def called_off(devices: Sequence[Any]) -> None:
    """Tell the placer that what it wanted last was not done, and work goes on where it was."""
    placer = _PLACER.get()
    if placer is not None:
        placer.called_off(devices)
