"""What became of a name of jax: from the generated table of releases and the drop-in's table of old names."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from capibara.dropin.compat import MODULES, NAMES, Gone
from capibara.dropin.unserved import serves, why_not
from capibara.jax_releases import RELEASES, NameHistory, find

__all__ = ["OLDEST", "SHORTER", "Fate", "fate", "in_every_supported_release", "is_public"]

OLDEST = "0.10.2"
"""The first jax that capibara runs on; the last is the newest of the table."""

SHORTER = {
    f"jax.tree_util.tree_{name}": f"jax.tree.{name}"
    for name in ("all", "flatten", "leaves", "map", "reduce", "structure", "transpose", "unflatten")
}
"""The same functions under the name that jax teaches today, which `import jax` alone reaches."""
_SAME = {"jax.config.config": "jax.config"}
"""Where the drop-in serves more than the same object of jax, so that its own table does not name jax's."""


@dataclass(frozen=True)
class Fate:
    """What became of a name that not every supported jax has, or that warns."""

    path: str
    """As code spells it: "jax.tree_map"."""
    is_module: bool
    removed: str | None
    """The first release without it, in words; None where it only warns."""
    deprecated: str | None
    instead: str | None
    """The name of plain jax, or of Python, that means the same on every supported jax."""
    advice: str
    """What to write instead, in words, where no name means the same."""
    served: bool
    """Whether capibara.jax still has it, under its old name."""

    @property
    def code(self) -> str:
        if self.removed is None:
            return "CAP207"
        if self.instead is not None:
            return "CAP202" if self.instead.rpartition(".")[2] == self.path.rpartition(".")[2] else "CAP203"
        return "CAP204" if self.is_module else "CAP201"

    @property
    def message(self) -> str:
        if self.removed is None:
            return f"{self.path} warns since jax {self.deprecated}, and will be gone."
        if not self.removed:
            return f"{self.path} is not a name of jax."
        return f"{self.path} is gone from jax since {self.removed}."

    @property
    def fix(self) -> str:
        """What to write, as one line."""
        parts = [f"use {self.instead}"] if self.instead else [f"use {self.advice}"] if self.advice else []
        if self.served and not self.instead:
            parts.append(f"capibara.{self.path} stands in for it")
        if not parts and self.removed is not None:
            parts.append(why_not(self.path) or "")
        return "; ".join(parts)


def in_every_supported_release(path: str) -> bool:
    """Whether each jax that capibara runs on has this name; names that are not jax's are there."""
    if path.partition(".")[0] != "jax":
        return True
    history = find(path)
    return history is not None and all(history.in_release(release) for release in RELEASES[RELEASES.index(OLDEST) :])


def is_public(module: str, name: str) -> bool:
    """Whether a release of jax has, or had, this name in this module for others to use."""
    history = find(f"{module}.{name}")
    return (history is not None and history.exported) or _row(f"{module}.{name}") is not None


def _row(path: str, *, as_module: bool = False) -> Gone | None:
    below = path.removeprefix("jax.")
    return MODULES.get(below) if as_module else NAMES.get(below) or MODULES.get(below)


@functools.lru_cache(maxsize=4096)
def fate(path: str, *, as_module: bool = False) -> Fate | None:
    """What became of this name; None where every newer jax has it, or where nothing is known of it.

    Args:
        path: "jax.numpy.trapz".
        as_module: It is imported from, and what has its name and is no module does not count: `jax.config`.

    Examples:
        >>> from capibara.migrate.fates import fate
        >>> fate("jax.tree_map").instead, fate("jax.config"), fate("jax.config", as_module=True).code
        ('jax.tree.map', None, 'CAP204')
    """
    history, row = find(path), _row(path, as_module=as_module)
    if as_module and history is not None and history.kind != "module":
        history = None
    if history is None:
        return _of_row(path, row) or _below_a_module(path)
    if history.removed is None and history.deprecated is None:
        return None
    instead = _instead(path, row, history)
    advice = (row.use if row is not None else "") or history.replacement or history.moved_to or ""
    removed = history.removed
    served = removed is None or serves(path)
    return Fate(path, history.kind == "module", removed, history.deprecated, instead, advice, served)


def _of_row(path: str, row: Gone | None) -> Fate | None:
    if row is None:
        return None
    is_module = row.old in MODULES and row.old not in NAMES
    return Fate(path, is_module, row.since, None, _instead(path, row, None), row.use or row.new.replace(":", "."), True)


def _below_a_module(path: str) -> Fate | None:
    """A name of a module that is gone as a whole, and that another module stands in for."""
    module, _, name = path.rpartition(".")
    row = _row(module, as_module=True) if module.startswith("jax.") else None
    if row is None or not row.new:
        return None
    instead = f"{row.new}.{name}"
    if not in_every_supported_release(instead):
        return None
    return Fate(path, False, row.since, None, None if row.use else instead, row.use, True)


def _instead(path: str, row: Gone | None, history: NameHistory | None) -> str | None:
    """A name that means the same. What jax only recommends may mean something else."""
    candidates = [_SAME[path]] if path in _SAME else []
    if row is not None and row.new and not row.use:
        candidates.append(row.new.replace(":", "."))
    if history is not None and history.moved_to:
        candidates.append(history.moved_to)
    for candidate in candidates:
        candidate = SHORTER.get(candidate, candidate)
        if not candidate.startswith(("jax._src", "capibara")) and in_every_supported_release(candidate):
            return candidate
    return None
