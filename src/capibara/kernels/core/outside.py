"""Ops from outside of the library, for processes that nobody imports them into: the command line and its workers.

A package that has ops says so by an entry point of the group `capibara.ops`; a module or a file is named by
`--import`. Either registers its ops when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import sys
from pathlib import Path

from capibara import user_file
from capibara.errors import CapibaraError, rule_error

__all__ = ["GROUP", "OutsideOpsError", "import_ops", "imported", "load_entry_points"]

GROUP = "capibara.ops"

_imported: dict[str, None] = {}
_entry_points_loaded = False


class OutsideOpsError(CapibaraError, ValueError):
    """A module of ops that cannot be imported; its own error is in the text and behind it."""


def import_ops(name: str) -> None:
    """Import the module of that name, or the file of that path (it ends in .py); once."""
    is_file = name.endswith(".py")
    key = str(Path(name).resolve()) if is_file else name
    if key in _imported:
        return
    if is_file:
        user_file.load(Path(key), "ops", OutsideOpsError)
    else:
        _import_module(name)
    _imported[key] = None


def imported() -> tuple[str, ...]:
    """What `import_ops` has imported: a worker process imports it too."""
    return tuple(_imported)


def _import_module(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise rule_error("What is imported is a module or a file", repr(name), "write my_package.ops or path/to/ops.py")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, and the installed command does not
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever the user's module raises is shown as its own
        raise OutsideOpsError(f"{name} cannot be imported. {type(error).__name__}: {error}") from error


def load_entry_points() -> None:
    """Import the ops of installed packages, once a process."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True  # before: a package that looks an op up while it is imported comes by here again
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            found = point.load()
            if inspect.isfunction(found):
                found()
        except Exception as error:
            _entry_points_loaded = False
            package = "a package" if point.dist is None else f"the package {point.dist.name} {point.dist.version}"
            raise OutsideOpsError(
                f"{package} brings ops by the entry point {point.name} = {point.value!r}, which cannot be loaded. "
                f"{type(error).__name__}: {error}. Fix: mend or uninstall it."
            ) from error
