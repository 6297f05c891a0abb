"""Every form of import, in whatever order, and what must not happen to jax's own modules."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import jax
import jax.scipy.stats
import pytest

import capibara.jax


def fresh(code: str) -> str:
    """Run in a new interpreter, where nothing is imported yet."""
    done = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_capibara_does_not_import_jax() -> None:
    fresh(
        "import sys, capibara, capibara.parallel\n"
        "assert 'jax' not in sys.modules and 'capibara.jax' not in sys.modules\n"
        "import capibara.jax\n"
        "assert 'jax' in sys.modules"
    )


@pytest.mark.quick
def test_deep_imports_come_first_in_a_fresh_process() -> None:
    fresh(
        "import capibara.jax.scipy.special as special\n"
        "from capibara.jax.experimental.pallas import tpu\n"
        "from capibara.jax.experimental import mesh_utils\n"
        "import capibara.jax.numpy.linalg\n"
        "from capibara.jax.lax.linalg import cholesky\n"
        "from capibara.jax.nn import relu, initializers\n"
        "from capibara.jax._src import config, dtypes\n"
        "import capibara.jax._src.interpreters.mlir as mlir\n"
        "import jax, jax._src.interpreters.mlir, jax.experimental.pallas.tpu, jax.experimental.mesh_utils\n"
        "assert special.erf is jax.scipy.special.erf\n"
        "assert tpu.CompilerParams is jax.experimental.pallas.tpu.CompilerParams\n"
        "assert mesh_utils is jax.experimental.mesh_utils\n"
        "assert capibara.jax.numpy.linalg is jax.numpy.linalg\n"
        "assert cholesky is jax.lax.linalg.cholesky and relu is jax.nn.relu\n"
        "assert initializers is jax.nn.initializers\n"
        "assert config is jax._src.config and mlir is jax._src.interpreters.mlir\n"
    )


@pytest.mark.parametrize("order", [("capibara.jax.numpy", "jax.numpy"), ("jax.numpy", "capibara.jax.numpy")])
def test_either_may_be_imported_first(order: tuple[str, str]) -> None:
    fresh(
        f"import {order[0]}, {order[1]}, jax\n"
        "assert capibara.jax.numpy.sin is jax.numpy.sin\n"
        "assert jax.numpy.__name__ == 'jax.numpy' and jax.numpy.__spec__.name == 'jax.numpy'\n"
        "assert capibara.jax.numpy.__name__ == 'capibara.jax.numpy'\n"
        "assert jax.numpy.matmul is not capibara.jax.numpy.matmul\n"
    )


def test_import_module_and_find_spec() -> None:
    assert importlib.import_module("capibara.jax.scipy.stats") is jax.scipy.stats
    assert importlib.util.find_spec("capibara.jax.nn.initializers") is not None
    assert importlib.util.find_spec("capibara.jax.no_such_module") is None


@pytest.mark.quick
def test_jax_s_modules_keep_their_identity() -> None:
    before = {name: getattr(jax.scipy.stats, name) for name in ("__name__", "__spec__", "__loader__", "__path__")}
    assert capibara.jax.scipy.stats is jax.scipy.stats
    importlib.import_module("capibara.jax.scipy.stats.norm")
    for name, value in before.items():
        assert getattr(jax.scipy.stats, name) is value
    assert jax.scipy.stats.__spec__.name == "jax.scipy.stats"
    assert not getattr(jax.scipy.stats.__spec__, "_initializing", False)


def test_reload() -> None:
    import capibara.jax.flatten_util as module

    assert importlib.reload(module) is sys.modules["jax.flatten_util"]
    matmul = capibara.jax.numpy.sin
    assert importlib.reload(capibara.jax.numpy) is capibara.jax.numpy
    assert capibara.jax.numpy.sin is matmul


@pytest.mark.quick
def test_names_of_the_package() -> None:
    assert capibara.jax.__name__ == "capibara.jax"
    assert capibara.jax.__version__ == jax.__version__
    assert capibara.jax.tpu_v4_optimizations.__name__ == "capibara.jax.tpu_v4.optimizations"
    assert hasattr(capibara.jax, "tpu_v4_optimizations")
    assert {"jit", "numpy", "tpu_v4", "get_backend_info", "diagnostics"} <= set(dir(capibara.jax))


def test_star_import() -> None:
    space: dict[str, object] = {}
    exec("from capibara.jax.numpy import *\nfrom capibara.jax.scipy.stats import *", space)
    assert space["sin"] is jax.numpy.sin
    assert space["matmul"] is capibara.jax.numpy.matmul
    exec("from capibara.jax._src.core import *", space)
    assert "TPUv4MeshConfigurations" in space
    exec("from capibara.jax import *", space)
    assert space["jit"] is jax.jit
    assert space["config"] is capibara.jax.config


@pytest.mark.quick
def test_a_name_in_neither_says_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"'capibara.jax' has no attribute 'jitt'. Nearest: jit"):
        _ = capibara.jax.jitt
    with pytest.raises(AttributeError, match=r"'capibara.jax.numpy' has no attribute 'matmull'. Nearest: matmul"):
        _ = capibara.jax.numpy.matmull
    with pytest.raises(AttributeError, match="Nearest: tree_map"):  # removed names count as near
        _ = capibara.jax.treemap
    with pytest.raises(ImportError, match="matmull"):
        exec("from capibara.jax.numpy import matmull")
    with pytest.raises(ModuleNotFoundError, match=r"capibara\.jax\.nump"):
        importlib.import_module("capibara.jax.nump")


def test_what_jax_says_of_a_removed_name_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.dropin import alias as _alias

    monkeypatch.delitem(_alias.NAMES, "device_put_sharded")
    with pytest.raises(AttributeError, match=r"device_put_sharded.*deprecated; use jax.device_put"):
        _ = capibara.jax.device_put_sharded


def test_patching_jax_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = object()
    monkeypatch.setattr(jax.random, "normal", marker)
    assert capibara.jax.random.normal is marker


def test_internals_are_jax_s_own_with_the_documented_names() -> None:
    import capibara.jax._src.core as core
    from capibara.jax import tpu_v4
    from capibara.mesh import mesh

    assert core.TPUv4MeshConfigurations is tpu_v4.TPUv4MeshConfigurations is mesh.TPUv4MeshConfigurations
    assert core.Primitive is jax._src.core.Primitive
    assert set(dir(jax._src.core)) <= set(dir(core))
    assert capibara.jax._src.core is core


def test_our_own_modules_are_there_beside_jax_s() -> None:
    utils = importlib.import_module("capibara.jax").utils
    assert utils.check_migration_compatibility("import jax\n").is_compatible


@pytest.mark.parametrize("module", ["tpu_v4", "tpu_v4.optimizations"])
def test_what_is_not_documented_is_not_there(module: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'never'"):
        _ = importlib.import_module(f"capibara.jax.{module}").never
