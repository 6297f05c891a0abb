"""Make the table of jax's public names, release by release, out of the released wheels.

    python tools/jax_releases.py FOLDER            # downloads what FOLDER lacks, writes the table and its page
    python tools/jax_releases.py FOLDER --check    # writes nothing; exit 1 where they are not what the wheels give

FOLDER keeps the wheels, and what was read of each. Every release from 0.4.30 on is taken that pip's index has; jax's
wheels are plain Python and are read, not installed, so that one Python does for all of them. Run it for each release
of jax. It writes

    src/capibara/jax_releases/names.json    the table, which `capibara.jax_releases` reads
    docs/jax_releases.md                    how many names each release has, lost, and the drop-in serves

The second is made of the first, and a test holds it to it without the wheels. Run it with the newest Python that the
newest jax is for: it parses that jax's files.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from capibara.dropin.unserved import serves
from capibara.jax_releases import RELEASES, breaks, find, names
from capibara.jax_releases.table import FILE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "jax_releases.md"
OLDEST = (0, 4, 30)
PYTHON = "3.13"
"""What pip is asked for: old enough for every release and new enough for the newest."""

Row = dict[str, Any]
Release = tuple[dict[str, Row], dict[str, str]]
"""What `jax_surface.surface` gives, as JSON keeps it."""


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def released() -> list[str]:
    """Releases of jax that pip's index has, from OLDEST on."""
    command = [sys.executable, "-m", "pip", "index", "versions", "jax", "--python-version", PYTHON]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pip does not list the versions of jax:\n{said}")
    numbers = [one for one in found.group(1).split(", ") if re.fullmatch(r"[\d.]+", one)]
    return sorted((one for one in numbers if number(one) >= OLDEST), key=number)


def wheels(folder: Path) -> dict[str, Path]:
    """The wheels in a folder, the oldest release first."""
    found = {path.name.split("-")[1]: path for path in folder.glob("jax-*-none-any.whl")}
    return {release: found[release] for release in sorted(found, key=number)}


def download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for release in released():
        if release not in wheels(folder):
            print(f"jax {release}: downloading", file=sys.stderr)
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--dest", str(folder)]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, f"jax=={release}"], check=True)


def read(wheel: Path) -> Release:
    """What a release has; kept beside its wheel for as long as what reads it stays the same."""
    reader = Path(__file__).with_name("jax_surface.py").read_bytes() + version("griffe").encode()
    kept = wheel.with_name(f"{wheel.name}.{hashlib.sha256(reader).hexdigest()[:12]}.json")
    if not kept.exists():
        from jax_surface import surface

        print(f"{wheel.name}: reading", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("jax/")])
            names, raising = surface(Path(folder))
        for old in wheel.parent.glob(f"{wheel.name}.*.json"):
            old.unlink()
        kept.write_text(json.dumps([{path: asdict(name) for path, name in names.items()}, raising]), encoding="utf-8")
    names, raising = json.loads(kept.read_text(encoding="utf-8"))
    return names, raising


def table(releases: Sequence[str], read_of: Sequence[Release]) -> dict[str, Any]:
    """The table as a document, from what each release has, the oldest first."""
    history = {path: _history(path, releases, read_of) for path in sorted({path for one, _ in read_of for path in one})}
    kept = {path: row for path, row in history.items() if row["kind"] != "module" or row["exported"]}
    newest = _Newest(read_of[-1][0])
    for path, row in kept.items():
        if "removed" in row or "deprecated" in row:
            names = read_of[releases.index(row.get("last", releases[-1]))][0]
            row["moved_to"] = newest.same(path, names[path])
    _moved_modules(kept)
    for row in kept.values():
        row["replacement"] = _of_today(row["replacement"], kept)
    unchanged: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    changed: dict[str, Row] = {}
    for path, row in kept.items():
        short = {key: value for key, value in row.items() if value not in ("", [], None)}
        if short["exported"]:
            del short["exported"]
        if short.keys() <= {"kind", "exported"}:
            module, _, name = path.rpartition(".")
            unchanged[module][f"{'' if row['exported'] else 'own '}{row['kind']}"].append(name)
        else:
            changed[path] = short
    words = {
        module: {kind: " ".join(names) for kind, names in sorted(kinds.items())} for module, kinds in unchanged.items()
    }
    return {"releases": list(releases), "unchanged": dict(sorted(words.items())), "changed": changed}


