"""Compiled programs on disk: read back as they were, made anew where they cannot be, and no more than may be kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.compile import cache as cache_module
from capibara.compile import executables
from capibara.compile.cache import ExecutableCache


def compiled(times: float) -> Any:
    return jax.jit(lambda x: x * times).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()


@pytest.mark.quick
def test_a_program_is_read_back(tmp_path: Path) -> None:
    cache = ExecutableCache(tmp_path)
    name = cache.name("times 3")
    assert cache.load(name) is None
    assert cache.store(name, compiled(3.0))
    again = ExecutableCache(tmp_path).load(name)
    assert again is not None
    assert again(jnp.arange(4.0)).tolist() == [0, 3, 6, 9]
    assert cache.name("times 4") != name


def test_flags_and_settings_are_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ExecutableCache(tmp_path)
    name = cache.name("x")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--something")
    assert cache.name("x") != name
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    with jax.default_matmul_precision("highest"):
        assert cache.name("x") != name
    assert cache.name("x") == name


def test_a_damaged_entry_is_none_and_goes(tmp_path: Path, nothing_said_yet: None) -> None:
    cache = ExecutableCache(tmp_path)
    name = cache.name("x")
    cache.store(name, compiled(3.0))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert cache.load(name) is None
    assert not list(tmp_path.iterdir())


def test_those_unused_for_longest_go_first(tmp_path: Path) -> None:
    program = compiled(3.0)
    first = ExecutableCache(tmp_path)
    first.store("a", program)
    size = first.bytes
    cache = ExecutableCache(tmp_path, max_bytes=int(2.5 * size))
    cache.store("b", program)
    for number, name in enumerate("ab"):
        os.utime(cache._path(name), (number, number))
    cache.load("a")  # used now
    cache.store("c", program)
    assert cache.load("b") is None
    assert cache.load("a") is not None
    assert cache.bytes <= cache.max_bytes
    assert not ExecutableCache(tmp_path, max_bytes=size // 2).store("d", program)
    with pytest.raises(ValueError, match="holds a byte or more"):
        ExecutableCache(tmp_path, max_bytes=0)


def test_another_compiler_and_another_processor_have_other_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ExecutableCache(tmp_path)
    names = {cache.name("a"), cache.name("b")}
    with monkeypatch.context() as changed:
        changed.setattr("jaxlib.version.__version__", "0.0.1")
        names.add(cache.name("a"))
    with monkeypatch.context() as changed:
        changed.setattr(cache_module, "processor", lambda: ("another",))
        names.add(cache.name("a"))
    assert len(names) == 4
    assert cache.name("a") in names


def test_a_full_disk_keeps_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_said_yet: None
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    cache = ExecutableCache(tmp_path)
    monkeypatch.setattr(executables.os, "replace", full)
    assert not cache.store(cache.name("a"), compiled(3.0))
    assert list(tmp_path.iterdir()) == []


def test_what_was_never_finished_goes_after_an_hour(tmp_path: Path) -> None:
    cache = ExecutableCache(tmp_path)
    old, new = tmp_path / "x.part", tmp_path / "y.part"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (time.time() - 4000,) * 2)
    cache.store("a", compiled(3.0))
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_folder_that_others_write_to_is_not_read_from(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    with pytest.raises(ValueError, match="by its owner alone"):
        ExecutableCache(shared)
    assert ExecutableCache(tmp_path / "own").folder.stat().st_mode & 0o777 == 0o700
