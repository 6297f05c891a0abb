"""Writes docs/contract.md: every documented name of the library, and whether it is there.

    python tools/contract_table.py           write the table
    python tools/contract_table.py --check   exit 1, with the difference, when the table is out of date

The state of a name is computed, never written by hand: it is imported, its signature is read, and a call of it with
the documented keywords and values (tools/contract_calls.py) is run. "there" means that the call ran; "partial: ..."
that the name lacks a documented keyword or field, that its call fails, or that there is none; "missing" that it does
not import.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import tempfile
import textwrap
import tomllib
import traceback
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "contract.toml"
TABLE = ROOT / "docs" / "contract.md"
CALLS = ROOT / "tools" / "contract_calls.py"

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


@dataclass(frozen=True)
class Shown:
    """A call that was run for some names, and what came of it."""

    run: Callable[[], None]
    error: str | None

    def lacking(self, entry: Entry) -> list[str]:
        """What of the entry its source does not have: the name itself, or a documented keyword of it."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.run)))
        module, _, names = entry.path.partition(":")
        if not names:
            return [] if module in _imported(tree) else [f"import of {module}"]
        name = names.rpartition(".")[2]
        called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if name == "__call__":  # of an object, which has a name of its own
            own = [node for node in called if isinstance(node.func, ast.Name)]
        elif name in ("__enter__", "__exit__"):
            return [] if any(isinstance(node, ast.With) for node in ast.walk(tree)) else [name]
        else:
            own = [node for node in called if name in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))]
            if name not in {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}:
                return [name]
        passed = {keyword.arg for node in own for keyword in node.keywords}
        return [f"keyword {word}" for word in entry.keywords if word not in passed]


def _imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def load_calls(path: Path) -> dict[Callable[[], None], tuple[str, ...]]:
    """The calls of a file, each with the documented paths that it shows."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where inspect looks for a function's source
    spec.loader.exec_module(module)
    calls: dict[Callable[[], None], tuple[str, ...]] = module.CALLS
    times = Counter(path_shown for paths in calls.values() for path_shown in paths)
    twice = [path_shown for path_shown, count in times.items() if count > 1]
    if twice:
        raise ValueError(f"A name has one call. Got two of {', '.join(twice)}.")
    return calls


def run_call(run: Callable[[], None]) -> str | None:
    """What went wrong with a call, in a line; None where it ran."""
    try:
        with _own_cache(), warnings.catch_warnings():
            # Names kept for older code, and what a layer says of itself: that is what they are for.
            warnings.simplefilter("ignore")
            run()
    except Exception as caught:  # noqa: BLE001 - whatever it is, the table says it
        traceback.print_exc()
        text = (str(caught).strip() or "no text").splitlines()[0]
        return f"{type(caught).__name__}: {text[:160]}".replace("|", "/")
    return None


def run_calls(path: Path) -> dict[str, Shown]:
    """Run every call of the file: the documented path -> what came of the call that shows it."""
    shown: dict[str, Shown] = {}
    for run, paths in load_calls(path).items():
        shown |= dict.fromkeys(paths, Shown(run, run_call(run)))
    return shown


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """A folder for what a call tunes, instead of the user's own."""
    from capibara.kernels.core import tables

    kept = os.environ.get("CAPIBARA_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CAPIBARA_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if kept is None:
                del os.environ["CAPIBARA_CACHE_DIR"]
            else:
                os.environ["CAPIBARA_CACHE_DIR"] = kept
            tables.forget()


def state(entry: Entry, root: Path = ROOT, shown: Mapping[str, Shown] | None = None) -> str:
    """ "there", "partial: why" or "missing"; `shown` are the calls that were run, None leaves them aside."""
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
    if lacks or shown is None:
        return f"partial: lacks {', '.join(lacks)}" if lacks else THERE
    call = shown.get(entry.path)
    if call is None:
        return "partial: no call of it is run"
    if call.error is not None:
        return f"partial: its call fails: {call.error}"
    left_out = call.lacking(entry)
    return f"partial: its call leaves out {', '.join(left_out)}" if left_out else THERE


def _counts(states: Sequence[str]) -> tuple[int, int, int]:
    there, missing = states.count(THERE), states.count(MISSING)
    return there, len(states) - there - missing, missing


def render(sections: Sequence[Section], shown: Mapping[str, Shown], root: Path = ROOT) -> str:
    """The whole of contract.md, by what came of the calls."""
    states = {entry: state(entry, root, shown) for one in sections for entry in one.entries}
    there, partial, missing = _counts(list(states.values()))
    lines = [
        "# The documented names",
        "",
        "<!-- Written by tools/contract_table.py from docs/contract.toml and the code. Do not edit. -->",
        "",
        f"{len(states)} names: {there} there, {partial} partial, {missing} missing.",
        "",
        "*there*: it imports, its signature takes every documented keyword by name, and a call of it with the",
        "documented keywords and values ran when this table was written (tools/contract_calls.py: operands are",
        "smaller than the documents', devices are 32 virtual ones; a file or folder is there). *partial*: it",
        "imports, and what is named is wrong with it. *missing*: it does not import yet. Whether results are right",
        "is tested elsewhere.",
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
    if "jax" not in sys.modules:
        # The documents' pod has 32 devices; XLA reads this when jax first starts.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=32"
    wanted = render(load(DATA.read_text(encoding="utf-8")), run_calls(CALLS))
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
