"""Public names that load when they are first used, so that importing a package stays light.

A package lists its names once, by the module that each lives in, and once more for type checkers, as imports under
`TYPE_CHECKING`; `tests/test_house.py` holds the two against each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["exports"]


def exports(
    package: str,
    homes: Mapping[str, str],
    modules: Iterable[str] = (),
    missing: Callable[[str, str], AttributeError] | None = None,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        homes: Module below the package, or a whole dotted name -> the names it gives, apart by spaces.
        modules: Submodules that are public themselves.
        missing: What to raise for another name, from the package's name and the one asked for.

    Examples:
        >>> public, load, _ = exports("capibara", {"errors": "rule_error"}, modules=["precision"])
        >>> public, load("precision").__name__, load("rule_error").__name__
        (['precision', 'rule_error'], 'capibara.precision', 'rule_error')
    """
    home = {
        name: module if module.startswith("capibara.") else f"{package}.{module}"
        for module, names in homes.items()
        for name in names.split()
    }
    public = sorted([*home, *modules])

    def load(name: str) -> Any:
        if name in home:
            return getattr(importlib.import_module(home[name]), name)
        if name in public:
            return importlib.import_module(f"{package}.{name}")
        if missing is not None:
            raise missing(package, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return public, load, lambda: list(public)
