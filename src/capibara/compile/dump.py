"""The files of a libtpu dump: which belong to which kernel, and a look at them for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["DumpFile", "by_program", "describe_dump", "dump_files"]

# <nanoseconds>-<program>-<pass number>-<pass label>.txt. Program names have dashes and numbers of their own,
# so the pass number is the last number of two or three digits that stands between dashes.
_STAMP = re.compile(r"^(\d{6,})-")
_PASS_NUMBER = re.compile(r"-(\d{2,3})(?=-)")


class DumpFile(NamedTuple):
    """One pass of one program."""

    path: Path
    stamp: int
    program: str
    number: int
    label: str


def dump_files(dump_dir: Path | str, *, ignore: Iterable[Path] = ()) -> list[DumpFile]:
    """The pass files under `dump_dir`, oldest first. Files with other names are left out."""
    ignored = set(ignore)
    found = []
    for path in sorted(Path(dump_dir).rglob("*.txt")):
        if path not in ignored and (name := _split(path)):
            found.append(name)
    return sorted(found, key=lambda file: (file.stamp, file.program, file.number))


def _split(path: Path) -> DumpFile | None:
    stem = path.name.removesuffix(".txt")
    numbers = list(_PASS_NUMBER.finditer(stem))
    if not numbers:
        return None
    last = numbers[-1]
    stamp = _STAMP.match(stem)
    program = stem[stamp.end() if stamp else 0 : last.start()]
    return DumpFile(path, int(stamp[1]) if stamp else 0, program, int(last[1]), stem[last.end() + 1 :])


def by_program(files: Iterable[DumpFile]) -> dict[str, dict[str, DumpFile]]:
    """{program: {label: file}}; of several files with one label (a pass that runs twice) the last is kept."""
    programs: dict[str, dict[str, DumpFile]] = {}
    for file in files:
        programs.setdefault(file.program, {})[file.label] = file
    return programs


_WORTH_A_LOOK = re.compile(r"final|schedule-analysis|utilization|post-ra|post-delay|heap|memory|deduplic")


def describe_dump(
    dump_dir: Path | str, *, lines: int = 14, width: int = 200, everything: bool = False, tail: int = 4
) -> str:
    """What is in a dump: programs and their passes, then the first and last lines of the files that matter.

    For people who adjust the parser to a new libtpu. `everything` shows lines of every file.
    """
    root = Path(dump_dir)
    paths = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    if not paths:
        return f"{root}: no files. libtpu dumps only if LIBTPU_INIT_ARGS was set before it was loaded."
    files = dump_files(root)
    known = {file.path for file in files}
    out = [f"{root}: {len(paths)} files, {sum(path.stat().st_size for path in paths):,} bytes"]
    for program, passes in by_program(files).items():
        out.append(f"program {program!r}: {len(passes)} passes: {', '.join(passes)}")
    others = Counter(path.suffix or "(none)" for path in paths if path not in known)
    out.append(f"files with other names, by suffix: {dict(others)}")
    for path in paths:
        if everything or path not in known or _WORTH_A_LOOK.search(path.name):
            out += ["", f"== {path.relative_to(root)} ({path.stat().st_size:,} bytes)"]
            out += _excerpt(path, lines, tail, width)
    return "\n".join(out)


def _excerpt(path: Path, lines: int, tail: int, width: int) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    skipped = len(text) - lines - tail
    if skipped > 0:
        text = [*text[:lines], f"… {skipped} lines …", *text[len(text) - tail :]]
    return [line[:width] for line in text]
