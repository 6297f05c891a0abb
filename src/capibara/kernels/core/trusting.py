"""Which evidence dispatch may act on: `trust`, a setting of the process or of what runs inside of a `with`."""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextvars import ContextVar
from typing import Any, Literal

import jax

from capibara import task_states
from capibara.errors import say_once, unknown_name

__all__ = ["LEVELS", "Trust", "optimising", "trust", "trusted"]

Level = Literal["measured", "predicted"]
LEVELS: tuple[Level, ...] = ("measured", "predicted")

_explicit = jax.make_user_context(None)
optimising = jax.make_user_context(False)
"""Whether an optimisation context is around; `capibara.mesh.context` enters it."""
_ONLY_REMEMBERED = (
    "trust() was entered in a coroutine that cannot be followed: asyncio does not run it, or it was started eagerly "
    "and has not awaited yet. Ops that are called directly go by it there, and a jitted function runs as if outside, "
    "since jax keeps what is in jit's cache key per thread. Put the `with` in a plain function."
)


class _Inside:
    """One `with trust(...)` that was entered, and the one around it."""

    def __init__(self, owner: Trust, of_task: bool, outer: _Inside | None) -> None:
        self.owner, self.outer = owner, outer
        self.held = task_states.Held(lambda: _explicit(owner.level)) if of_task else None
        self._state: Any = None

    @property
    def remembered(self) -> bool:
        """Of a coroutine that cannot be followed here: no state of jax has it."""
        return self.held is not None and not task_states.in_force(self.held)

    def apply(self) -> None:
        if self.held is None:
            self._state = _explicit(self.owner.level)
            self._state.__enter__()
        elif not task_states.hold(self.held):
            say_once(RuntimeWarning, None, _ONLY_REMEMBERED, stacklevel=3)

    def undo(self) -> None:
        if self.held is None:
            self._state.__exit__(None, None, None)
        else:
            task_states.release(self.held)


_INNERMOST: ContextVar[_Inside | None] = ContextVar("capibara_trust", default=None)
# The settings of the process, the latest last. A `with` takes back its own and no other, whatever threads have set
# between its two steps; of those that nobody takes back the last alone matters.
_settings: deque[Trust] = deque(maxlen=256)
_lock = threading.Lock()


class Trust:
    """What `trust` returns: a setting that is in force already, and as a context manager only inside of its `with`.

    In a coroutine the `with` follows the task, as an optimisation context does. One object may be entered again.
    """

    def __init__(self, level: Level | None) -> None:
        self.level = level
        with _lock:
            _settings.append(self)
            _explicit.set_global(level)

    def __enter__(self) -> Trust:
        with _lock:
            if self in _settings:
                _settings.remove(self)
                _explicit.set_global(_settings[-1].level if _settings else None)
        inside = _Inside(self, task_states.may_be_suspended(sys._getframe(1)), _INNERMOST.get())
        inside.apply()
        _INNERMOST.set(inside)
        return self

    def __exit__(self, *exc: object) -> None:
        inside, later = _INNERMOST.get(), []
        while inside is not None and inside.owner is not self:
            later.append(inside)
            inside = inside.outer
        if inside is None:  # an async generator that the event loop closes elsewhere: nothing was set here
            return
        # Held by generators, they may end out of order: those inside are taken off and put back.
        for one in later:
            one.undo()
        inside.undo()
        outer = inside.outer
        for one in reversed(later):
            one.apply()
            one.outer, outer = outer, one
        _INNERMOST.set(outer)

    def __repr__(self) -> str:
        return f"trust({self.level!r})"


def trust(level: str | None) -> Trust:
    """Which evidence dispatch may act on, for the process from now on, or inside of a `with`.

    Args:
      level: "measured", what ran on this chip; "predicted", also what its compiler's figures say; None for what holds
        by itself: predictions inside an optimisation context, and measurements outside of one.

    >>> with trust("predicted"):
    ...     trusted()
    'predicted'
    >>> trusted()
    'measured'
    """
    if level is not None and level not in LEVELS:
        raise unknown_name("evidence", level, LEVELS)
    return Trust(level)


def trusted() -> Level:
    """What dispatch acts on here; what `trust` says comes before an optimisation context."""
    inside = _INNERMOST.get()
    if inside is not None and inside.remembered and not task_states.tracing():
        explicit = inside.owner.level
    else:
        # Inside a trace jax's own state is the only truth, since it is what the trace is cached under.
        explicit = _explicit.value
    if explicit is not None:
        return explicit
    return "predicted" if optimising.value else "measured"
