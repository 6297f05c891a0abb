"""jax settings changed for the whole process, and put back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["Overrides"]


class Overrides:
    """A set of jax settings that is applied and undone as one, any number of times.

    Undoing a setting leaves it alone when somebody else changed it in the meantime: their word is newer.
    """

    def __init__(self, settings: Mapping[str, tuple[Any, Any]]) -> None:
        """`settings`: jax's option name -> (its state object, the value to give it)."""
        self._settings = dict(settings)
        self._before: dict[str, Any] | None = None
        self._lock = threading.Lock()

    @property
    def applied(self) -> bool:
        return self._before is not None

    def apply(self) -> None:
        import jax

        with self._lock:
            if self._before is not None:
                return
            # The process's values, not this thread's: a `with jax.debug_nans(...)` around us will end.
            self._before = {name: state.get_global() for name, (state, _) in self._settings.items()}
            for name, (_, value) in self._settings.items():
                jax.config.update(name, value)

    def undo(self) -> None:
        import jax

        with self._lock:
            if self._before is None:
                return
            for name, before in self._before.items():
                state, value = self._settings[name]
                if state.get_global() == value:
                    jax.config.update(name, before)
            self._before = None