def _history(path: str, releases: Sequence[str], read_of: Sequence[Release]) -> Row:
    rows = _without_stubs([names.get(path) for names, _ in read_of])
    there = [position for position, row in enumerate(rows) if row is not None]
    first, last = there[0], there[-1]
    latest = rows[last]
    assert latest is not None
    history: Row = {"kind": latest["kind"], "exported": any(rows[position]["exported"] for position in there)}  # type: ignore[index]
    if first:
        history["first"] = releases[first]
    if last + 1 < len(releases):
        history["last"] = releases[last]
        history["removed"] = releases[last + 1]
    history["absent"] = [releases[position] for position in range(first, last) if rows[position] is None]
    said = latest["replacement"]
    if latest["deprecated"]:
        since = last
        while since > first and (row := rows[since - 1]) is not None and row["deprecated"]:
            since -= 1
        history["deprecated"] = releases[since]
    for _, raising in read_of[last + 1 :]:
        said = said or raising.get(path, "")
    history["replacement"] = said
    history["signatures"] = _signatures(rows, releases)
    return history


def _without_stubs(rows: Sequence[Row | None]) -> list[Row | None]:
    """A function that has come to do nothing but raise is gone; one that never did anything else is what it was."""
    worked = [position for position, row in enumerate(rows) if row is not None and not row["raises"]]
    if not worked:
        return list(rows)
    return [row if position <= worked[-1] else None for position, row in enumerate(rows)]


def _signatures(rows: Sequence[Row | None], releases: Sequence[str]) -> list[list[str]]:
    """Every change of parameters, where one of them breaks calls."""
    changes: list[list[str]] = []
    broke = False
    for release, row in zip(releases, rows, strict=True):
        parameters = None if row is None else row["parameters"]
        if parameters is None or (changes and changes[-1][1] == parameters):
            continue
        broke = broke or bool(changes and breaks(changes[-1][1], parameters))
        changes.append([release, parameters])
    return changes if broke else []


class _Newest:
    """Where the newest release has what an older one had."""

    def __init__(self, names: Mapping[str, Row]) -> None:
        self._names = names
        self._by_target: dict[str, list[str]] = defaultdict(list)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path, row in names.items():
            if row["exported"] and not row["deprecated"]:
                self._by_target[row["target"] or path].append(path)
                self._by_name[path.rpartition(".")[2]].append(path)

    def same(self, path: str, row: Row) -> str | None:
        """The same object under another name; else the one object of this name that takes the same parameters."""
        others = [other for other in self._by_target.get(row["target"] or path, ()) if other != path]
        if not others:
            named = [other for other in self._by_name[path.rpartition(".")[2]] if other != path]
            alike = [other for other in named if self._alike(row, self._names[other])]
            if len({self._names[other]["target"] or other for other in alike}) == 1:
                others = alike
        return min(others, key=_preferred, default=None)

    def _alike(self, old: Row, new: Row) -> bool:
        if old["kind"] != new["kind"] or old["kind"] == "module":
            return False
        if old["kind"] == "class" or old["target"].rpartition(".")[2] == new["target"].rpartition(".")[2] != "":
            return old["kind"] != "function" or old["parameters"] == new["parameters"]
        return old["parameters"] is not None and old["parameters"] == new["parameters"]


def _preferred(path: str) -> tuple[int, int, str]:
    """The home that most people know it by."""
    parts = path.split(".")
    aside = ("experimental", "interpreters", "lib", "extend", "example_libraries")
    return (next((position for position, name in enumerate(aside, 1) if name in parts), 0), len(parts), path)


def _of_today(said: str, kept: Mapping[str, Row]) -> str | None:
    """The name that a message tells to use, or what has come in its place since."""
    seen: set[str] = set()
    while said and said not in seen:
        seen.add(said)
        row = kept.get(said)
        if row is None:
            return None
        if "removed" not in row and "deprecated" not in row:
            return said
        said = row["moved_to"] or row["replacement"] or ""
    return None


def _moved_modules(kept: Mapping[str, Row]) -> None:
    """A module moved where most of what it exported did."""
    for module, row in kept.items():
        if row["kind"] != "module" or "removed" not in row or row.get("moved_to"):
            continue
        inside = [other for path, other in kept.items() if path.rpartition(".")[0] == module and other["exported"]]
        homes = Counter(str(other.get("moved_to") or "").rpartition(".")[0] for other in inside)
        home, count = homes.most_common(1)[0] if homes else ("", 0)
        row["moved_to"] = home if home and count > 0.8 * len(inside) and home in kept else None


