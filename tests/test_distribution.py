"""The distribution: its name in every command that installs it, its extras, what the sdist has, what make installs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from capibara import distribution

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# What a checkout has and an unpacked sdist does without; hatchling adds pyproject.toml by itself, .gitignore too.
NOT_IN_THE_SDIST = {".gitignore", "pyproject.toml"}


def test_commands_install_what_they_mean() -> None:
    """`pip install 'name[extra]'`, wherever it is written: the checkout, with an extra that there is, or jax's own,
    which is to be had where capibara-jax is on no index."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert PROJECT["project"]["name"] == distribution.NAME
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}
    texts |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    found = {
        (path.name, *match)
        for path, text in texts.items()
        for match in re.findall(r"pip install (?:--[\w-]+ )*'?([\w.-]+)(?:\[([\w,]+)\])?", text)
    }
    able = {".": set(extras), "jax": {"tpu", "cuda13"}}
    assert ("distribution.py", "jax", "tpu") in found
    assert not [one for one in found if one[1] not in able or not {*one[2].split(",")} - {""} <= able[one[1]]]
    for extra in ("cuda", "tpu"):
        wanted = re.search(r"jax\[\w+\]", distribution.install_command(extra))
        assert wanted is not None
        assert extras[extra][0].startswith(wanted.group()), "our extra is jax's"


def test_the_tpu_extra_is_jaxs_own() -> None:
    """jax[tpu] names the libtpu of its own release; on its own, libtpu would be the newest."""
    (wanted,) = PROJECT["project"]["optional-dependencies"]["tpu"]
    assert wanted.startswith("jax[tpu];")
    assert "platform_machine == 'x86_64'" in wanted


def test_the_project_has_a_home() -> None:
    urls = PROJECT["project"]["urls"]
    assert {"Homepage", "Source", "Issues", "Changelog"} <= set(urls)
    assert len({url.split("/capibara")[0] for url in urls.values()}) == 1


def test_the_sdist_has_all_that_the_tests_read() -> None:
    included = {path.removeprefix("/") for path in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert {path for path in included if not (ROOT / path).exists()} == set()
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked sdist has what it has")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in listed.splitlines()}
    assert top - included == NOT_IN_THE_SDIST & top


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_run_installs_what_training_needs_and_no_more(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def commands(target: str) -> str:
        # The tool that looks for the newest Python is not asked here.
        made = ["make", "-n", target, "NEWEST=python3"]
        return subprocess.run(made, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert re.findall(r"-e '(.*)'", commands("run")) == [".[train]"]
    assert re.findall(r"-e '(.*)'", commands("test")) == [".[train]", ".[train,serve,dev]"]
    # The second time nothing is installed, whichever came first.
    stamps = re.findall(r"touch (\S+)", commands("test"))
    for stamp in stamps:
        (tmp_path / stamp).parent.mkdir(exist_ok=True)
        (tmp_path / stamp).touch()
    assert len(stamps) == 2
    assert "pip" not in commands("run") + commands("test") + commands("lint")
