"""`capibara.jax.<path>` is `jax.<path>`, by any form of import.

A module that nothing is changed in *is* jax's module, under a second name in `sys.modules`. One that holds a
changed or a removed name, at any depth, is an `AliasModule`: it owns those names and asks jax's module for
every other one, each time, so that no object is copied or goes stale.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from capibara.dropin.changed import CHANGED, dispatching
from capibara.dropin.compat import MODULES, NAMES, Gone
from capibara.dropin.targets import load
from capibara.dropin.unserved import why_not
from capibara.errors import say_once
from capibara.jax_releases import find
from capibara.to_come import TO_COME, no_attribute

__all__ = ["ALIASED", "AliasModule", "Same", "adopt", "install"]

_PREFIX = "capibara.jax"
_HERE = Path(__file__).parents[1] / "jax"


def _parents(paths: Iterable[str]) -> frozenset[str]:
    found = set()
    for path in paths:
        while path := path.rpartition(".")[0]:
            found.add(path)
    return frozenset(found)


ALIASED = _parents([*CHANGED, *NAMES, *MODULES, "_src.core.own"])
"""Paths below jax whose module is an `AliasModule`, if there is one. The others are jax's own modules."""


class AliasModule(ModuleType):
    """Names of its own, then those of jax's module, then those that jax removed."""

    def __getattr__(self, name: str) -> Any:
        state: _State | None = self.__dict__.get("__alias__")
        if state is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path = f"{state.path}.{name}" if state.path else name
        if name in state.lazy:
            return load(state.lazy[name])
        if name == "__all__":
            return _public(self)
        said = ""
        if state.real is not None:
            try:
                value = getattr(state.real, name)
            except AttributeError as error:
                said = str(error)
            else:
                if path in ALIASED and isinstance(value, ModuleType):
                    return importlib.import_module(f"{_PREFIX}.{path}")
                return value
        if path in NAMES:
            say_once(DeprecationWarning, NAMES[path], "%s", NAMES[path], stacklevel=2)
            return load(NAMES[path].new)
        if path in MODULES:
            return importlib.import_module(f"{_PREFIX}.{path}")
        if name in TO_COME.get(self.__name__, ()):
            raise no_attribute(self.__name__, name)
        raise AttributeError(_unknown(self, name, said))

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a module that is gone would put it where jax has another object of that name by now, as
        # `from jax.config import config` would on `jax.config`.
        state: _State | None = self.__dict__.get("__alias__")
        if isinstance(value, AliasModule) and state is not None:
            inner = value.__dict__["__alias__"]
            if inner.gone is not None and (name in self.__dict__ or hasattr(state.real, name)):
                return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        state: _State = self.__dict__["__alias__"]
        return sorted({*dir(state.real), *state.own, *state.lazy} if state.real is not None else _names(state))


class _State:
    """What an alias module knows of itself."""

    def __init__(self, path: str, real: ModuleType | None, gone: Gone | None = None) -> None:
        self.path = path
        """Below jax; empty for jax itself."""
        self.real = real
        """jax's module, or what stands in for one that is gone; None when nothing does."""
        self.gone = gone
        self.own: frozenset[str] = frozenset()
        self.lazy: Mapping[str, str] = {}


def _names(state: _State) -> set[str]:
    """The removed names that are listed for this module."""
    prefix = f"{state.path}." if state.path else ""
    rest = (path[len(prefix) :] for path in (*NAMES, *MODULES) if path.startswith(prefix))
    return {name for name in rest if "." not in name}


def _public(module: AliasModule) -> list[str]:
    """What `from module import *` gives: what jax's module gives, and the names that are ours."""
    state: _State = module.__dict__["__alias__"]
    if state.real is None:
        return sorted(_names(state))
    listed = getattr(state.real, "__all__", None)
    public = [name for name in vars(state.real) if not name.startswith("_")] if listed is None else list(listed)
    return sorted({*public, *state.own, *state.lazy})


