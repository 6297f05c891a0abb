"""The optimisation context: kernel dispatch on, matmul precision, a mesh; everything back on exit.

Three of jax's states are set, all of them per thread: matmul precision, the mesh, and a user context that is
part of jit's cache key, so that what is traced inside is never reused outside nor the other way round. A
`with` in a plain function cannot be interrupted, so there jax's states hold the truth.

A coroutine can: another task runs on the same thread while it awaits. So what a `with` in a coroutine sets follows its
task (`task_states`): it is there while the task runs, in its own calls and in what it traces and jits, and not while
another does. A coroutine that asyncio does not run cannot be followed, nor a thread that a task hands work to. There
nothing of jax's states is set; the context is remembered in a `ContextVar` and applied only while a call that goes
through dispatch runs (`call`). A function that was jitted cannot be reached so; `OptimizationContext.run` calls it with
all in force, and entering says that once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from capibara import task_states
from capibara.errors import rule_error, say_once
from capibara.kernels.core import trusting
from capibara.mesh.mesh import MeshConfig
from capibara.mesh.overrides import Overrides
from capibara.precision import policy

__all__ = [
    "OptimizationContext",
    "OptimizationState",
    "active",
    "call",
    "current",
    "disable_everywhere",
    "enable_everywhere",
    "enabled_everywhere",
    "task_mesh",
    "tpu_v4_optimization_context",
]

P = ParamSpec("P")
R = TypeVar("R")


# Compared by identity and made once per value: jit compares it at every call.
@dataclass(frozen=True, eq=False)
class OptimizationState:
    """What is in force: the part of a context that changes what a traced function computes."""

    dispatch: bool
    precision: str


@functools.lru_cache(maxsize=64)
def _state(dispatch: bool, precision: str) -> OptimizationState:
    return OptimizationState(dispatch, precision)


_STATE = jax.make_user_context(default_value=None)

_ONLY_REMEMBERED = (
    "tpu_v4_optimization_context was entered in a coroutine that cannot be followed: asyncio does not run it, or it "
    "was started eagerly and has not awaited yet. Calls that go through dispatch are optimised there, but jax keeps "
    "precision, mesh and jit's cache key per thread, where other tasks would see them while this one awaits: a jitted "
    "function called directly runs as if outside. Call it with `context.run(function, ...)`, or put the `with` in a "
    "plain function."
)


class _Link(NamedTuple):
    """One entered context, and the one around it."""

    entry: _Entry
    outer: _Link | None


_INNERMOST: ContextVar[_Link | None] = ContextVar("capibara_optimization_context", default=None)


def current() -> OptimizationState | None:
    """What is in force for the code that calls; None outside of every context."""
    link = _INNERMOST.get()
    if link is not None and link.entry.remembered and not task_states.tracing():
        return link.entry.owner.state
    # Inside a trace jax's own state is the only truth, since it is what the trace is cached under.
    return _STATE.value


def active() -> bool:
    """Whether calls go through kernel dispatch here."""
    state = current()
    return state is not None and state.dispatch


def call(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call under what is in force; where no state of jax is set, this sets it for just this call."""
    link = _INNERMOST.get()
    if link is not None and link.entry.remembered and not task_states.tracing():
        return link.entry.owner.run(function, *args, **kwargs)
    return function(*args, **kwargs)


def task_mesh() -> Mesh | None:
    """The mesh of a context that is only remembered: jax does not know of it."""
    link = _INNERMOST.get()
    if link is None or not link.entry.remembered or task_states.tracing():
        return None
    while link is not None and link.entry.remembered:
        if link.entry.owner.mesh is not None:
            return link.entry.owner.mesh
        link = link.outer
    return None


