"""The type stubs: the files are the list, and the list is of modules that jax has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import capibara.jax
from capibara.dropin.stubs import COVERED, stubs

FOLDER = Path(capibara.jax.__file__).parent


def test_files_are_as_listed() -> None:
    found = {path.relative_to(FOLDER): path.read_text() for path in FOLDER.rglob("*.pyi")}
    assert found == stubs()


@pytest.mark.quick
def test_every_stub_is_of_a_module_that_jax_has() -> None:
    absent = [path for path in COVERED if importlib.util.find_spec(f"jax.{path}") is None]
    assert absent == []


@pytest.mark.quick
def test_documented_modules_are_covered() -> None:
    assert set(COVERED) >= {
        "numpy",
        "numpy.linalg",
        "numpy.fft",
        "nn",
        "lax",
        "lax.linalg",
        "random",
        "experimental",
        "experimental.array_serialization",
        "experimental.mesh_utils",
        "experimental.pallas",
        "scipy.special",
    }


def test_a_folder_of_stubs_alone_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone_from_jax").mkdir()
    monkeypatch.setattr(capibara.jax, "__path__", [*capibara.jax.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match=r"capibara.jax.gone_from_jax"):
        importlib.import_module("capibara.jax.gone_from_jax")
