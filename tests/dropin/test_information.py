"""What the backend reports of itself, and the check of an installation."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import jax
import pytest

import capibara
from capibara.dropin import installation as _installation
from capibara.jax import diagnostics, get_backend_info, get_optimization_status
from capibara.mesh.context import tpu_v4_optimization_context


class FakeOp:
    """What is read of an op."""

    def __init__(self, family: str, kernel: bool) -> None:
        self.family = family
        self.cases = [types.SimpleNamespace(args=lambda: (), params={})]
        self.implementations = {"picked": types.SimpleNamespace(kernel=kernel)}

    def call(self, *args: Any, **params: Any) -> Any:
        return self


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeOp]:
    from capibara import kernels
    from capibara.kernels.core import dispatch

    registered = {"gemm": FakeOp("linalg", kernel=False)}
    monkeypatch.setattr(kernels, "registry", lambda: registered, raising=False)
    monkeypatch.setattr(dispatch, "select", lambda call: types.SimpleNamespace(implementation="picked"))
    return registered


@pytest.mark.quick
def test_backend_info(ops: dict[str, FakeOp]) -> None:
    info = get_backend_info()
    assert info["name"] == "capibara.jax"
    assert info["platform"] == "cpu"
    assert info["device_kind"] == "cpu"
    assert info["device_count"] == jax.device_count()
    assert info["tpu_optimized"] is False
    assert info["custom_kernels"] is False
    assert info["memory_limit_gb"] > 0
    assert info["capabilities"] == {
        "flash_attention": False,
        "parallel_scan": False,
        "vq_kernels": False,
        "gemm": True,
    }
    assert info["versions"]["jax"] == jax.__version__
    assert {"capibara", "python", "jaxlib", "numpy"} <= set(info["versions"])


def test_what_is_registered_and_picked_shows(ops: dict[str, FakeOp]) -> None:
    ops["ragged_attention"] = FakeOp("attention", kernel=True)
    info = get_backend_info()
    assert info["custom_kernels"] is True
    assert info["capabilities"]["flash_attention"] is True
    assert info["capabilities"]["ragged_attention"] is True


def test_unknown_memory_is_nan(ops: dict[str, FakeOp], monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.hardware import devices

    silent = types.SimpleNamespace(platform="cpu", device_kind="cpu", memory_limit_bytes=None)
    monkeypatch.setattr(devices, "default", lambda: silent)
    assert math.isnan(get_backend_info()["memory_limit_gb"])


def test_status_says_what_is_true_now(ops: dict[str, FakeOp]) -> None:
    off = {"tpu_optimized": False, "custom_kernels_active": False, "memory_optimized": False}
    ops["gemm"] = FakeOp("linalg", kernel=True)
    assert get_optimization_status() == off
    with tpu_v4_optimization_context():
        assert get_optimization_status() == {**off, "tpu_optimized": True, "custom_kernels_active": True}
        assert get_backend_info()["tpu_optimized"] is True
        ops["gemm"] = FakeOp("linalg", kernel=False)
        assert get_optimization_status() == {**off, "tpu_optimized": True}
    assert get_optimization_status() == off


@pytest.mark.quick
def test_memory_is_optimized_inside_of_a_context_and_while_something_is_away(ops: dict[str, FakeOp]) -> None:
    from capibara.memory import TpuMemoryManager, create_optimized_cache

    def said() -> bool:
        return get_optimization_status()["memory_optimized"]

    gc.collect()
    assert not said()
    manager = TpuMemoryManager(memory_limit_gb=1.0, prefetch_enabled=False)
    manager.register("x", jax.numpy.ones(8))
    assert not said()  # registered, and on the device as it was
    with manager.managed_context():
        assert said()
        with manager.managed_context():
            pass
        assert said()
    assert not said()
    manager.offload("x")
    assert said()
    manager.get("x")
    assert not said()
    with create_optimized_cache(cache_size_gb=0.1):
        assert said()
    assert not said()
    cache = create_optimized_cache(cache_size_gb=0.1)
    assert said()
    assert len(cache) == 0
    del cache
    gc.collect()
    assert not said()


def test_the_real_registry_is_read() -> None:
    from capibara import kernels

    capabilities = get_backend_info()["capabilities"]
    assert set(kernels.registry()) <= set(capabilities)


@pytest.mark.quick
def test_installation_works_here() -> None:
    found = diagnostics.check_installation()
    assert found.jax_native_available
    assert found.error_message is None
    assert found.versions["jax"] == importlib.metadata.version("jax")
    assert len(found.devices) == jax.device_count()
    assert "capibara.jax works" in str(found)


def test_a_backend_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(_installation.devices, "attached", fail)
    found = diagnostics.check_installation()
    assert not found.jax_native_available
    assert "Unable to initialize backend 'tpu'" in found.error_message
    assert found.devices == ()
    assert "does not work" in str(found)


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.numpy, "array_equal", lambda a, b: False)
    assert "came out wrong" in diagnostics.check_installation().error_message


@pytest.mark.parametrize("has_gpu", [True, False])
def test_an_unseen_gpu_is_missing_the_plugin(has_gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    if has_gpu:
        driver.write_text("NVRM version")
    monkeypatch.setattr(_installation, "_NVIDIA", driver)
    monkeypatch.setattr(_installation.shutil, "which", lambda name: None)
    commands = [one.command for one in diagnostics.check_installation().missing]
    assert ("pip install 'jax[cuda13]'" in commands) is has_gpu
    assert _installation._missing({"gpu"}) == _installation._missing({"gpu", "cpu"})
    assert not any("cuda" in one.command for one in _installation._missing({"gpu"}))


@pytest.mark.parametrize(("machine", "system", "expected"), [("x86_64", "Linux", True), ("aarch64", "Linux", False)])
def test_libtpu_is_missing_only_where_it_installs(
    machine: str, system: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_installation.platform, "machine", lambda: machine)
    monkeypatch.setattr(_installation.platform, "system", lambda: system)
    monkeypatch.setattr(_installation.importlib.util, "find_spec", lambda name: None)
    found = [one for one in _installation._missing(set()) if one.what == "libtpu"]
    assert bool(found) is expected
    assert all("pip install 'jax[tpu]'" in str(one) for one in found)


BROKEN = {
    "raises": ("raise ImportError('libxla.so: cannot open shared object file')", "libxla.so", "that load"),
    "is too old": ("__version__ = '0.4.30'", "jax", "that load"),
    "is absent": ("raise ModuleNotFoundError(\"No module named 'jaxlib'\", name='jaxlib')", "jaxlib", "jaxlib"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BROKEN)
def test_a_jaxlib_that_does_not_load(name: str, tmp_path: Path) -> None:
    """The diagnostics import and answer; every other name says what is wrong and the command that mends it."""
    source, said, lacking = BROKEN[name]
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").write_text(source)
    script = """
        import json
        from capibara.jax import diagnostics
        found = diagnostics.check_installation()
        refused = []
        for line in ("import capibara.jax.numpy", "from capibara.jax import jit", "import capibara.jax as j; j.vmap"):
            try:
                exec(line)
            except ImportError as error:
                refused.append(str(error))
        print(json.dumps([found.jax_native_available, found.error_message, list(found.versions), str(found),
                          [[one.what, one.command] for one in found.missing], refused]))
    """
    source_of_ours = str(Path(capibara.__file__).parents[1])
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source_of_ours])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    works, message, versions, text, missing, refused = json.loads(made.stdout)
    assert works is False
    assert said in message
    assert "capibara" in versions
    assert f"capibara.jax does not work: {message}" in text
    assert lacking in missing[0][0]
    assert missing[0][1] == "pip install --upgrade --force-reinstall jax jaxlib"
    assert len(refused) == 3
    assert all(message.partition(": ")[2] in one and missing[0][1] in one for one in refused)
