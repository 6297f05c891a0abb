"""Every public name of every public module of the installed jax, through `capibara.jax`."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
import warnings
from types import ModuleType

import jax
import pytest

import capibara.jax
from capibara.dropin.alias import ALIASED, AliasModule
from capibara.dropin.changed import CHANGED

# Packages that some of jax's own modules need and a plain installation does not have.
OPTIONAL = {"absl", "flatbuffers", "tensorflow", "tensorstore", "xprof"}
OWN = {"config"}  # the one object of jax's top level that is replaced by ours


def public_modules() -> tuple[list[str], dict[str, str]]:
    """Paths below jax, and those that cannot be imported here with the optional package they lack."""
    found, absent = [""], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
            path = info.name.removeprefix("jax.")
            if any(part.startswith("_") for part in path.split(".")):
                continue
            try:
                importlib.import_module(info.name)
            except ImportError as error:
                (absent[path],) = [name for name in OPTIONAL if name in f"{error.name} {error}"]
            else:
                found.append(path)
    return found, absent


def ours(path: str) -> ModuleType:
    return importlib.import_module(f"capibara.jax.{path}".rstrip("."))


def real(path: str) -> ModuleType:
    return importlib.import_module(f"jax.{path}".rstrip("."))


def same(path: str, mine: object, theirs: object) -> bool:
    if path in OWN:
        return mine is getattr(capibara.jax, path) and isinstance(mine, type(theirs))
    if path in CHANGED:
        return getattr(mine, "__wrapped__", None) is theirs
    if path in ALIASED and isinstance(theirs, ModuleType) and theirs.__name__ == f"jax.{path}":
        return isinstance(mine, AliasModule) and mine.__dict__["__alias__"].real is theirs
    return mine is theirs


def mismatches(paths: list[str]) -> tuple[list[str], int]:
    wrong, names = [], 0
    for path in paths:
        mine, theirs = ours(path), real(path)
        if path and not same(path, mine, theirs):
            wrong.append(path)
        for name in dir(theirs):
            if name.startswith("_"):
                continue
            names += 1
            full = f"{path}.{name}".lstrip(".")
            if not same(full, getattr(mine, name), getattr(theirs, name)):
                wrong.append(full)
        missing = {name for name in dir(theirs) if not name.startswith("_")} - set(dir(mine))
        wrong += [f"dir() of {path} lacks {name}" for name in sorted(missing)]
    return wrong, names


@pytest.mark.quick
def test_every_public_name_is_jax_s_own(record_property: pytest.RecordProperty) -> None:
    paths, absent = public_modules()
    wrong, names = mismatches(paths)
    report = f"jax {jax.__version__}: {len(paths)} modules, {names} names, {len(absent)} modules not importable"
    record_property("walk", report)
    print(report, *(f"  {path}: needs {package}" for path, package in absent.items()), sep="\n")
    assert wrong == []
    assert len(paths) > 200
    assert names > 6000
    assert len(absent) < 30
    for path in absent:  # ours fails as jax's does, and does not make up a module
        with pytest.raises(ImportError):
            ours(path)


def test_the_walk_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capibara.jax.random.__dict__, "normal", lambda: None)
    monkeypatch.setitem(capibara.jax.numpy.__dict__, "matmul", jax.numpy.dot)
    monkeypatch.setitem(sys.modules, "capibara.jax.scipy.fft", ModuleType("copy"))
    monkeypatch.setattr(sys.modules["capibara.jax.scipy.fft"], "dct", jax.scipy.fft.dct, raising=False)
    wrong, _ = mismatches(["random", "numpy", "nn"])
    assert set(wrong) >= {"random.normal", "numpy.matmul"}
    assert not any(one.startswith("nn") for one in wrong)
    with pytest.raises(AttributeError):
        mismatches(["scipy.fft"])


def test_only_these_are_changed() -> None:
    changed = {"numpy.matmul", "numpy.dot", "numpy.einsum", "nn.dot_product_attention", "nn.standardize"}
    changed.add("lax.associative_scan")
    transforms = ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2")
    assert set(CHANGED) == changed | {f"numpy.fft.{name}" for name in transforms}


def test_most_modules_are_jax_s_own_objects() -> None:
    paths, _ = public_modules()
    unchanged = [path for path in paths if path and ours(path) is real(path)]
    assert len(unchanged) > 180
    for path in unchanged:
        assert real(path).__spec__.name == f"jax.{path}"


def test_classes_pytrees_and_pickles_agree() -> None:
    from capibara.jax import numpy as jnp
    from capibara.jax.sharding import PartitionSpec
    from capibara.jax.tree_util import Partial

    x = jnp.ones(3)
    assert isinstance(x, jax.Array)
    assert isinstance(jax.numpy.ones(3), capibara.jax.Array)
    assert pickle.loads(pickle.dumps(PartitionSpec("data"))) == jax.P("data")
    tree = Partial(jnp.matmul, x)
    assert jax.tree.structure(tree) == capibara.jax.tree.structure(tree)
    for function in (jnp.matmul, capibara.jax.jit, jnp.float32):
        assert pickle.loads(pickle.dumps(function)) is function


def test_a_changed_function_pickles_into_a_fresh_process() -> None:
    data = pickle.dumps(capibara.jax.numpy.einsum)
    code = f"import pickle; f = pickle.loads({data!r}); import capibara.jax.numpy as n; assert f is n.einsum"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_a_submodule_leaves_the_function_of_its_name() -> None:
    """jax.experimental.mosaic.gpu has a function wgmma, from a submodule wgmma."""
    code = (
        "import jax.experimental.mosaic.gpu as real; before = real.wgmma; "
        "import capibara.jax.experimental.mosaic.gpu.wgmma as module; "
        "assert real.wgmma is before and callable(before), real.wgmma; "
        "import sys; assert sys.modules['capibara.jax.experimental.mosaic.gpu.wgmma'].__name__.endswith('.wgmma')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
