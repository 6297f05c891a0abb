"""What a project asks of the checker: `[tool.capibara.migrate]` of its pyproject.toml, and the command's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from capibara.errors import rule_error
from capibara.migrate.codes import CODES, selected
from capibara.migrate.sources import matches
from capibara.toml_tables import Table, build, read

__all__ = ["Settings", "settings_for"]

_SECTION = "tool.capibara.migrate"


@dataclass(frozen=True)
class Settings:
    """Which findings are wanted, and of which files."""

    select: tuple[str, ...] = ("CAP",)
    """Codes, or how they begin; all of them unless given."""
    ignore: tuple[str, ...] = ()
    """Codes that are not wanted."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders that are not read."""
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern of a file -> codes that are not wanted there."""
    root: Path = field(default_factory=Path.cwd)
    """The folder that patterns begin at: the pyproject's own."""

    def __post_init__(self) -> None:
        selected(self.select, "select")
        selected(self.ignore, "ignore")
        for pattern, codes in self.per_file_ignores.items():
            selected(codes, f"per-file-ignores of {pattern!r}")

    @property
    def codes(self) -> frozenset[str]:
        """What is wanted in every file. That a file could not be read is never left out."""
        unread = {code for code in CODES if code.startswith("CAP9")}
        return (selected(self.select) - selected(self.ignore)) | unread

    def codes_for(self, path: Path) -> frozenset[str]:
        """What is wanted in this file."""
        codes = self.codes
        for pattern, unwanted in self.per_file_ignores.items():
            if matches(path, [pattern], self.root):
                codes -= selected(unwanted)
        return codes

    def without(self, *families: str) -> Settings:
        """The same, without the codes that begin so."""
        return replace(self, ignore=(*self.ignore, *families))


def settings_for(path: Path) -> Settings:
    """Of the nearest pyproject.toml at or above this path that has the section; what is usual where there is none."""
    path = path.resolve()
    for folder in (path, *path.parents):
        file = folder / "pyproject.toml"
        if not file.is_file():
            continue
        table = read(file)
        values: object = table.values
        for part in _SECTION.split("."):
            values = values.get(part) if isinstance(values, Mapping) else None
        if values is not None:
            return _settings(table, values, folder)
    return Settings()


@dataclass(frozen=True)
class _Section:
    """The section as it is written; hyphens are underscores here."""

    select: tuple[str, ...] = ("CAP",)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _settings(table: Table, values: object, folder: Path) -> Settings:
    if not isinstance(values, Mapping):
        raise rule_error(f"{_SECTION} is a table of keys", repr(values), f"write [{_SECTION}]")
    named = {key.replace("-", "_"): value for key, value in values.items()}
    places = {key.replace("-", "_"): place for key, place in table.places.items()}
    nested: dict[str, object] = named
    for part in reversed(_SECTION.split(".")):
        nested = {part: nested}
    section = build(_Section, Table(nested, places), _SECTION)
    return Settings(section.select, section.ignore, section.exclude, section.per_file_ignores, folder)
