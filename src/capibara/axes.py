"""The table that puts logical axes on mesh axes, and which one is in force.

What a constraint means is decided while a function is traced, so the table is part of jit's cache key: a function
traced under one table is never reused under another. jax keeps that per thread. In a coroutine, where another task
runs on the same thread while this one awaits, the table follows the task; where it cannot, it is seen by calls outside
of jit (`capibara.task_states` says more about this).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax

from capibara import task_states
from capibara.errors import rule_error, say_once

__all__ = ["RULES", "MeshAxes", "Rules", "checked_rules", "current_rules", "mesh_axes_of", "use_rules"]

MeshAxes: TypeAlias = str | tuple[str, ...] | None
"""Where one logical axis goes: a mesh axis, several (the first is the outermost), or nowhere."""
Rules: TypeAlias = Mapping[str, MeshAxes]

RULES: Rules = MappingProxyType(
    {
        "batch": "data",
        "hidden": "model",
        "heads": "model",
        "mlp": "model",
        "vocab": "model",
        "expert": "expert",
        "sequence": "sequence",
        "stage": "pipeline",
    }
)
"""Logical axis -> mesh axis, where nothing else is said (`capibara.mesh.use_rules` says otherwise)."""

_Items: TypeAlias = tuple[tuple[str, MeshAxes], ...]


class _Table(NamedTuple):
    items: _Items
    held: task_states.Held | None
    """By the task of a coroutine."""


_IN_FORCE = jax.make_user_context(default_value=None)
_ONLY_REMEMBERED = (
    "use_rules was entered in a coroutine that cannot be followed: asyncio does not run it, or it was started eagerly "
    "and has not awaited yet. Constraints outside of jit follow it there, but jax keeps what jit sees per thread, "
    "where other tasks would see it while this one awaits: a jitted function follows the rules around. Put the "
    "`with` in a plain function that calls the jitted one."
)
_HELD: ContextVar[_Table | None] = ContextVar("capibara_rules", default=None)


def current_rules() -> Rules:
    """The table in force for the code that calls; `RULES` outside of every `use_rules`."""
    table = _HELD.get()
    remembered = table is not None and table.held is not None and not task_states.in_force(table.held)
    if table is not None and remembered and not task_states.tracing():
        return _table(table.items)
    # Inside a trace jax's own state is the only truth, since it is what the trace is cached under.
    items = _IN_FORCE.value
    return RULES if items is None else _table(items)


@contextlib.contextmanager
def use_rules(rules: Rules, *, replace: bool = False) -> Iterator[Rules]:
    """Constraints written by logical names follow these rules for what runs inside of the `with`.

    What `rules` does not name stays as the table around has it; with `replace` it is gone, and naming it is an error.

    Examples:
        >>> with use_rules({"batch": ("data", "expert"), "vocab": None}):
        ...     current_rules()["batch"], current_rules()["vocab"], current_rules()["mlp"]
        (('data', 'expert'), None, 'model')
    """
    table = checked_rules(rules)
    items: _Items = tuple((table if replace else {**current_rules(), **table}).items())
    held = None
    if task_states.may_be_suspended(sys._getframe(0)):
        held = task_states.Held(lambda: _IN_FORCE(items))
        if not task_states.hold(held):
            say_once(RuntimeWarning, None, _ONLY_REMEMBERED, stacklevel=3)
    before = _HELD.get()
    _HELD.set(_Table(items, held))
    try:
        with contextlib.nullcontext() if held is not None else _IN_FORCE(items):
            yield _table(items)
    finally:
        # Not by token: an async generator may be closed in another context than it was started in.
        _HELD.set(before)
        if held is not None:
            task_states.release(held)


@functools.lru_cache(maxsize=256)
def _table(items: _Items) -> Rules:
    return MappingProxyType(dict(items))


def checked_rules(rules: Any) -> dict[str, MeshAxes]:
    """The table with its lists as tuples; an error where it is not one."""
    if not isinstance(rules, Mapping):
        raise rule_error("Rules are a mapping of logical axes to mesh axes", repr(rules), 'use {"batch": "data"}')
    return {_name(name): _value(name, value) for name, value in rules.items()}


def mesh_axes_of(value: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule, as a tuple."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise rule_error("A logical axis is a word", repr(name), 'name it, for instance "batch"')
    return name


def _value(name: str, value: Any) -> MeshAxes:
    axes = tuple(value) if isinstance(value, list | tuple) else value
    listed = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    if not all(isinstance(axis, str) and axis for axis in listed) or len(set(listed)) != len(listed):
        raise rule_error(
            "A rule's value is a mesh axis, a tuple of different mesh axes, or None",
            f"{value!r} for {name!r}",
            f'use "data", ("data", "expert") or None for {name!r}',
        )
    return axes
