"""Measure the migration checker on real code from PyPI, which is downloaded and not kept here.

    python tools/migration_corpus.py FOLDER

downloads the sdists of OLD and the wheels of MODERN into FOLDER (where they are not yet there), and writes, as JSON:

- of each old program: every name or argument that jax no longer takes (file, line, code), and how many of them are
  left after `--fix` of a copy;
- of each modern package: errors, which are false alarms, and findings a thousand lines by code.

BREAKS are lines that break on JAX 0.12. They were found by importing the programs and running their tests (jax-md has
none: its public functions were called at tiny size); once a name had failed, its other uses in the program were found
by search and not each by running. optax's tests were stopped after 100 failures, most of them of chex, and blackjax
was not run past its import, so that those two lists are not whole. The tool fails where a line is not reported.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from capibara.migrate.fixes import fix_file, write
from capibara.migrate.rules import check_file
from capibara.migrate.settings import Settings

OLD = ("jax-md==0.2.8", "jraph==0.0.6.dev0", "optax==0.1.4", "blackjax==0.9.6")
MODERN = (
    *("equinox==0.13.8", "optax==0.2.8", "flax==0.12.12", "orbax-checkpoint==0.12.8", "diffrax==0.7.2"),
    *("numpyro==0.22.0", "chex==0.1.92", "lineax==0.1.1", "optimistix==0.1.0", "distrax==0.1.9"),
    *("blackjax==1.7.1", "penzai==0.2.5"),
)
BREAKS = {
    "jax-md": (
        *("jax_md/util.py:20", "jax_md/smap.py:27", "jax_md/partition.py:38", "jax_md/rigid_body.py:76"),
        *("jax_md/_nn/e3nn_layer.py:226", "jax_md/_nn/gnome.py:22", "jax_md/_nn/nequip.py:57", "jax_md/tpu.py:47"),
    ),
    "jraph": (
        *("jraph/_src/utils_test.py:22", "jraph/_src/utils.py:882", "jraph/_src/utils.py:887"),
        *("jraph/_src/utils.py:1097", "jraph/_src/utils.py:1099", "jraph/_src/utils.py:1101"),
    ),
    "optax": (
        *("optax/_src/second_order.py:46", "optax/_src/schedule.py:391", "optax/_src/float64_test.py:22"),
        *("optax/_src/numerics_test.py:92",),
    ),
    # A private module, which the table of public names has not.
    "blackjax": ("blackjax/types.py:3", "blackjax/progress_bar.py:8"),
}
UNREPORTED = frozenset({"blackjax/types.py:3"})


def unpacked(requirement: str, folder: Path, *, wheel: bool) -> Path:
    """The package's own files, below `folder`."""
    target = folder / ("modern" if wheel else "old") / requirement.replace("==", "-")
    if not target.exists():
        archives = folder / "archives" / target.name
        options = ["--only-binary", ":all:"] if wheel else ["--no-binary", ":all:"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            *options,
            "-d",
            str(archives),
            requirement,
        ]
        subprocess.run(command, check=True)
        (archive,) = archives.iterdir()
        if wheel:
            zipfile.ZipFile(archive).extractall(target)
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(target, filter="data")
    inner = [one for one in target.iterdir() if one.is_dir()]
    return target if wheel or len(inner) != 1 else inner[0]


def findings_of(root: Path, family: str) -> list[Any]:
    """Every finding of a family of codes below a folder, with paths from it."""
    settings = Settings(select=(family, "CAP9"))
    return [
        one
        for file in sorted(root.rglob("*.py"))
        for one in check_file(file, settings, file.relative_to(root).as_posix())
    ]


def measured_old(requirement: str, folder: Path) -> dict[str, Any]:
    root = unpacked(requirement, folder, wheel=False)
    errors = [one for one in findings_of(root, "CAP2") if one.severity == "error"]
    reported = {f"{one.file}:{one.line}" for one in errors}
    breaks = BREAKS[requirement.partition("==")[0]]
    copy = folder / "fixed" / root.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    for file in sorted(copy.rglob("*.py")):
        data, fixed = fix_file(file, Settings(select=("CAP2",)))
        if fixed.changed:
            write(file, data)
    left = [one for one in findings_of(copy, "CAP2") if one.severity == "error"]
    return {
        "lines": sum(file.read_text().count("\n") for file in root.rglob("*.py")),
        "known_breaks": len(breaks),
        "not_reported": [place for place in breaks if place not in reported],
        "errors": [f"{one.file}:{one.line} {one.code}" for one in errors],
        "errors_after_fix": len(left),
    }


def measured_modern(requirement: str, folder: Path) -> dict[str, Any]:
    root = unpacked(requirement, folder, wheel=True)
    functions, performance = findings_of(root, "CAP2"), findings_of(root, "CAP3")
    lines = sum(file.read_text().count("\n") for file in root.rglob("*.py"))
    warnings = [one for one in (*functions, *performance) if one.severity == "warning"]
    return {
        "lines": lines,
        "errors": [f"{one.file}:{one.line} {one.code}" for one in functions if one.severity == "error"],
        "warnings_a_thousand_lines": round(1000 * len(warnings) / lines, 3),
        "performance": dict(sorted(collections.Counter(one.code for one in performance).items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    old = {one: measured_old(one, folder) for one in OLD}
    report = {
        "date": datetime.date.today().isoformat(),
        "host": f"{platform.machine()}",
        "python": platform.python_version(),
        "libcst": metadata.version("libcst"),
        "command": "python tools/migration_corpus.py FOLDER",
        "old": old,
        "modern": {one: measured_modern(one, folder) for one in MODERN},
    }
    print(json.dumps(report, indent=1))
    missing = {place for one in old.values() for place in one["not_reported"]} - UNREPORTED
    if missing:
        raise SystemExit(f"not reported: {sorted(missing)}")


if __name__ == "__main__":
    main()
