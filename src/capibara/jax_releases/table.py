"""Reads the table of jax's public names."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import unknown_name

__all__ = ["RELEASES", "NameHistory", "find", "modules", "names"]

FILE = Path(__file__).with_name("names.json")

RELEASES: tuple[str, ...]
"""The releases of the table, the oldest first; read with it."""


@dataclass(frozen=True)
class NameHistory:
    """One public name of jax over the releases of the table."""

    path: str
    """As code spells it, `jax.numpy.trapz`."""
    kind: str
    """What it is in the last release that has it: "module", "function", "class" or "attribute"."""
    first: str
    """The first release that has it; the table's first one stands for all before."""
    last: str
    """The last release that has it."""
    exported: bool = True
    """Whether its module means it to be used. Else it is a name that the module has for its own use, and that code
    has been known to take from there."""
    removed: str | None = None
    """The first release without it; None where the newest has it."""
    deprecated: str | None = None
    """The first release in which using it warns; None where none does, or where only single calls of it do."""
    moved_to: str | None = None
    """Where the newest release has the same object, for a name that is removed or deprecated."""
    replacement: str | None = None
    """The name of the newest release that jax itself tells to use instead."""
    absent: tuple[str, ...] = ()
    """Releases between the first and the last that lacked it."""
    signatures: tuple[tuple[str, str], ...] = ()
    """(since which release, parameters), oldest first, for what once changed so that calls broke; see `breaks`."""

    def in_release(self, release: str) -> bool:
        """Whether this release of jax has the name."""
        releases = _table().releases
        if release not in releases:
            raise unknown_name("release of jax", release, releases)
        between = releases.index(self.first) <= releases.index(release) <= releases.index(self.last)
        return between and release not in self.absent


class _Table:
    """The file's rows; a name's history is made when it is asked for."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.releases: tuple[str, ...] = tuple(document["releases"])
        self.changed: dict[str, dict[str, Any]] = document["changed"]
        self.unchanged: dict[str, tuple[str, bool]] = {}
        for module, kinds in document["unchanged"].items():
            for kind, words in kinds.items():
                row = (kind.removeprefix("own "), not kind.startswith("own "))
                for name in words.split():
                    self.unchanged[f"{module}.{name}" if module else name] = row

    def history(self, path: str) -> NameHistory | None:
        if path in self.unchanged:
            kind, exported = self.unchanged[path]
            return NameHistory(path, kind, self.releases[0], self.releases[-1], exported)
        row = self.changed.get(path)
        if row is None:
            return None
        row = {"first": self.releases[0], "last": self.releases[-1], **row}
        for key in ("absent", "signatures"):
            if key in row:
                row[key] = tuple(tuple(one) if isinstance(one, list) else one for one in row[key])
        return NameHistory(path=path, **row)


@functools.cache
def _table() -> _Table:
    return _Table(json.loads(FILE.read_text(encoding="utf-8")))


def find(path: str) -> NameHistory | None:
    """What became of a name; None for one that no release of the table has.

    Examples:
        >>> from capibara.jax_releases import find
        >>> find("jax.core.Primitive").moved_to
        'jax.extend.core.Primitive'
        >>> find("jax.numpy.no_such_name") is None
        True
    """
    return _table().history(path)


def modules() -> tuple[str, ...]:
    """Public modules of jax, those of former releases too."""
    return tuple(path for path in names() if (history := find(path)) is not None and history.kind == "module")


def names() -> tuple[str, ...]:
    """All paths of the table."""
    return tuple(sorted([*_table().unchanged, *_table().changed]))


def __getattr__(name: str) -> Any:
    if name == "RELEASES":
        return _table().releases
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
