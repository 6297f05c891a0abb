"""jax's config object, with two options more."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import jax

from capibara.dropin.compat import NAMES
from capibara.errors import rule_error, say_once
from capibara.mesh import context
from capibara.mesh.overrides import Overrides

__all__ = ["config"]

_DEBUG_MODE = Overrides(
    {
        "jax_check_tracer_leaks": (jax.check_tracer_leaks, True),
        "jax_debug_nans": (jax.debug_nans, True),
        "jax_log_compiles": (jax.log_compiles, True),
    }
)

# option -> (read, turn on, turn off)
_OPTIONS: dict[str, tuple[Callable[[], bool], Callable[[], None], Callable[[], None]]] = {
    "enable_tpu_optimizations": (
        context.enabled_everywhere,
        context.enable_everywhere,
        context.disable_everywhere,
    ),
    "jax_debug_mode": (lambda: _DEBUG_MODE.applied, _DEBUG_MODE.apply, _DEBUG_MODE.undo),
}


class _Config(type(jax.config)):  # type: ignore[misc]
    """Everything of `jax.config`, and:

    - `enable_tpu_optimizations`: the optimisation context for the whole process, in every thread;
    - `jax_debug_mode`: checks for tracer leaks and NaNs and logs compiles; off puts back what was set before.

    It has the class of jax's object and none of its state, so that what is inherited reads jax's own.
    """

    def __init__(self) -> None:
        pass

    def update(self, name: str, val: Any) -> None:
        """Set an option, jax's or one of the two."""
        if name in _OPTIONS:
            if not isinstance(val, bool):
                raise rule_error(f"{name} is True or False", repr(val), f"config.update({name!r}, True)")
            _OPTIONS[name][1 if val else 2]()
            return
        known = [*jax.config.values, *_OPTIONS]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f". Nearest: {', '.join(near)}" if near else ""
            raise AttributeError(f"Unrecognized config option: {name}{hint}")
        jax.config.update(name, val)

    def read(self, name: str) -> Any:
        return _OPTIONS[name][0]() if name in _OPTIONS else jax.config.read(name)

    @property
    def values(self) -> dict[str, Any]:
        return {**jax.config.values, **{name: read() for name, (read, _, _) in _OPTIONS.items()}}

    @property
    def config(self) -> _Config:
        """Itself: `jax.config` was a module with this object in it."""
        gone = NAMES["config.config"]
        say_once(DeprecationWarning, gone, "%s", gone, stacklevel=2)
        return self

    def __getattr__(self, name: str) -> Any:
        return _OPTIONS[name][0]() if name in _OPTIONS else getattr(jax.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPTIONS:
            self.update(name, value)
        else:
            setattr(jax.config, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(jax.config), *_OPTIONS})

    def __repr__(self) -> str:
        return f"<capibara.jax.config over {jax.config!r}>"


config = _Config()
