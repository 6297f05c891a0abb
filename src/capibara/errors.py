"""Every exception of the library, and what it says once.

A caller's mistake is a `ValueError` (or `TypeError`) whose text says the rule, what arrived, and the fix;
`rule_error` writes that sentence so that every room words it alike. The classes below are for what
callers catch by name. `say_once` is for what is right and may surprise.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import logging
import re
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from capibara.lru import LRU

__all__ = [
    "CapibaraError",
    "CheckpointError",
    "ImplementationRefused",
    "TPUError",
    "UnknownNameError",
    "parts_of",
    "rule_error",
    "runtime_errors",
    "runtime_status",
    "say_again",
    "say_once",
    "unknown_name",
    "unsaid",
]

_Error = TypeVar("_Error", bound=ValueError)
_STATUS = re.compile(
    r"\s*(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|"
    r"UNAUTHENTICATED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|"
    r"DATA_LOSS): "
)
_PARTS = ("rule", "got", "fix")
_SAID: LRU[Hashable, None] = LRU(8192)
_UNSAID: contextvars.ContextVar[bool] = contextvars.ContextVar("unsaid", default=False)


class CapibaraError(Exception):
    """Base of the library's own exceptions."""


class TPUError(CapibaraError, RuntimeError):
    """Something is wrong with the accelerator or the way it is set up."""


class CheckpointError(CapibaraError, RuntimeError):
    """There is no checkpoint that can be restored; `damaged` says what is wrong with each that is there."""

    def __init__(self, text: str, damaged: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.damaged = dict(damaged or {})


class UnknownNameError(CapibaraError, ValueError):
    """A name (op, implementation, chip, topology, option) that does not exist; the text lists the choices."""


class ImplementationRefused(CapibaraError, ValueError):
    """An implementation asked for by name cannot take this call; the text says why."""


def rule_error(rule: str, arrived: object, fix: str) -> ValueError:
    """A `ValueError` in the house form: the rule, what arrived, the fix. `parts_of` gives them back one by one."""
    rule, fix = rule.rstrip("."), fix.rstrip(".")
    return _with_parts(ValueError(f"{rule}. Got {arrived}. Fix: {fix}."), rule, str(arrived), fix)


def unknown_name(kind: str, name: object, choices: Iterable[object]) -> UnknownNameError:
    """An error for a name outside `choices`, with the nearest ones first."""
    listed = [str(choice) for choice in choices]
    nearest = difflib.get_close_matches(str(name), listed, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    shown = ", ".join(map(repr, listed)) or "none"
    error = UnknownNameError(f"Unknown {kind} {name!r}.{hint} Choices: {shown}.")
    fix = f"use {nearest[0]!r}" if nearest else "use one of the choices"
    return _with_parts(error, f"The choices of {kind} are {shown}", repr(name), fix)


def runtime_errors() -> tuple[type[Exception], ...]:
    """The types that an error of JAX's runtime has, for an `except` clause; `runtime_status` tells whether it is one.

    It is a JaxRuntimeError, but where a jitted function that has run before is called again: that way through JAX
    raises a ValueError of the same text.
    """
    import jax

    return jax.errors.JaxRuntimeError, ValueError


def runtime_status(error: BaseException) -> str | None:
    """The status that JAX's runtime gives its errors; None for any other error.

    >>> runtime_status(ValueError("UNAVAILABLE: device 3 is gone"))
    'UNAVAILABLE'
    >>> runtime_status(ValueError("heads must divide hidden")) is None
    True
    """
    found = _STATUS.match(str(error)) if isinstance(error, runtime_errors()) else None
    return found.group(1) if found else None


def parts_of(error: BaseException) -> dict[str, str | None]:
    """`rule`, `got` and `fix` of an error in the house form; None for each where it has another."""
    return dict.fromkeys(_PARTS) | getattr(error, "parts", {})


def _with_parts(error: _Error, *parts: str) -> _Error:
    # An attribute and no class of its own: whoever catches, prints or sends it to another process sees a ValueError.
    error.parts = dict(zip(_PARTS, parts, strict=True))  # type: ignore[attr-defined]
    return error


def say_once(
    to: logging.Logger | type[Warning],
    key: Hashable,
    text: str,
    *values: object,
    level: int = logging.WARNING,
    stacklevel: int = 1,
) -> bool:
    """Say something the first time in this process that it comes; whether it was said now.

    The last few thousand that were said are remembered. Nothing is formatted that is not said.

    Args:
      to: a logger, or the class of a warning.
      key: what tells one saying of this text from another.
      text: with `%` for the values, as logging has it.
      level: of a log line.
      stacklevel: whose line it is, as in `warnings.warn`: 1 is the caller of `say_once`.
    """
    if _UNSAID.get() or not _SAID.add((text, key), None):
        return False
    if isinstance(to, logging.Logger):
        to.log(level, f"{text} (said once)", *values, stacklevel=stacklevel + 1)
    else:
        warnings.warn(text % values if values else text, to, stacklevel=stacklevel + 1)
    return True


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """Inside, `say_once` says nothing and remembers nothing: for what is looked at and does not run here.

    >>> with unsaid():
    ...     say_once(UserWarning, "example", "nobody hears this")
    False
    """
    token = _UNSAID.set(True)
    try:
        yield
    finally:
        _UNSAID.reset(token)


def say_again() -> None:
    """Forget what was said: all of it may be said once more."""
    _SAID.clear()
