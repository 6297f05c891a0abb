"""Names in texts: what pages, messages, docstrings, examples, benchmarks and tools call by its full name is there."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "src", "examples", "benchmarks", "tools")
# Not the changelog, which says what names were before.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
PAGES += [path for name in FOLDERS for end in ("py", "md", "toml") for path in sorted((ROOT / name).rglob(f"*.{end}"))]
NAME = re.compile(r"(?<![\w./\-])(?:capibara|vishwamai)(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"(?<![\w/.<>*\-])(?:[\w.\-]+/)+[\w\-]+\.(?:py|json|toml|md)\b")
# The group of entry points, a field that an object has, and a checkpoint's file.
NOT_NAMES = {"capibara.ops", "capibara.config.tpu_config.TPUConfig.scaling_config", "capibara.json"}
# A reader's own, another project's, results to be written, the documents' presets; and links, which tests/test_docs.py
# follows.
NOT_OURS = re.compile(
    r"path/to/|DIR/|\./|jax/_src/|(?:jax_md|jraph|optax|blackjax)/|.*/DATE-|recordings/"
    r"|src/capibara/config/configs_toml/|\.\./"
)


def _there(name: str) -> bool:
    """Whether it is an attribute or a module, or is documented to come."""
    first, *rest = name.split(".")
    path, found = first, importlib.import_module(first)
    for part in rest:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError as error:
            if "not implemented yet" in str(error):
                return True
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                return False
    return True


def _said(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """What is said, and where."""
    said: dict[str, list[str]] = {}
    for path in PAGES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for one in pattern.findall(line):
                said.setdefault(one, []).append(f"{path.relative_to(ROOT)}:{number}")
    return said


@pytest.mark.quick
def test_a_dotted_name_is_there() -> None:
    said = _said(NAME)
    assert len(said) > 400
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # names that jax had, which capibara.jax keeps
        missing = {name: where for name, where in said.items() if name not in NOT_NAMES and not _there(name)}
    assert not missing


@pytest.mark.quick
def test_a_file_is_there() -> None:
    """By its path, or the end of it."""
    files = [path for name in (*FOLDERS, "tests") for path in (ROOT / name).rglob("*.*")]
    ends = {"/".join(path.parts[-n:]) for path in files for n in range(1, len(path.relative_to(ROOT).parts) + 1)}
    said = _said(FILE)
    assert len(said) > 40
    assert not {name: where for name, where in said.items() if not NOT_OURS.match(name) and name not in ends}


def test_a_name_that_is_not_there_is_found() -> None:
    for name in ("capibara.parallel.placement", "capibara.kernels.attention.api", "capibara.kernels.no_such_op"):
        assert not _there(name)
    assert _there("capibara.kernels.attention")
