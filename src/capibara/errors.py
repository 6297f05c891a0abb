"""Every exception of the library.

A caller's mistake is a `ValueError` (or `TypeError`) whose text says the rule, what arrived, and the fix;
`rule_error` writes that sentence so that every room words it alike. The classes below are for what
callers catch by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CapibaraError",
    "ImplementationRefused",
    "TPUError",
    "UnknownNameError",
    "rule_error",
    "unknown_name",
]


class CapibaraError(Exception):
    """Base of the library's own exceptions."""


class TPUError(CapibaraError, RuntimeError):
    """Something is wrong with the accelerator or the way it is set up."""


class UnknownNameError(CapibaraError, ValueError):
    """A name (op, implementation, chip, topology, option) that does not exist; the text lists the choices."""


class ImplementationRefused(CapibaraError, ValueError):
    """An implementation asked for by name cannot take this call; the text says why."""


def rule_error(rule: str, arrived: object, fix: str) -> ValueError:
    """A `ValueError` in the house form: the rule, what arrived, the fix."""
    return ValueError(f"{rule.rstrip('.')}. Got {arrived}. Fix: {fix.rstrip('.')}.")


def unknown_name(kind: str, name: object, choices: Iterable[object]) -> UnknownNameError:
    """An error for a name outside `choices`, with the nearest ones first."""
    listed = [str(choice) for choice in choices]
    nearest = difflib.get_close_matches(str(name), listed, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return UnknownNameError(f"Unknown {kind} {name!r}.{hint} Choices: {', '.join(map(repr, listed)) or 'none'}.")
