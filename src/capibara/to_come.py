"""The documented names whose rooms are still to come, and the one error that all of them give.

However such a name is asked for, the text is the same and names the table of what is there: an `AttributeError` for
`module.name`, so that `hasattr` says no; a `ModuleNotFoundError`, which is an `ImportError`, for `import module.name`
and `from module import name`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

__all__ = ["TO_COME", "announce", "no_attribute"]

TO_COME: dict[str, tuple[str, ...]] = {}
"""Module -> its names, and modules below it, that are documented and not there yet."""


def _is_to_come(module: str, name: str) -> bool:
    return name in TO_COME.get(module, ())


def _text(module: str, name: str) -> str:
    return (
        f"{module}.{name} is documented and not implemented yet in this version of capibara; docs/contract.md lists "
        f"every documented name and whether it is there"
    )


def no_attribute(module: str, name: str) -> AttributeError:
    """What a door's `__getattr__` raises for a name that it does not have."""
    if _is_to_come(module, name):
        return AttributeError(_text(module, name))
    return AttributeError(f"module {module!r} has no attribute {name!r}")


class _Finder(MetaPathFinder):
    """Stands last, and so is asked for what no other finder has: it finds nothing, and says why."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        module, _, name = fullname.rpartition(".")
        if _is_to_come(module, name):
            # Without the error's `name`: `from module import name` passes on what does not say that it is about
            # module.name, and replaces what does by a text of its own.
            raise ModuleNotFoundError(_text(module, name))


def announce(module: str) -> None:
    """Let imports from this door say which of its names are to come. The door calls it while it is imported."""
    # `from module import name` looks for a module of that name, and so asks the finder, only where there is a path.
    vars(sys.modules[module]).setdefault("__path__", [])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
