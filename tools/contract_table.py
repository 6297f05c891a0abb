"""Writes docs/contract.md: every documented name of the library, and whether it is there.

    python tools/contract_table.py           write the table
    python tools/contract_table.py --check   exit 1, with the difference, when the table is out of date

The state of a name is computed by importing it and reading its signature, never written by hand:
"there", "partial: ..." when it lacks a documented keyword or field, or "missing".
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.machinery
import inspect
import sys
import textwrap
import tomllib
import typing
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "contract.toml"
TABLE = ROOT / "docs" / "contract.md"

THERE = "there"
MISSING = "missing"

# What a half-written module raises when it is imported. Anything else is a bug that should stop this tool.
_BROKEN_IMPORT = (ImportError, AttributeError, SyntaxError, NameError, TypeError, ValueError)


@dataclass(frozen=True)
class Entry:
    """One documented name."""

    issue: str
    path: str = ""
    file: str = ""
    keywords: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.file):
            raise ValueError(f"An entry has a path or a file, one of the two. Got {self}.")

    @property
    def label(self) -> str:
        return self.path.replace(":", ".") if self.path else self.file


@dataclass(frozen=True)
class Section:
    title: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class _Declared:
    """An attribute that a class gives to its objects and does not have itself."""

    type: Any = None


def load(text: str) -> list[Section]:
    """The sections of contract.toml; an unknown key is an error."""
    sections = [
        Section(one["title"], tuple(Entry(**_fields(row)) for row in one["entries"]))
        for one in tomllib.loads(text)["section"]
    ]
    labels = Counter(entry.label for one in sections for entry in one.entries)
    twice = [label for label, times in labels.items() if times > 1]
    if twice:
        raise ValueError(f"A name is listed once. Got twice: {', '.join(twice)}.")
    return sections


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    # Tuples, so that an entry hashes.
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def find(path: str) -> Any:
    """The object at "module:Name.attribute"; ImportError or AttributeError where there is none."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    if isinstance(getattr(found.__spec__, "loader", None), importlib.machinery.NamespaceLoader):
        raise ModuleNotFoundError(f"{module} is a folder without an __init__.py")
    parts = names.split(".") if names else []
    for position, part in enumerate(parts):
        name = part.removesuffix("()")
        owner = found
        try:
            found = getattr(owner, name)
        except AttributeError:
            declared = _declared(owner, name) if isinstance(owner, type) else None
            if declared is None or position != len(parts) - 1:
                raise
            return declared
        if part.endswith("()"):
            found = found()
    return found


def _declared(owner: type, name: str) -> _Declared | None:
    """A dataclass field, an annotation, a slot, or a `self.name = ...` in a method of the class."""
    for cls in owner.__mro__:
        if name in inspect.get_annotations(cls):
            return _Declared(_hints(owner).get(name))
        if name in cls.__dict__.get("__slots__", ()):
            return _Declared()
        if cls is not object and name in _assigned_to_self(cls):
            return _Declared()
    return None


def _assigned_to_self(cls: type) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _hints(obj: Any) -> dict[str, Any]:
    """Resolved annotations; none where they name something that is imported for type checkers only."""
    try:
        return typing.get_type_hints(obj)
    except (NameError, TypeError, AttributeError):
        return {}


def lacking_keywords(obj: Any, keywords: Sequence[str]) -> list[str]:
    """The documented keywords that a call of `obj` does not take by name.

    A **kwargs takes anything and promises nothing, so it does not count; for a decorated function both
    count, the wrapper (which may pass everything on) and what it wraps.
    """
    taken = _named(inspect.signature(obj))
    outer = inspect.signature(obj, follow_wrapped=False)
    passes_on = any(p.kind is p.VAR_KEYWORD for p in outer.parameters.values())
    reached = taken if passes_on else taken & _named(outer)
    return [word for word in keywords if word not in reached]


def _named(signature: inspect.Signature) -> set[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in signature.parameters.items() if parameter.kind in by_name}


