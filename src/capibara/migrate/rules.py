"""The rules, in one table, and one file checked by all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from capibara.migrate import functions, imports
from capibara.migrate.findings import Finding, in_order
from capibara.migrate.module import Module
from capibara.migrate.notebooks import cells_of, join
from capibara.migrate.performance import check_performance
from capibara.migrate.settings import Settings
from capibara.migrate.sources import Unreadable, read_notebook, read_python

__all__ = ["RULES", "Rule", "check_file", "check_module", "check_text"]

Rule = Callable[[Module, Settings], Iterator[Finding]]

RULES: dict[str, Rule] = {
    "CAP1": imports.check,
    "CAP2": functions.check,
    "CAP3": check_performance,
}
"""How the codes of a rule begin -> the rule."""


def check_module(module: Module, settings: Settings) -> Iterator[Finding]:
    """What the rules find that is wanted and not silenced."""
    wanted = settings.codes_for(Path(module.path))
    for family, rule in RULES.items():
        if any(code.startswith(family) for code in wanted):
            for one in rule(module, settings):
                silenced = any(module.noqa(line, one.code) for line in {one.line, one.end_line})
                if one.code in wanted and not silenced:
                    yield one


def check_text(source: str, path: str, settings: Settings) -> tuple[Finding, ...]:
    """The findings in the text of one module; that it does not parse is one."""
    try:
        return in_order(check_module(_parsed(source, path), settings))
    except Unreadable as error:
        return (_unread(path, error),)
    except RecursionError:
        return (_unread(path, Unreadable("CAP903", "it is nested too deep to be checked", "exclude it")),)


def check_file(path: Path, settings: Settings, shown: str | None = None) -> tuple[Finding, ...]:
    """The findings in one file or notebook; that it cannot be read is one.

    Args:
        shown: What findings call the file; its path unless given.
    """
    shown = shown or str(path)
    try:
        if path.suffix == ".ipynb":
            return in_order(_check_notebook(path, settings, shown))
        return check_text(read_python(path).text, shown, settings)
    except Unreadable as error:
        return (_unread(shown, error),)


def _check_notebook(path: Path, settings: Settings, shown: str) -> Iterator[Finding]:
    joined, broken = join(cells_of(read_notebook(path)[1]))
    for cell, error in broken:
        yield replace(_unread(shown, _syntax(error)), cell=cell.number)
    for one in check_module(_parsed(joined.text, shown), settings):
        cell_number, line = joined.place(one.line)
        last = joined.place(one.end_line)
        yield replace(one, cell=cell_number, line=line, end_line=last[1] if last[0] == cell_number else line)


def _parsed(source: str, path: str) -> Module:
    try:
        return Module.parse(source, path)
    except SyntaxError as error:
        raise _syntax(error) from error
    except ValueError as error:  # a null byte
        raise Unreadable("CAP901", f"it does not parse: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise Unreadable("CAP903", "it is nested too deep for Python's parser", "exclude it") from error


def _syntax(error: SyntaxError) -> Unreadable:
    old = "Missing parentheses in call to 'print'" in (error.msg or "")
    fix = "convert it from Python 2" if old else "mend the line, or exclude the file"
    return Unreadable("CAP901", f"it does not parse: {error.msg}", fix, error.lineno or 1, error.offset or 1)


def _unread(path: str, error: Unreadable) -> Finding:
    place = (error.line, error.column, error.line, error.column)
    return Finding(path, *place, error.code, error.message, error.fix, "error")