def written(document: Mapping[str, Any]) -> str:
    """The document with a line a row, so that a difference is read."""
    dump = lambda value: json.dumps(value, ensure_ascii=False)  # noqa: E731
    parts = [f'"releases": {dump(document["releases"])}']
    for key in ("unchanged", "changed"):
        rows = ",\n".join(f"{dump(path)}: {dump(row)}" for path, row in document[key].items())
        parts.append(f'"{key}": {{\n{rows}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


INTRODUCTION = """# The names of jax, release by release

`capibara.jax_releases` knows every public name of jax from {first} on: since when it is there, since when it warns,
when it was removed, where it moved, and which change of its parameters breaks calls. The drop-in's warnings and the
migration checker read it.

```python
from capibara.jax_releases import breaks, find

old = find("jax.core.Primitive")
print(old.deprecated, old.removed, old.moved_to)
(_, before), *_, (since, after) = find("jax.numpy.clip").signatures
print(since, breaks(before, after))
```

```text
0.4.38 0.6.0 jax.extend.core.Primitive
0.10.0 ('a is gone', 'a_min is gone', 'a_max is gone')
```

The table is read from the released wheels, which are not imported: `python tools/jax_releases.py FOLDER` downloads them
into a folder and writes the table and this page anew; `--check` says whether they are what the wheels give.

A *name* is what a module without an underscore in its path has when it has run: what it defines, lists in `__all__`, or
imports as what it is (`import x as x`), a deprecated one too; what raises when it is used is not there. Members of
classes are not in it, and neither is what jaxlib alone defines (the MLIR dialects under `jax.extend.mlir`). Whatever
else a module imports for its own use from jax is in the table as not exported, and not counted here. *Removed* is what
the release before had; a name that came back later is counted when it goes for good. *Served* are those that
`capibara.jax` gives under a newer jax. Of those it does not give, `capibara.dropin.unserved` has the reason; without
`jax.experimental.mosaic`, whose names are a compiler's own, it serves {share}.

| jax | public names | new | removed | of these served |
|---|---:|---:|---:|---:|
"""


def page() -> str:
    """docs/jax_releases.md, from the table that is in the repository and what the drop-in serves."""
    rows = [history for path in names() if (history := find(path)) is not None and history.exported]
    gone = [row for row in rows if row.removed]
    apart = [row for row in gone if not row.path.startswith("jax.experimental.mosaic")]
    kept = sum(serves(row.path) for row in apart)
    lines = [INTRODUCTION.format(first=RELEASES[0], share=f"{kept} of {len(apart)}")]
    for release in RELEASES:
        removed = [row for row in rows if row.removed == release]
        there = sum(row.in_release(release) for row in rows)
        new = sum(row.first == release for row in rows) if release != RELEASES[0] else ""
        lines.append(f"| {release} | {there} | {new} | {len(removed)} | {sum(serves(row.path) for row in removed)} |\n")
    lines.append(f"| all | {len(rows)} | | {len(gone)} | {sum(serves(row.path) for row in gone)} |\n")
    return "".join(lines)


def difference(path: Path, wanted: str) -> str:
    have = path.read_text(encoding="utf-8") if path.exists() else ""
    name = path.relative_to(ROOT).as_posix()
    lines = difflib.unified_diff(have.splitlines(True), wanted.splitlines(True), name, f"{name} by the wheels", n=0)
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the table of jax's public names from the released wheels.")
    parser.add_argument("folder", type=Path, help="keeps the wheels and what was read of them")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the table is out of date")
    parser.add_argument("--offline", action="store_true", help="take the wheels that the folder has, and ask no index")
    parser.add_argument("--processes", type=int, default=2, help="wheels that are read at a time")
    options = parser.parse_args(arguments)
    if not options.offline:
        download(options.folder)
    found = wheels(options.folder)
    with ProcessPoolExecutor(options.processes) as pool:
        read_of = list(pool.map(read, found.values()))
    wanted = written(table(list(found), read_of))
    if not options.check:
        FILE.write_text(wanted, encoding="utf-8")
        write_page()
        return 0
    changes = difference(FILE, wanted)
    # The page of a table that is out of date says nothing; of one that is not, it is what the wheels give.
    changes = changes or difference(PAGE, page())
    if changes:
        print(changes, end="")
        print("The table or its page is out of date. Run: python tools/jax_releases.py FOLDER")
    return 1 if changes else 0


def write_page() -> None:
    """In a process of its own: this one may have read the table that was there before."""
    code = "import jax_releases; jax_releases.PAGE.write_text(jax_releases.page(), encoding='utf-8')"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


if __name__ == "__main__":
    sys.exit(main())
