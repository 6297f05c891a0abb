"""Compiled programs on disk: what is kept comes back, what does not fit is another entry, and a bad disk is no end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from capibara.compile import cache as cache_module
from capibara.compile.cache import ExecutableCache


@pytest.fixture(scope="module")
def program() -> Any:
    return jax.jit(lambda x: 2 * x + 1).lower(jax.ShapeDtypeStruct((3,), np.float32)).compile()


@pytest.mark.quick
def test_what_is_kept_comes_back_and_damage_is_told_from_it(tmp_path: Path, program: Any) -> None:
    cache = ExecutableCache(tmp_path)
    name = cache.name("doubled and one")
    assert cache.load(name) is None
    assert cache.store(name, program)
    np.testing.assert_array_equal(cache.load(name)(np.arange(3, dtype=np.float32)), [1, 3, 5])
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-100])
    assert cache.load(name) is None
    assert not entry.exists()


def test_another_compiler_and_another_processor_have_other_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ExecutableCache(tmp_path)
    names = {cache.name("a"), cache.name("b")}
    with monkeypatch.context() as changed:
        changed.setattr("jaxlib.version.__version__", "0.0.1")
        names.add(cache.name("a"))
    with monkeypatch.context() as changed:
        changed.setattr(cache_module, "_processor", lambda: ("another",))
        names.add(cache.name("a"))
    with monkeypatch.context() as changed:
        changed.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} ")
        names.add(cache.name("a"))
    assert len(names) == 5
    assert cache.name("a") in names


def test_a_full_disk_keeps_nothing_and_leaves_nothing(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    cache = ExecutableCache(tmp_path)
    monkeypatch.setattr(cache_module.os, "replace", full)
    assert not cache.store(cache.name("a"), program)
    assert list(tmp_path.iterdir()) == []


def test_the_longest_unused_go_first_and_so_does_what_was_never_finished(tmp_path: Path, program: Any) -> None:
    cache = ExecutableCache(tmp_path)
    for number, word in enumerate("abc"):
        assert cache.store(word, program)
        then = time.time() - 10_000 + number
        os.utime(tmp_path / f"{word}.executable", (then, then))
    assert cache.load("a") is not None  # used now
    old, new = tmp_path / "x.part", tmp_path / "y.part"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.max_bytes = cache.bytes
    assert cache.store("d", program)
    assert {path.stem for path in tmp_path.glob("*.executable")} == {"a", "c", "d"}
    assert cache.bytes <= cache.max_bytes
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_folder_that_others_write_to_is_not_read_from(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    with pytest.raises(ValueError, match="by its owner alone"):
        ExecutableCache(shared)
    assert ExecutableCache(tmp_path / "own").folder.stat().st_mode & 0o777 == 0o700
