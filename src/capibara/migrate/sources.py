"""What is checked: files and trees of them, their text in the encoding they declare, and notebooks cell by cell."""

from __future__ import annotations

import codecs
import fnmatch
import io
import json
import os
import stat
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError, rule_error

__all__ = [
    "EXCLUDED",
    "LARGEST",
    "SUFFIXES",
    "Source",
    "Unreadable",
    "decode_python",
    "files_below",
    "matches",
    "read_notebook",
    "read_python",
]

SUFFIXES = (".py", ".pyi", ".ipynb")
EXCLUDED = (
    ".*",  # .git, .venv, .ipynb_checkpoints and the caches of tools
    "__pycache__",
    "__pypackages__",
    "_build",
    "build",
    "dist",
    "node_modules",
    "site-packages",
    "venv",
)
"""Names of folders that are not entered, unless they are named themselves."""
LARGEST = 10 * 2**20
"""Bytes of a file: nobody writes more, and the parser takes a hundred times as much memory."""


class Unreadable(CapibaraError):
    """A file that cannot be checked; `code` is the finding's."""

    def __init__(self, code: str, message: str, fix: str = "", line: int = 1, column: int = 1) -> None:
        super().__init__(message)
        self.code, self.message, self.fix, self.line, self.column = code, message, fix, line, column


@dataclass(frozen=True)
class Source:
    """The text of a file, and what it takes to write it as it was."""

    text: str
    """With newlines as they stand in the file."""
    encoding: str = "utf-8"
    bom: bytes = b""

    def encoded(self, text: str) -> bytes:
        """Another text, in this file's encoding."""
        return self.bom + text.encode(self.encoding)


def files_below(paths: Sequence[str | Path], exclude: Sequence[str] = (), root: Path | None = None) -> Iterator[Path]:
    """Every Python file and notebook in these files and folders, each once, folders in order.

    A file that is named is taken whatever its suffix. A folder that several links lead to is entered once, so that a
    loop of links ends.

    Args:
        exclude: Patterns, as of a shell, of paths from `root` or of names; besides `EXCLUDED`.
        root: Where such paths begin; the working folder unless given.
    """
    root = (root or Path.cwd()).resolve()
    seen: set[tuple[int, int]] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise rule_error("PATH is a file or a folder", f"{str(path)!r}, which is not there", "name one that is")
        if path.is_dir():
            yield from _walk(path, exclude, root, seen)
        elif _first(path, seen):
            yield path


def _walk(folder: Path, exclude: Sequence[str], root: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    if not _first(folder, seen):
        return
    stack = [folder]
    while stack:
        here = stack.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda one: one.name)
        except PermissionError:
            yield here  # reading it says why not
            continue
        inner = []
        for entry in entries:
            path = Path(entry.path)
            is_folder = _is_folder(entry)
            if is_folder:
                wanted = not any(fnmatch.fnmatch(entry.name, one) for one in EXCLUDED)
            else:
                wanted = entry.name.endswith(SUFFIXES) and _is_file(entry)
            if wanted and not (exclude and matches(path, exclude, root)) and _first(path, seen):
                if is_folder:
                    inner.append(path)
                else:
                    yield path
        stack.extend(reversed(inner))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Or a link that leads nowhere, of which reading says so; no pipe and no socket, which reading waits for."""
    try:
        return entry.is_file() or entry.is_symlink()
    except OSError:
        return True


def _first(path: Path, seen: set[tuple[int, int]]) -> bool:
    try:
        status = path.stat()
    except OSError:
        return True  # a broken link: reading it says so
    key = (status.st_dev, status.st_ino)
    if key in seen:
        return False
    seen.add(key)
    return True


def matches(path: Path, patterns: Sequence[str], root: Path) -> bool:
    """Whether a pattern is of the path's name, of the path from `root`, or of a folder above it."""
    whole = Path(os.path.abspath(path))
    relative = whole.relative_to(root).as_posix() if whole.is_relative_to(root) else whole.as_posix()
    for pattern in patterns:
        pattern = pattern.rstrip("/")
        if any(fnmatch.fnmatch(text, pattern) for text in (path.name, relative, whole.as_posix())):
            return True
        if fnmatch.fnmatch(relative, f"{pattern}/*"):
            return True
    return False


def read_bytes(path: Path) -> bytes:
    """A regular file of a size that people write."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("CAP903", f"{path} is not a regular file")
        if status.st_size > LARGEST:
            size = f"{status.st_size / 2**20:.0f} MiB"
            raise Unreadable("CAP903", f"the file has {size}, more than {LARGEST >> 20} MiB", "exclude it")
        return path.read_bytes()
    except OSError as error:
        raise Unreadable("CAP903", f"it cannot be read: {error.strerror or error}") from error


def read_python(path: Path) -> Source:
    """The text of a Python file, in the encoding that its first lines declare."""
    return decode_python(read_bytes(path))


def decode_python(data: bytes) -> Source:
    """The same of its bytes, by PEP 263: UTF-8 unless the first two lines say otherwise."""
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        if bom or b"coding" in b"\n".join(data.split(b"\n")[:2]):
            raise Unreadable("CAP902", f"its encoding is not known: {error.msg}", "declare one that is") from error
        encoding = "utf-8"  # two lines that are no UTF-8: decoding says where
    encoding = "utf-8" if encoding == "utf-8-sig" else encoding
    try:
        return Source(data[len(bom) :].decode(encoding), encoding, bom)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        message = f"byte 0x{data[error.start + len(bom)]:02x} is not {encoding}"
        fix = "save it as UTF-8, or declare its encoding in the first line: # -*- coding: latin-1 -*-"
        raise Unreadable("CAP902", message, fix, line, column) from error


def read_notebook(path: Path) -> tuple[Source, dict[str, Any]]:
    """A notebook's text and its JSON."""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("CAP902", f"byte {error.start} is not UTF-8, which notebooks are") from error
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise Unreadable("CAP904", f"it is not JSON: {error}", "save it once more from Jupyter") from error
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise Unreadable("CAP904", "it has no list of cells", "convert it: jupyter nbconvert --to notebook")
    return Source(text, bom=codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""), document