def _unknown(module: AliasModule, name: str, said: str) -> str:
    state: _State = module.__dict__["__alias__"]
    text = f"module {module.__name__!r} has no attribute {name!r}"
    if said and "has no attribute" not in said:
        text = f"{text}: {said.rstrip('.')}"
    if name.startswith("__"):
        return text
    path = f"jax.{state.path}.{name}" if state.path else f"jax.{name}"
    history = find(path)
    if history is not None and history.removed is not None:
        reason = why_not(path)
        return f"{text}: jax {history.removed} removed it" + (f"; {reason}" if reason else "")
    near = difflib.get_close_matches(name, {*dir(module), *_names(state)}, n=3, cutoff=0.6)
    return f"{text}. Nearest: {', '.join(near)}" if near else text


class Same(Loader):
    """Puts jax's own module in `sys.modules` under the second name; the module itself is not touched."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what stands in sys.modules after this, and leaves its attributes alone.
        sys.modules[module.__name__] = importlib.import_module(self._real)
        # It would bind a submodule that is imported later in this very package, which is jax's: over a function of the
        # submodule's name, where there is one. What is imported already keeps its place by being known here already.
        for name in [name for name in sys.modules if name.rpartition(".")[0] == self._real]:
            short = name.rpartition(".")[2]
            if not isinstance(getattr(sys.modules[self._real], short, None), ModuleType):
                sys.modules.setdefault(f"{module.__name__}.{short}", sys.modules[name])


class _Alias(Loader):
    """Makes an `AliasModule`."""

    def __init__(self, path: str, real: str | None) -> None:
        self._path = path
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AliasModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if self._real is not None:
            _fill(module, _State(self._path, importlib.import_module(self._real)))
            return
        gone = MODULES[self._path]
        if gone.new:  # else each of its names has a row, and says so when it is used
            say_once(DeprecationWarning, gone, "%s", gone, stacklevel=2)
        _fill(module, _State(self._path, load(gone.new) if gone.new else None, gone))


def _fill(module: ModuleType, state: _State) -> None:
    module.__dict__["__alias__"] = state
    module.__doc__ = module.__doc__ or getattr(state.real, "__doc__", None)
    for path in CHANGED:
        parent, _, name = path.rpartition(".")
        if parent == state.path:
            module.__dict__[name] = dispatching(path, getattr(state.real, name))


def adopt(name: str, own: Iterable[str], lazy: Mapping[str, str] | None = None) -> None:
    """Make the module of this name, which has names of its `own`, an alias of jax's for every other one.

    `lazy`: more names, each with the object to load when it is first asked for.
    """
    module = sys.modules[name]
    path = name[len(_PREFIX) + 1 :]
    state = _State(path, importlib.import_module(f"jax.{path}" if path else "jax"))
    state.own, state.lazy = frozenset(own), dict(lazy or {})
    module.__class__ = AliasModule
    _fill(module, state)


class _Finder(MetaPathFinder):
    """Finds `capibara.jax.<path>` wherever this package has no file for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_PREFIX}."):
            return None
        below = fullname[len(_PREFIX) + 1 :]
        if _is_file(below):
            return PathFinder.find_spec(fullname, path, target)
        real = _spec_of_jax(below)
        if below in ALIASED or (real is None and below in MODULES):
            if real is None and below not in MODULES:
                return None
            origin = real.origin if real else None
            spec = ModuleSpec(fullname, _Alias(below, real.name if real else None), origin=origin)
            # Read by the import system for submodules; every one of them is found here before it looks there.
            spec.submodule_search_locations = real.submodule_search_locations if real else None
            return spec
        if real is not None:
            return ModuleSpec(fullname, Same(real.name))
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is None:
            # A folder of type stubs for a module that this jax does not have; it is no package.
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return found


def _is_file(below: str) -> bool:
    base = _HERE.joinpath(*below.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def _spec_of_jax(below: str) -> ModuleSpec | None:
    name = f"jax.{below}"
    parent = name.rpartition(".")[0]
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The parent may be one of the modules that are gone; any other missing module is a real error.
        if error.name is not None and (error.name == name or parent.startswith(error.name)):
            return None
        raise


def install() -> None:
    """Put the finder in front of the ordinary ones, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
