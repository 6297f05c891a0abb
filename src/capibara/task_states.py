"""jax's states of a thread that follow an asyncio task: there while it runs, gone while it awaits.

jax keeps what a trace depends on per thread, and in jit's cache key. Another task may run on the same thread while a
coroutine awaits, and must not see what that one holds. asyncio runs every step of a task by `Handle._run`, in the
task's own context: the first coroutine that holds something puts a few lines around that method, which set what the
task about to run holds (it is in a `ContextVar`, which asyncio keeps apart task by task) and take it away afterwards.
A coroutine that something else drives, by another event loop or by hand, cannot be followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

__all__ = ["Held", "hold", "in_force", "may_be_suspended", "release", "tracing"]


class Held:
    """Something that a task holds; `states` makes the context manager that sets it for the thread."""

    def __init__(self, states: Callable[[], AbstractContextManager[Any]]) -> None:
        self.states = states


_HOLDS: contextvars.ContextVar[tuple[Held, ...]] = contextvars.ContextVar("capibara_held_by_task", default=())


class _Step:
    """One run of a handle: what is set for it on this thread now."""

    def __init__(self, context: contextvars.Context, frame: types.FrameType | None = None) -> None:
        self.context = context
        self.frame = frame
        """That of the handle's run, where it had begun before handles were followed: nothing ends it."""
        self.applied: tuple[Held, ...] = ()
        self._undo = contextlib.ExitStack()

    def set(self, held: tuple[Held, ...]) -> None:
        if held == self.applied:
            return
        self._undo.close()
        self.applied = ()
        with contextlib.ExitStack() as stack:
            for one in held:
                stack.enter_context(one.states())
            self._undo = stack.pop_all()
            self.applied = held

    def resume(self) -> None:
        self.set(self.context.get(_HOLDS, ()))

    def over(self) -> bool:
        """Whether its handle has run already; known of all but those that nothing ends."""
        return self.frame is not None and not _on_the_stack(self.frame)


class _Thread(threading.local):
    step: _Step | None = None


_THREAD = _Thread()
_LOCK = threading.Lock()
_original_run: Any = None


def hold(held: Held) -> bool:
    """Set something for the task that calls, until `release`; whether the task can be followed."""
    _HOLDS.set((*_HOLDS.get(), held))
    step = _step_of_this_task()
    if step is None:
        return False
    step.resume()
    return True


def release(held: Held) -> None:
    """Take it away, also from inside of what was held later."""
    _HOLDS.set(tuple(one for one in _HOLDS.get() if one is not held))
    step = _step_of_this_task()
    if step is not None:
        step.resume()


def in_force(held: Held) -> bool:
    """Whether jax's states of this thread have it."""
    step = _THREAD.step
    return step is not None and held in step.applied


def _step_of_this_task() -> _Step | None:
    step = _THREAD.step
    if step is None or step.over():
        step = _first_step()
    # A task that starts eagerly runs inside of another's step, in a context of its own: until it is resumed by a
    # handle of its own, nothing would take away what it holds when it awaits.
    if step is None or step.context.get(_HOLDS) is not _HOLDS.get():
        return None
    return step


def _first_step() -> _Step | None:
    """The step that asyncio is running now, by a method that did not follow it; from now on they are followed."""
    code = (_original_run or asyncio.Handle._run).__code__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return None
    _follow_handles()
    handle = frame.f_locals["self"]
    _THREAD.step = step = _Step(handle._context, frame)
    # When this step is done the next one takes away what it leaves; there is one.
    asyncio.get_running_loop().call_soon(_nothing, context=contextvars.Context())
    return step


def _nothing() -> None:
    pass


def _on_the_stack(frame: types.FrameType) -> bool:
    above: types.FrameType | None = sys._getframe(1)
    while above is not None and above is not frame:
        above = above.f_back
    return above is not None


def _follow_handles() -> None:
    global _original_run
    with _LOCK:
        if _original_run is not None:
            return
        _original_run = original = asyncio.Handle._run

        @functools.wraps(original)
        def run(self: Any) -> None:
            outer = _THREAD.step
            holds = self._context.get(_HOLDS, ())
            if outer is not None:
                outer.set(())
                if outer.over():
                    outer = None
            _THREAD.step = step = _Step(self._context)
            try:
                if holds:
                    step.set(holds)
                original(self)
            finally:
                step.set(())
                _THREAD.step = outer
                if outer is not None:  # a loop inside of a step
                    outer.resume()

        asyncio.Handle._run = run  # type: ignore[method-assign]


def tracing() -> bool:
    """Whether jax traces the code that calls."""
    try:
        # The public question that jax answers differently while it traces.
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


_SUSPENDABLE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


def may_be_suspended(frame: types.FrameType | None) -> bool:
    """Whether the `with` that calls us can be left half way by an await."""
    # A generator made into a context manager, and what enters on behalf of another: the `with` is further up.
    while frame is not None and (
        (frame.f_code.co_flags & inspect.CO_GENERATOR and not frame.f_code.co_flags & _SUSPENDABLE)
        or frame.f_code.co_name in ("__enter__", "__exit__", "enter_context")
    ):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_flags & _SUSPENDABLE)
