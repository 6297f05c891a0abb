"""The table of jax's names: what it says of known ones, and that the installed jax has what it says."""

from __future__ import annotations

import importlib
import inspect
import itertools
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import jax
import pytest

from capibara.errors import parts_of
from capibara.jax_releases import RELEASES, breaks, find, modules, names

# Not there on every machine: what jax binds only beside a GPU's libraries, and what a loop leaves behind.
ELSEWHERE = ("jax.experimental.mosaic.gpu.core.", "jax.tools.pgo_nsys_converter.", "jax.experimental.pallas.ops.gpu.")

# There, and do nothing but raise: gone, by the table.
STUBS = {"jax.ffi.register_ffi_type_id"}


@pytest.mark.quick
def test_known_histories() -> None:
    tree_map = find("jax.tree_map")
    assert tree_map is not None
    assert (tree_map.first, tree_map.last, tree_map.removed) == ("0.4.30", "0.5.3", "0.6.0")
    assert (tree_map.moved_to, tree_map.replacement) == ("jax.tree_util.tree_map", "jax.tree.map")
    assert tree_map.in_release("0.5.3")
    assert not tree_map.in_release("0.6.0")
    shard_map = find("jax.experimental.shard_map.shard_map")
    assert shard_map is not None
    assert (shard_map.removed, shard_map.deprecated, shard_map.replacement) == (None, "0.8.0", "jax.shard_map")
    assert breaks(*(text for _, text in shard_map.signatures)) == ("auto is gone",)
    xmap = find("jax.experimental.maps.xmap")
    assert xmap is not None
    assert xmap.removed == "0.4.31"
    # It stayed until 0.7.2 as functions that do nothing but raise.
    callback = find("jax.experimental.host_callback.call")
    assert callback is not None
    assert callback.removed == "0.4.35"
    stable = find("jax.numpy.sin")
    assert stable is not None
    assert (stable.kind, stable.first, stable.last, stable.removed) == ("function", RELEASES[0], RELEASES[-1], None)
    assert find("jax.numpy.no_such_name") is None


@pytest.mark.quick
def test_a_name_may_go_and_come_back() -> None:
    memory_ref = find("jax.experimental.pallas.MemoryRef")
    assert memory_ref is not None
    assert memory_ref.absent == ("0.7.1", "0.7.2")
    assert [memory_ref.in_release(release) for release in ("0.7.0", "0.7.1", "0.8.0")] == [True, False, True]
    assert memory_ref.removed is None


def test_a_release_that_is_not_in_the_table_is_refused() -> None:
    history = find("jax.jit")
    assert history is not None
    with pytest.raises(ValueError, match=r"Unknown release of jax '0\.4\.32'") as caught:
        history.in_release("0.4.32")
    assert parts_of(caught.value)["fix"]


@pytest.mark.quick
def test_the_table_is_whole() -> None:
    assert RELEASES[0] == "0.4.30"
    assert list(RELEASES) == sorted(RELEASES, key=lambda release: tuple(map(int, release.split("."))))
    paths = names()
    assert len(paths) == len(set(paths)) > 5000
    assert set(modules()) < set(paths)
    for path in paths:
        history = find(path)
        assert history is not None
        assert (history.removed is None) == (history.last == RELEASES[-1]), path
        for other in (history.moved_to, history.replacement):
            target = find(other) if other else None
            assert other is None or (target is not None and target.removed is None), (path, other)
        texts = [text for _, text in history.signatures]
        assert not texts or any(breaks(*pair) for pair in itertools.pairwise(texts)), path


def _imported(paths: tuple[str, ...]) -> dict[str, ModuleType]:
    found = {}
    for path in paths:
        try:
            found[path] = importlib.import_module(path)
        except ImportError:
            module, _, name = path.rpartition(".")
            # A module under a second name is an attribute alone; tensorflow and flatbuffers are not brought by jax.
            lacking = ("jax.experimental.jax2tf", "jax.experimental.array_serialization")
            assert path.startswith(lacking) or hasattr(importlib.import_module(module), name), path
    return found


@pytest.mark.skipif(jax.__version__ not in RELEASES, reason=f"jax {jax.__version__} is newer than the table")
@pytest.mark.filterwarnings("ignore")
def test_the_installed_jax_has_what_the_table_says() -> None:
    """Every name of this release is there, and no other of the table; but for ELSEWHERE."""
    release = jax.__version__
    histories = [history for path in names() if (history := find(path)) is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = _imported(tuple(one.path for one in histories if one.kind == "module" and one.in_release(release)))
        assert len(there) > 200
        wrong = []
        compared = 0
        for one in histories:
            module, _, name = one.path.rpartition(".")
            if module not in there or one.kind == "module" or one.path.startswith(ELSEWHERE):
                continue
            compared += 1
            owner = there[module]
            has = hasattr(owner, name) or f"{module}.{name}" in sys.modules
            if has != (one.in_release(release) or one.path in STUBS):
                wrong.append(f"{one.path}: {'there' if has else 'not there'}")
    assert compared > 3500
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(jax.__version__ not in RELEASES, reason=f"jax {jax.__version__} is newer than the table")
@pytest.mark.filterwarnings("ignore")
def test_parameters_are_those_of_the_installed_jax() -> None:
    release = RELEASES.index(jax.__version__)
    compared = 0
    for path in names():
        history = find(path)
        assert history is not None
        module, _, name = path.rpartition(".")
        if not history.signatures or history.kind != "function" or module not in sys.modules:
            continue
        text = [text for since, text in history.signatures if RELEASES.index(since) <= release][-1:]
        function = getattr(sys.modules[module], name, None)
        if text and function is not None and history.in_release(jax.__version__):
            known = {word.strip("*=") for word in text[0].split(", ")} - {"", "/"}
            assert known == set(inspect.signature(function).parameters), path
            compared += 1
    assert compared > 30


@pytest.mark.quick
def test_the_page_is_made_of_the_table() -> None:
    tools = Path(__file__).parents[2] / "tools"
    code = "import jax_releases; assert jax_releases.PAGE.read_text(encoding='utf-8') == jax_releases.page()"
    subprocess.run([sys.executable, "-c", code], cwd=tools, check=True)


@pytest.mark.parametrize("stale", ["", "FILE", "PAGE"])
def test_the_check_compares_the_table_and_its_page(stale: str, tmp_path: Path) -> None:
    # The wheels, which are not here, are taken to give the table that is in the repository.
    code = (
        "import pathlib, sys, jax_releases as tool\n"
        "wanted, stale, tool.ROOT = tool.FILE.read_text(), sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "tool.wheels, tool.table, tool.written = lambda folder: {}, lambda *read: None, lambda table: wanted\n"
        "for name in ('FILE', 'PAGE'):\n"
        "    copy = tool.ROOT / name\n"
        "    copy.write_text(getattr(tool, name).read_text() + 'old' * (name == stale))\n"
        "    setattr(tool, name, copy)\n"
        "sys.exit(tool.main([str(tool.ROOT), '--offline', '--check']))\n"
    )
    tools = Path(__file__).parents[2] / "tools"
    ran = subprocess.run([sys.executable, "-c", code, stale, str(tmp_path)], cwd=tools, capture_output=True, text=True)
    assert ran.returncode == bool(stale), ran.stderr
    assert (f"--- {stale}" in ran.stdout and "out of date" in ran.stdout) == bool(stale)
