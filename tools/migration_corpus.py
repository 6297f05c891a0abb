"""Measure the migration checker on real code from PyPI, which is downloaded and not kept here.

    python tools/migration_corpus.py FOLDER

downloads the sdists of OLD and the wheels of MODERN into FOLDER (where they are not yet there), and writes, as JSON:

- of each old program: every error (file, line, code), those of them that the installed jax does not bear out, names
  and keywords that the installed jax lacks and that no finding is about, and how many errors are left after `--fix`
  of a copy;
- of each modern package: errors, which are false alarms, and warnings a thousand lines, by code.

Errors are held against the jax that is installed, which is to be the newest of the table.

BREAKS are lines of programs that were run on JAX 0.12 and break there: jax-md by 73 calls of its public functions at
tiny size, which run 82 % of its statements (netCDF4 and google.colab stood in for by mocks), jraph and optax by their
own tests. `tools/jax_probe.py` wrote them down while it served what was missing, so that one break does not hide the
next. The tool fails where a line is not reported.
"""

from __future__ import annotations

import argparse
import ast
import collections
import datetime
import importlib
import inspect
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from capibara.jax_releases import RELEASES
from capibara.migrate.fixes import fix_file, write
from capibara.migrate.module import Module
from capibara.migrate.rules import check_file
from capibara.migrate.settings import Settings

OLD = (
    *("jax-md==0.2.8", "jraph==0.0.6.dev0", "optax==0.1.4", "blackjax==0.9.6", "chex==0.1.6", "distrax==0.1.2"),
    *("dm-haiku==0.0.9", "dm_pix==0.3.4", "e3nn_jax==0.17.0", "evosax==0.1.4", "jaxopt==0.6"),
    *("neural-tangents==0.6.1", "numpyro==0.12.1", "rlax==0.1.5"),
)
MODERN = (
    *("equinox==0.13.8", "optax==0.2.8", "flax==0.12.12", "orbax-checkpoint==0.12.8", "diffrax==0.7.2"),
    *("numpyro==0.22.0", "chex==0.1.92", "lineax==0.1.1", "optimistix==0.1.0", "distrax==0.1.9"),
    *("blackjax==1.7.1", "penzai==0.2.5"),
)
BREAKS = {
    "jax-md": (
        *("jax_md/util.py:20", "jax_md/smap.py:27", "jax_md/partition.py:38", "jax_md/_nn/e3nn_layer.py:226"),
        *("jax_md/_nn/nequip.py:57", "jax_md/_nn/gnome.py:22", "jax_md/rigid_body.py:76"),
        *("jax_md/colab_tools/renderer.py:24", "jax_md/tpu.py:47", "jax_md/test_util.py:28"),
        *("jax_md/test_util.py:190", "jax_md/test_util.py:191"),
    ),
    "jraph": (
        *("jraph/_src/utils_test.py:22", "jraph/_src/utils.py:882", "jraph/_src/utils.py:887"),
        *("jraph/_src/utils.py:1097", "jraph/_src/utils.py:1099", "jraph/_src/utils.py:1101"),
        *("jraph/experimental/sharded_graphnet_test.py:22", "jraph/experimental/sharded_graphnet.py:177"),
        *("jraph/experimental/sharded_graphnet.py:258", "jraph/experimental/sharded_graphnet.py:265"),
        *("jraph/ogb_examples/train_pmap.py:168", "jraph/ogb_examples/train_pmap.py:118"),
    ),
    "optax": (
        *("optax/_src/second_order.py:46", "optax/_src/second_order.py:48", "optax/_src/second_order.py:49"),
        *("optax/_src/second_order.py:50", "optax/_src/second_order.py:72", "optax/_src/second_order.py:73"),
        *("optax/_src/second_order.py:74", "optax/_src/second_order.py:97", "optax/_src/float64_test.py:22"),
        *("optax/_src/numerics_test.py:92", "optax/_src/schedule.py:391", "optax/_src/schedule_test.py:621"),
    ),
    # Its import alone was tried. The first is a private module, and a warning.
    "blackjax": ("blackjax/types.py:3", "blackjax/progress_bar.py:8"),
}


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