def lacking_fields(obj: Any, fields: Sequence[str]) -> list[str]:
    """The documented fields that the result of `obj` lacks; none where its annotation is not a class."""
    if isinstance(obj, _Declared):
        result = obj.type
    elif isinstance(obj, property):
        result = _hints(obj.fget).get("return")
    else:
        result = _hints(obj).get("return") if callable(obj) and not isinstance(obj, type) else type(obj)
    if not isinstance(result, type) or issubclass(result, Mapping):
        return []
    return [name for name in fields if not hasattr(result, name) and _declared(result, name) is None]


def state(entry: Entry, root: Path = ROOT) -> str:
    """ "there", "partial: why" or "missing"."""
    if entry.file:
        path = root / entry.file
        present = any(path.glob("**/*.py")) if path.is_dir() else path.is_file()
        return THERE if present else MISSING
    try:
        with warnings.catch_warnings():
            # Names kept for older code warn when they are read; that is what they are for.
            warnings.simplefilter("ignore")
            found = find(entry.path)
    except _BROKEN_IMPORT as error:
        if not isinstance(error, ModuleNotFoundError | AttributeError):
            print(f"{entry.path}: {type(error).__name__}: {error}", file=sys.stderr)
        return MISSING
    lacks = []
    if entry.keywords:
        try:
            lacks += [f"keyword {word}" for word in lacking_keywords(found, entry.keywords)]
        except (TypeError, ValueError):
            return "partial: no signature to read"
    lacks += [f"field {name}" for name in lacking_fields(found, entry.gives)]
    return f"partial: lacks {', '.join(lacks)}" if lacks else THERE


def _counts(states: Sequence[str]) -> tuple[int, int, int]:
    there, missing = states.count(THERE), states.count(MISSING)
    return there, len(states) - there - missing, missing


def render(sections: Sequence[Section], root: Path = ROOT) -> str:
    """The whole of contract.md."""
    states = {entry: state(entry, root) for one in sections for entry in one.entries}
    there, partial, missing = _counts(list(states.values()))
    lines = [
        "# The documented names",
        "",
        "<!-- Written by tools/contract_table.py from docs/contract.toml and the code. Do not edit. -->",
        "",
        f"{len(states)} names: {there} there, {partial} partial, {missing} missing.",
        "",
        "*there*: it imports, and its signature takes every documented keyword by name. *partial*: it",
        "imports and lacks what is named. *missing*: it does not import yet. What a name does is tested",
        "elsewhere.",
        "",
        "| section | names | there | partial | missing |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in sections:
        counts = _counts([states[entry] for entry in one.entries])
        lines.append(f"| {one.title} | {len(one.entries)} | {' | '.join(map(str, counts))} |")
    for one in sections:
        lines += [
            "",
            f"## {one.title}",
            "",
            "| name | documented keywords | area | state |",
            "|---|---|---|---|",
        ]
        for entry in one.entries:
            words = ", ".join(f"`{word}`" for word in entry.keywords)
            lines.append(f"| `{entry.label}` | {words} | {entry.issue} | {states[entry]} |")
    return "\n".join(lines) + "\n"


def difference(wanted: str) -> str:
    """What would change in the table, as a diff; empty when it is up to date."""
    have = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    return "".join(
        difflib.unified_diff(
            have.splitlines(keepends=True),
            wanted.splitlines(keepends=True),
            fromfile="docs/contract.md",
            tofile="docs/contract.md as the code is now",
            n=0,
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/contract.md from the code as it is.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when it is out of date")
    options = parser.parse_args(arguments)
    wanted = render(load(DATA.read_text(encoding="utf-8")))
    if not options.check:
        TABLE.write_text(wanted, encoding="utf-8")
        return 0
    changes = difference(wanted)
    if changes:
        print(changes, end="")
        print("docs/contract.md is out of date. Run: python tools/contract_table.py")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