class _Entry:
    """One time that a context was entered."""

    def __init__(self, owner: OptimizationContext, of_task: bool) -> None:
        self.owner = owner
        self.held = task_states.Held(self._states) if of_task else None
        self.thread = threading.get_ident()
        self._undo: contextlib.ExitStack | None = None

    @property
    def remembered(self) -> bool:
        """Of a coroutine that cannot be followed here: no state of jax has it."""
        return self.held is not None and not task_states.in_force(self.held)

    def _states(self) -> contextlib.ExitStack:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_STATE(self.owner.state))
            stack.enter_context(trusting.optimising(self.owner.state.dispatch))
            stack.enter_context(jax.default_matmul_precision(self.owner.matmul_precision))
            if self.owner.mesh is not None:
                stack.enter_context(jax.set_mesh(self.owner.mesh))
            return stack.pop_all()

    def apply(self) -> None:
        if self.held is None:
            self._undo = self._states()
        elif not task_states.hold(self.held):
            say_once(RuntimeWarning, None, _ONLY_REMEMBERED, stacklevel=3)

    def undo(self) -> None:
        if self.held is not None:
            task_states.release(self.held)
        elif self._undo is not None:
            self._undo.close()
            self._undo = None


class OptimizationContext:
    """A context manager and a decorator; one object may be entered many times, by any thread."""

    def __init__(self, mesh: Mesh | None, precision: str, dispatch: bool) -> None:
        self.mesh = mesh
        self.state = _state(dispatch, precision)
        self.matmul_precision = policy(precision).compute_dtype

    def __enter__(self) -> OptimizationContext:
        entry = _Entry(self, of_task=task_states.may_be_suspended(sys._getframe(1)))
        entry.apply()
        _INNERMOST.set(_Link(entry, _INNERMOST.get()))
        return self

    def __exit__(self, *exc: object) -> None:
        link, inner = _INNERMOST.get(), []
        while link is not None and link.entry.owner is not self:
            inner.append(link.entry)
            link = link.outer
        if link is None or (link.entry.held is None and link.entry.thread != threading.get_ident()):
            if task_states.may_be_suspended(sys._getframe(1)):
                # An async generator that the event loop closes elsewhere: nothing of this thread was changed.
                return
            raise RuntimeError(
                "An optimisation context was left in a thread or task that did not enter it. "
                "Fix: enter and leave it in the same one."
            )
        # Contexts held by generators may end out of order: those inside are taken off and put back.
        for entry in inner:
            entry.undo()
        link.entry.undo()
        outer = link.outer
        for entry in reversed(inner):
            entry.apply()
            outer = _Link(entry, outer)
        _INNERMOST.set(outer)

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a plain function with everything in force, also from a coroutine."""
        _must_be_plain(function)
        with self:
            return function(*args, **kwargs)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        _must_be_plain(function)

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return wrapped


def tpu_v4_optimization_context(
    mesh: Mesh | MeshConfig | None = None, precision: str = "bfloat16", dispatch: bool = True
) -> OptimizationContext:
    """Kernel dispatch on, matmuls at `precision`, and `mesh` set, for what runs inside the `with`.

    A mesh config is built over the attached devices. With no mesh, the one around stays. `dispatch=False` is
    a part without dispatch inside a part with it. In a coroutine that asyncio runs it is in force while that task
    runs, and not while it awaits.
    """
    if isinstance(mesh, MeshConfig):
        mesh = mesh.build()
    if mesh is not None and not isinstance(mesh, Mesh):
        raise rule_error("mesh is a jax Mesh or a MeshConfig", type(mesh).__name__, "pass one, or None")
    return OptimizationContext(mesh, precision, bool(dispatch))


_EVERYWHERE = Overrides({"jax_default_matmul_precision": (jax.default_matmul_precision, "bfloat16")})


def enable_everywhere() -> None:
    """What the context does, less the mesh, for every thread of the process until `disable_everywhere`."""
    _EVERYWHERE.apply()
    _STATE.set_global(_state(True, "bfloat16"))
    trusting.optimising.set_global(True)


def disable_everywhere() -> None:
    """Back to what was before `enable_everywhere`; contexts that are entered stay."""
    _STATE.set_global(None)
    trusting.optimising.set_global(False)
    _EVERYWHERE.undo()


def enabled_everywhere() -> bool:
    return _STATE.get_global() is not None


def _must_be_plain(function: Callable[..., Any]) -> None:
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
        or inspect.isgeneratorfunction(function)
    ):
        raise rule_error(
            "An optimisation context wraps plain functions, which it can enter and leave around the call",
            f"{getattr(function, '__qualname__', function)}, which runs after the call returns",
            "put the `with` inside of it",
        )
