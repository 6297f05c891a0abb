"""A documented name whose room is still to come says so, in one text, however it is asked for."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from capibara.to_come import TO_COME

NAMES = [(module, name) for module, names in TO_COME.items() for name in names]
CONTRACT = Path(__file__).resolve().parents[2] / "docs" / "contract.toml"


def _first_missing(path: str) -> str | None:
    """The first part of "module:Name.attribute" that is not there; None where the module and the name are."""
    module, _, names = path.partition(":")
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            return ".".join(parts[:end])
    name = names.partition(".")[0]
    return f"{module}.{name}" if name and not hasattr(found, name) else None


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # names kept for older code warn when they are read
def test_they_are_the_documented_names_that_are_not_there() -> None:
    """A room that comes takes its names off the list; a name that is documented anew comes on."""
    sections = tomllib.loads(CONTRACT.read_text(encoding="utf-8"))["section"]
    paths = [entry["path"] for section in sections for entry in section["entries"] if "path" in entry]
    absent = {_first_missing(path.replace("()", "")) for path in paths} - {None}
    assert absent == {f"{module}.{name}" for module, name in NAMES}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("module", "name"),
    [*NAMES, ("capibara.jax", "announced"), ("capibara.jax.tpu_v4", "announced")],  # the last two are so here alone
)
def test_each_form_of_asking(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TO_COME, module, (*TO_COME.get(module, ()), name))
    door = importlib.import_module(module)
    assert not hasattr(door, name)
    assert name not in dir(door)
    with pytest.raises(AttributeError) as by_attribute:
        getattr(door, name)
    said = {str(by_attribute.value)}
    for statement in (
        f"from {module} import {name}",
        f"import {module}.{name}",
        f"import {module}.{name} as it",
        f"from {module}.{name} import anything",
    ):
        # A module that fails to import is tried anew each time, and says the same each time.
        with pytest.raises(ImportError) as by_import:
            exec(statement, {})
        said.add(str(by_import.value))
    assert len(said) == 1, said
    assert f"{module}.{name} is documented and not implemented yet" in said.pop()


@pytest.mark.quick
def test_what_is_not_documented_is_plainly_absent() -> None:
    import capibara.jax.tpu_v4.optimizations as door

    with pytest.raises(AttributeError, match="has no attribute 'TpuNothing'"):
        door.TpuNothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'TpuNothing'"):
        exec("from capibara.jax.tpu_v4.optimizations import TpuNothing", {})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'capibara.*nothing'"):
        importlib.import_module("capibara.jax.tpu_v4.nothing")
    scope: dict[str, object] = {}
    exec("from capibara.jax.tpu_v4.optimizations import *", scope)
    assert "create_mesh_sharding" in scope