def real(path: str) -> Any:
    """What the installed jax has at a path; AttributeError where it has nothing."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for number, name in enumerate(rest, start=1):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(".".join([first, *rest[:number]]))
            except ImportError as error:
                raise AttributeError(path) from error
    return found


def is_there(path: str, *, as_module: bool = False) -> bool:
    try:
        importlib.import_module(path) if as_module else real(path)
    except (AttributeError, ImportError):
        return False
    return True


def refuses(path: str, keyword: str) -> bool:
    """Whether the installed function takes no such keyword."""
    try:
        parameters = inspect.signature(real(path)).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return False
    return keyword not in parameters or parameters[keyword].kind is inspect.Parameter.POSITIONAL_ONLY


def is_false(finding: Any) -> bool:
    """Whether the installed jax has what an error says that it lacks."""
    words = finding.message.split()
    if finding.code == "CAP205":
        return not refuses(words[0], words[3])
    if finding.code == "CAP206":
        return words[2] not in inspect.signature(real(words[0])).parameters
    # `import jax.config`: an object is there, and no module.
    return is_there(words[0], as_module=finding.code == "CAP204")


def used(module: Module) -> Iterator[tuple[ast.AST, str, bool]]:
    """Every name of jax that a module imports or takes, and whether it is imported as a module."""
    for node in module.nodes(ast.Import, ast.ImportFrom, ast.Attribute):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from ((node, f"{node.module}.{alias.name}", False) for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node, module.origin(node) or "", False


def unreported(root: Path, findings: list[Any]) -> list[str]:
    """Names and keywords that the installed jax lacks, and that no finding is about: neither here nor above them."""
    said: dict[str, set[str]] = collections.defaultdict(set)
    lines: dict[str, set[int]] = collections.defaultdict(set)
    for one in findings:
        said[one.file].add(one.message.split()[0])
        lines[one.file].add(one.line)
    found: dict[str, None] = {}
    for file in sorted(root.rglob("*.py")):
        shown = file.relative_to(root).as_posix()
        try:
            module = Module.parse(file.read_text(encoding="utf-8"), shown)
        except (SyntaxError, ValueError):
            continue
        for node, path, as_module in used(module):
            parts = path.split(".")
            above = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
            place = getattr(node, "lineno", 0)
            if parts[0] != "jax" or above & said[shown] or place in lines[shown] or is_there(path, as_module=as_module):
                continue
            found[f"{shown}:{place} {path}"] = None
        for call in module.calls:
            path = module.resolve(call.func) or ""
            for keyword in call.keywords:
                named = path.startswith("jax.") and keyword.arg and keyword.value.lineno not in lines[shown]
                if named and refuses(path, keyword.arg or ""):
                    found[f"{shown}:{keyword.value.lineno} {path}({keyword.arg}=)"] = None
    return list(found)


def measured_old(requirement: str, folder: Path) -> dict[str, Any]:
    root = unpacked(requirement, folder, wheel=False)
    findings = findings_of(root, "CAP2")
    errors = [one for one in findings if one.severity == "error"]
    reported = {f"{one.file}:{one.line}" for one in findings if one.severity != "info"}
    breaks = BREAKS.get(requirement.partition("==")[0], ())
    copy = folder / "fixed" / root.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    for file in sorted(copy.rglob("*.py")):
        data, fixed = fix_file(file, Settings(select=("CAP2",)))
        if fixed.changed:
            write(file, data)
    left = [one for one in findings_of(copy, "CAP2") if one.severity == "error"]
    measured: dict[str, Any] = {
        "lines": sum(file.read_text(encoding="utf-8").count("\n") for file in root.rglob("*.py")),
        "breaks_seen": len(breaks),
        "breaks_not_reported": [place for place in breaks if place not in reported],
        "errors": [f"{one.file}:{one.line} {one.code}" for one in errors] if breaks else len(errors),
        "errors_after_fix": [f"{one.file}:{one.line} {one.code} {one.message.split()[0]}" for one in left],
    }
    if metadata.version("jax") == RELEASES[-1]:
        measured["errors_false"] = [f"{one.file}:{one.line} {one.message}" for one in errors if is_false(one)]
        measured["unreported"] = unreported(root, findings)
    return measured


def measured_modern(requirement: str, folder: Path) -> dict[str, Any]:
    root = unpacked(requirement, folder, wheel=True)
    functions, performance = findings_of(root, "CAP2"), findings_of(root, "CAP3")
    lines = sum(file.read_text().count("\n") for file in root.rglob("*.py"))
    warned = [one for one in (*functions, *performance) if one.severity == "warning"]
    return {
        "lines": lines,
        "errors": [f"{one.file}:{one.line} {one.code}" for one in functions if one.severity == "error"],
        "warnings_a_thousand_lines": round(1000 * len(warned) / lines, 3),
        "warnings": dict(sorted(collections.Counter(one.code for one in warned).items())),
        "performance": dict(sorted(collections.Counter(one.code for one in performance).items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    warnings.simplefilter("ignore")  # of names that are only deprecated
    old = {one: measured_old(one, folder) for one in OLD}
    report = {
        "date": datetime.date.today().isoformat(),
        "host": f"{platform.machine()}",
        "python": platform.python_version(),
        "libcst": metadata.version("libcst"),
        "jax": metadata.version("jax"),
        "command": "python tools/migration_corpus.py FOLDER",
        "old": old,
        "modern": {one: measured_modern(one, folder) for one in MODERN},
    }
    print(json.dumps(report, indent=1))
    missing = sorted(place for one in old.values() for place in one["breaks_not_reported"])
    if missing:
        raise SystemExit(f"not reported: {missing}")


if __name__ == "__main__":
    main()
