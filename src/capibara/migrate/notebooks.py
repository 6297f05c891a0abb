"""A notebook as one module: its code cells one after the other, and back.

A name that one cell imports is used in the next ones, so that the cells are read together. What IPython alone
understands (`%matplotlib inline`, `!pip install`, `%%bash`) stands in the text as comments, and comes back as it was.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "Joined", "cells_of", "join", "split"]

_MARK = "# capibara: cell "
_HIDDEN = "# capibara: ipython "
_MAGIC = re.compile(r"(?P<indent>\s*)(?P<what>[%!].*|\?.*|[^#'\"]*\?\??\s*$)")
_ASSIGNED = re.compile(r"(?P<target>\s*[\w., ]+=\s*)(?P<what>[%!].*)")
_PYTHON_MAGICS = ("time", "timeit", "capture", "prun", "memit")
"""Cell magics whose cell is Python."""


@dataclass(frozen=True)
class Cell:
    """One code cell."""

    number: int
    """From 1, over all cells."""
    text: str


@dataclass(frozen=True)
class Joined:
    """The cells as one text, and where each line of it came from."""

    text: str
    lines: tuple[tuple[int, int], ...]
    """Of each line: its cell and its line there; the marks between cells have line 0."""

    def place(self, line: int) -> tuple[int, int]:
        """The cell and the line there."""
        cell, inner = self.lines[min(max(line, 1), len(self.lines)) - 1]
        return cell, max(inner, 1)


def cells_of(document: dict[str, Any]) -> list[Cell]:
    """The code cells that are Python, with IPython's own lines hidden."""
    found = []
    for number, cell in enumerate(document["cells"], start=1):
        source = cell.get("source", "")
        text = "".join(source) if isinstance(source, list) else str(source)
        if cell.get("cell_type") == "code" and _is_python(text):
            found.append(Cell(number, text))
    return found


def _is_python(text: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    return not first.startswith("%%") or first[2:].split(" ")[0].strip() in _PYTHON_MAGICS


def _hide(text: str) -> str:
    if _parses(text):
        return text
    lines = []
    for line in text.split("\n"):
        assigned = _ASSIGNED.fullmatch(line)
        magic = _MAGIC.fullmatch(line)
        if assigned is not None:
            lines.append(f"{assigned['target']}None  {_HIDDEN}{assigned['what']}")
        elif magic is not None and line.strip():
            lines.append(f"{magic['indent']}pass  {_HIDDEN}{magic['what']}")
        else:
            lines.append(line)
    return "\n".join(lines)


def _show(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        before, mark, what = line.partition(_HIDDEN)
        lines.append(f"{before.rstrip().removesuffix('pass').removesuffix('None')}{what}" if mark else line)
    return "\n".join(lines)


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def join(cells: Sequence[Cell]) -> tuple[Joined, list[tuple[Cell, SyntaxError]]]:
    """One text of all the cells that parse, and the cells that do not."""
    text: list[str] = []
    places: list[tuple[int, int]] = []
    broken = []
    for cell in cells:
        hidden = _hide(cell.text)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(hidden)
        except SyntaxError as error:
            broken.append((cell, error))
            continue
        except (ValueError, RecursionError, MemoryError) as error:
            broken.append((cell, SyntaxError(str(error))))
            continue
        text.append(f"{_MARK}{cell.number}")
        places.append((cell.number, 0))
        lines = hidden.split("\n")
        text += lines
        places += [(cell.number, line) for line in range(1, len(lines) + 1)]
    return Joined("\n".join([*text, ""]) if text else "", tuple(places) or ((1, 1),)), broken


def split(text: str) -> Iterator[Cell]:
    """The cells of a joined text, as their notebook has them."""
    number = 0
    lines: list[str] = []
    for line in [*text.removesuffix("\n").split("\n"), f"{_MARK}0"]:
        if line.startswith(_MARK):
            if number:
                yield Cell(number, _show("\n".join(lines)))
            number, lines = int(line.removeprefix(_MARK)), []
        else:
            lines.append(line)
