"""`capibara.jax` where jax cannot be imported: its diagnostics, and for every other name the reason and the fix."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

__all__ = ["REINSTALL", "described", "reason", "stand_in"]

REINSTALL = "pip install --upgrade --force-reinstall jax jaxlib"

_PREFIX = "capibara.jax"
# What imports without jax.
_WHOLE = ("diagnostics",)

_error: Exception | None = None


def reason() -> Exception | None:
    """What importing jax raised; None where it works."""
    return _error


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def stand_in(error: Exception) -> None:
    """Let `capibara.jax` be imported without jax, for its diagnostics alone."""
    global _error
    _error = error
    sys.modules[_PREFIX].__class__ = _BrokenModule
    sys.meta_path.insert(0, _Finder())


def _refusal(name: str) -> ImportError:
    assert _error is not None
    text = (
        f"capibara.jax stands on jax, which cannot be imported here ({described(_error)}). Fix: {REINSTALL}. "
        "capibara.jax.diagnostics.check_installation() says what else is missing."
    )
    refusal = ImportError(text, name=name)
    refusal.__cause__ = _error
    return refusal


class _BrokenModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in _WHOLE:
            return importlib.import_module(f"{_PREFIX}.{name}")
        if name.startswith("__"):  # what Python itself looks for on any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise _refusal(f"{_PREFIX}.{name}")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.startswith(f"{_PREFIX}.") and fullname[len(_PREFIX) + 1 :] not in _WHOLE:
            raise _refusal(fullname)
