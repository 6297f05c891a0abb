"""`--fix`: the edits applied to a text, with its formatting and its comments (libcst)."""

from __future__ import annotations

import ast
import difflib
import errno
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError
from capibara.migrate.edits import Edits, Target, edits
from capibara.migrate.module import Module
from capibara.migrate.notebooks import cells_of, join, split
from capibara.migrate.settings import Settings
from capibara.migrate.sources import Unreadable, read_notebook, read_python

__all__ = ["FixFailed", "Fixed", "FixesMissing", "diff", "fix_file", "fix_text", "write"]

_ROUNDS = 4
"""A fix may show another: `jax.lib.xla_bridge` gone, what it was imported for is next."""


class FixesMissing(CapibaraError, ImportError):
    """libcst is not installed."""


class FixFailed(CapibaraError):
    """A file that the edits do not fit; it stays as it is."""


@dataclass(frozen=True)
class Fixed:
    """A text before and after."""

    before: str
    after: str
    from_dropin: tuple[str, ...] = ()
    """Names that plain jax has no equal of, and that are taken from capibara.jax now."""

    @property
    def changed(self) -> bool:
        return self.before != self.after


def fix_text(
    source: str, path: str, target: Target = "jax", *, adapters: bool = True, codes: frozenset[str] | None = None
) -> Fixed:
    """The text with all that is safe to change changed. Fixing it again changes nothing.

    Args:
        path: What messages call it.
        target: "jax" for a program of plain jax; "capibara" for one that imports capibara.jax in its place.
        adapters: Whether names that capibara.jax alone has are imported from it, where the target is plain jax.
        codes: Findings that are wanted; what is not wanted is left as it is.
    """
    text, from_dropin = source, dict[str, None]()
    for _ in range(_ROUNDS):
        module = Module.parse(text, path)
        planned = edits(module, target, adapters=adapters, codes=codes)
        if not planned:
            break
        changed = _apply(text, planned, target)
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise FixFailed(f"the fix of line {error.lineno} would not parse; the file is not changed") from error
        if changed == text:
            break
        text = changed
        from_dropin |= planned.from_dropin
    return Fixed(source, text, tuple(from_dropin))


def fix_file(path: Path, settings: Settings, target: Target = "jax", *, adapters: bool = True) -> tuple[bytes, Fixed]:
    """What a file or a notebook is to contain, and its text before and after; nothing is written.

    Raises:
        Unreadable: it cannot be read, or does not parse.
    """
    codes = settings.codes_for(path)
    try:
        if path.suffix == ".ipynb":
            return _fix_notebook(path, codes, target, adapters)
        source = read_python(path)
        fixed = fix_text(source.text, str(path), target, adapters=adapters, codes=codes)
        return source.encoded(fixed.after), fixed
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable("CAP901", f"it does not parse: {error}") from error


def _fix_notebook(path: Path, codes: frozenset[str], target: Target, adapters: bool) -> tuple[bytes, Fixed]:
    source, document = read_notebook(path)
    joined, _ = join(cells_of(document))
    fixed = fix_text(joined.text, str(path), target, adapters=adapters, codes=codes)
    if fixed.changed:
        for cell in split(fixed.after):
            entry = document["cells"][cell.number - 1]
            as_list = isinstance(entry["source"], list)
            entry["source"] = cell.text.splitlines(keepends=True) if as_list else cell.text
        text = _as_before(document, source.text)
    else:
        text = source.text
    return source.encoded(text), fixed


def _as_before(document: dict[str, Any], before: str) -> str:
    """JSON in the style that the notebook had: its indent, its escapes, its last newline."""
    second = before.split("\n")[1] if "\n" in before.strip() else ""
    indent = len(second) - len(second.lstrip()) if second else None
    unit = "\t" if second.startswith("\t") else indent
    text = json.dumps(document, indent=unit, ensure_ascii=before.isascii())
    return text + before[len(before.rstrip()) :]


def diff(fixed: Fixed, path: str) -> str:
    """What changes, as `diff -u` writes it."""
    before, after = (text.splitlines(keepends=True) for text in (fixed.before, fixed.after))
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    # A last line without a newline has no line of its own to say so in difflib.
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def write(path: Path, data: bytes) -> None:
    """All of it or nothing; the file keeps its mode, and a link stays a link."""
    real = Path(os.path.realpath(path))
    mode = real.stat().st_mode
    if not os.access(real, os.W_OK):  # its folder alone would let it be replaced
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(real))
    handle, draft = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.", suffix=".draft")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(draft, mode & 0o7777)
        os.replace(draft, real)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _apply(source: str, planned: Edits, target: Target) -> str:
    try:
        import libcst as cst
        from libcst.metadata import MetadataWrapper
    except ImportError as error:
        raise FixesMissing(
            "--fix needs libcst, which is not installed. Fix: pip install '.[migrate]' in a checkout."
        ) from error
    from capibara.migrate.rewriter import Rewriter

    rewriter = Rewriter(planned, target)
    try:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        changed = wrapper.visit(rewriter)
    except cst.ParserSyntaxError as error:  # Python that is newer than this libcst
        raise FixFailed(f"libcst does not read line {error.raw_line}; the file is not changed") from error
    except RecursionError as error:
        raise FixFailed("it is nested too deep for libcst; the file is not changed") from error
    if rewriter.left:  # half of the edits could leave a name whose import is gone
        raise FixFailed(f"line {rewriter.left[0][0]} is not where it was expected; nothing of the file is changed")
    return changed.code
