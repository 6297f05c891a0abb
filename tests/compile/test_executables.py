"""A compiled program as a file runs where it was made for, and says so elsewhere before anything is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.compile.events import count_compilations
from capibara.compile.executables import load_executable, load_or_compile, save_executable

ONES = np.ones(4, np.float32)


def program() -> Any:
    return jax.jit(lambda x: x * 3).lower(ONES).compile()


def relabelled(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file as another machine would have written it."""
    line, _, body = path.read_bytes().partition(b"\n")
    head = json.loads(line)
    change(head["for"])
    path.write_bytes(json.dumps(head).encode() + b"\n" + body)


@pytest.mark.quick
def test_it_runs_again_without_compiling(tmp_path: Path) -> None:
    path = save_executable(program(), tmp_path / "times_three")
    with count_compilations() as counts:
        again = load_executable(path)
        assert again(ONES).tolist() == [3, 3, 3, 3]
    assert counts.compiled == 0


@pytest.mark.quick
def test_another_chips_program_names_both_and_is_compiled_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    path = save_executable(program(), tmp_path / "p")
    relabelled(path, lambda made: made.update(platform="tpu", chip="TPU v4", processor=""))
    with pytest.raises(ValueError, match=r"made for platform tpu, chip TPU v4.*here is platform cpu, chip cpu"):
        load_executable(path)
    with caplog.at_level(logging.WARNING):
        made, compiled = load_or_compile(lambda x: x * 3, [ONES], path)
    assert compiled
    assert made(ONES).tolist() == [3, 3, 3, 3]
    assert "TPU v4" in caplog.text
    assert load_or_compile(lambda x: x * 3, [ONES], path)[1] is False  # the new one was kept


@pytest.mark.parametrize(
    ("name", "value"), [("jaxlib", "0.0.1"), ("processor", "another"), ("compiler", "libtpu 0.0.1")]
)
def test_other_versions_and_processors_are_refused(tmp_path: Path, name: str, value: str) -> None:
    path = save_executable(program(), tmp_path / "p")
    relabelled(path, lambda made: made.update({name: value}))
    with pytest.raises(ValueError, match=f"{name} {value}; here is {name} "):
        load_executable(path)


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"", lambda data: data[:-1] + b"\0"])
def test_a_damaged_file_is_never_loaded(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = save_executable(program(), tmp_path / "p")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="cut short or damaged"):
        load_executable(path)


def test_a_program_of_several_devices(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(ONES, NamedSharding(mesh, PartitionSpec("data")))
    path = save_executable(jax.jit(lambda x: x + 1).lower(x).compile(), tmp_path / "p")
    assert load_executable(path, list(mesh.devices.flat))(x).tolist() == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="number of chips 4; here is number of chips 1"):
        load_executable(path, jax.devices()[:1])


def test_what_cannot_be_written_still_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        made, compiled = load_or_compile(lambda x: x * 3, [ONES], tmp_path / "file" / "p")
    assert compiled
    assert made(ONES).tolist() == [3, 3, 3, 3]
    assert "is not kept" in caplog.text
