"""Ops from outside of the library on the command line: `--import`, and the entry points of installed packages."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.kernels.core import outside
from capibara.kernels.core.op import registry, unregister

runner = CliRunner()
SOURCE = """
    import jax
    from jax.experimental import pallas as pl
    from capibara.kernels import Case, current_interpret, out_struct
    from vishwamai.kernels.tpu import register_tpu_op

    print("imported")  # not into the document

    def body(x, out):
        out[...] = 3 * x[...]

    @register_tpu_op(
        name="NAME", reference=lambda x: 3 * x, kernel=True, platforms=("tpu",),
        cases=[Case("small", ((16, 128),), "float32", tags=frozenset({"test", "tpu", "bench", "tune"}))],
    )
    def tripled(x):
        out = out_struct(x.shape, x.dtype, x)
        return pl.pallas_call(body, out_shape=out, interpret=current_interpret().pallas_argument())(x)
"""


def _source(name: str) -> str:
    return textwrap.dedent(SOURCE).replace("NAME", name)


@pytest.fixture(autouse=True)
def leave_all_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before, modules = set(registry()), set(sys.modules)
    monkeypatch.setattr(outside, "_imported", {})
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    monkeypatch.chdir(tmp_path)
    yield
    monkeypatch.setattr(outside, "_entry_points_loaded", True)
    for name in set(registry()) - before:
        unregister(name)
    for name in set(sys.modules) - modules:
        if name.startswith(("capibara_ops_", "ops_of_")):
            del sys.modules[name]


def test_every_command_knows_an_op_that_was_imported(tmp_path: Path) -> None:
    """Of a file by its path and of a module by its name; the TPU compiler's workers too."""
    (tmp_path / "my_ops.py").write_text(_source("by_path"), encoding="utf-8")
    (tmp_path / "ops_of_mine.py").write_text(_source("by_name"), encoding="utf-8")
    assert runner.invoke(app, ["kernels", "explain", "by_path", "f32[16,128]"]).exit_code == 2
    for name, module in (("by_path", "my_ops.py"), ("by_name", "ops_of_mine")):
        for command in (
            ["list"],
            ["explain", name, "f32[16,128]", "--on", "v4"],
            ["bench", name, "--against", "reference", "--samples", "1"],
            ["tune", name, "--implementations", "reference", "--out", str(tmp_path / "tuned")],
        ):
            made = runner.invoke(app, ["kernels", *command, "--import", module, "--json"])
            assert made.exit_code == 0, made.output
            assert f'"{name}' in made.stdout, command
            json.loads(made.stdout)
    both = ["--import", "my_ops.py", "--import", "ops_of_mine"]
    made = runner.invoke(app, ["kernels", "compile", "by_path", "--for", "v4-32", *both, "--json"])
    document = json.loads(made.stdout)
    assert made.exit_code == (0 if document["compiled"] else 4), made.output
    (row,) = document["rows"]
    assert row["ours"]["custom_calls"] == ["tpu_custom_call"]


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("gone.py", None, "which is not there"),
        ("ops_of_nobody", None, "ops_of_nobody cannot be imported. ModuleNotFoundError"),
        ("broken.py", "1 / 0", "broken.py cannot be loaded. ZeroDivisionError: division by zero"),
        ("not/a/module", None, "write my_package.ops or path/to/ops.py"),
    ],
)
def test_what_cannot_be_imported(module: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / module).write_text(text, encoding="utf-8")
    for command in (["kernels", "list"], ["tour"]):
        made = runner.invoke(app, [*command, "--import", module])
        assert made.exit_code == 2, made.output
        assert said in made.stderr


def _install(folder: Path, package: str, value: str) -> None:
    """What pip leaves of a package that has an entry point."""
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{outside.GROUP}]\nmine = {value}\n", encoding="utf-8")


@pytest.mark.quick
def test_the_ops_of_an_installed_package_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops_of_a_package.py").write_text(_source("by_entry_point"), encoding="utf-8")
    late = f"def register():\n{textwrap.indent(_source('by_function'), '    ')}"
    (tmp_path / "ops_of_another.py").write_text(late, encoding="utf-8")
    _install(tmp_path, "a_package", "ops_of_a_package")
    _install(tmp_path, "another", "ops_of_another:register")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(outside, "_entry_points_loaded", False)
    made = runner.invoke(app, ["kernels", "list"])
    assert made.exit_code == 0, made.output
    assert "by_entry_point" in made.stdout
    assert "by_function" in made.stdout


def test_a_package_whose_ops_do_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "a_broken_one", "ops_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(outside, "_entry_points_loaded", False)
    for _ in range(2):  # said every time, not once
        made = runner.invoke(app, ["kernels", "list"])
        assert made.exit_code == 2
        assert "the package a_broken_one 1.2 brings ops by the entry point mine = 'ops_of_nobody'" in made.stderr
        assert "ModuleNotFoundError" in made.stderr
