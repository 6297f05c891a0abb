"""Runs the python blocks of a page from top to bottom, as one program: python tools/run_page.py docs/meshes.md

A block may use what the blocks above it defined, and nothing else. A block of `>>>` lines gives what is printed
under them; of any other block, a text block that follows it is what it prints. `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int  # of the page, where the text starts
    follows: bool  # nothing stands between it and the block before


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block of a page's text."""
    end = 0
    for match in _FENCE.finditer(page):
        line = page.count("\n", 0, match.start(2)) + 1
        yield Block(match[1], match[2], line, not page[end : match.start()].strip())
        end = match.end()


def run_page(path: Path) -> int:
    """Run it; how many blocks there were. What fails is named by the page's own line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found = list(blocks(path.read_text(encoding="utf-8")))
    count = 0
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        count += 1
        if re.search(r"^>>> ", block.text, re.MULTILINE):
            _run_session(block, path, names)
            continue
        printed = after.text if after is not None and after.language == "text" and after.follows else None
        _run_program(block, path, names, printed)
    return count


def _run_session(block: Block, path: Path, names: dict[str, Any]) -> None:
    session = doctest.DocTestParser().get_doctest(block.text, names, path.name, str(path), block.line - 1)
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session, out=said.append, clear_globs=False)
    if failed:
        raise SystemExit("".join(said))
    names.update(session.globs)


def _run_program(block: Block, path: Path, names: dict[str, Any], wanted: str | None) -> None:
    code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
    if wanted is None:
        exec(code, names)
        return
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    got = out.getvalue()
    # doctest reads a leading line of dots as its own prompt; a page may start what it leaves out with one.
    if not doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS):
        raise SystemExit(f"{path}:{block.line}: the block does not print what follows it.\nIt prints:\n{got}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {run_page(Path(name))} blocks")
