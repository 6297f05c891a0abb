"""Names that jax removed: each still resolves, warns once, and does what it did."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import capibara.jax
from capibara.dropin.compat import MODULES, NAMES
from capibara.mesh.mesh import MeshConfig

pytestmark = pytest.mark.usefixtures("nothing_said_yet")


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def get(path: str, root: str = "capibara.jax") -> Any:
    module, _, name = f"{root}.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


def in_jax(path: str) -> bool:
    try:
        get(path, "jax")
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("path", NAMES)
def test_name_resolves_and_warns_once(path: str) -> None:
    with warnings.catch_warnings(record=True) as setup:
        warnings.simplefilter("always")
        importlib.import_module(f"capibara.jax.{path}".rpartition(".")[0])
        present = in_jax(path)
    del setup
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = get(path), get(path)
    assert first is second
    said = [str(one.message) for one in caught if str(one.message) == str(NAMES[path])]
    if present:
        assert first is get(path, "jax")
        assert said == []
    else:
        assert len(said) == 1
        assert all(issubclass(one.category, DeprecationWarning) for one in caught)


@pytest.mark.parametrize("path", MODULES)
def test_module_imports(path: str, quiet: None) -> None:
    module = importlib.import_module(f"capibara.jax.{path}")
    stand_in = MODULES[path].new
    if stand_in and not in_jax(path):
        theirs = importlib.import_module(stand_in)
        public = [name for name in dir(theirs) if not name.startswith("_")]
        assert all(getattr(module, name) is getattr(theirs, name) for name in public)
    assert dir(module)


def test_there_are_many() -> None:
    assert len(NAMES) + len(MODULES) > 300


def test_the_warning_points_at_the_caller() -> None:
    with pytest.warns(DeprecationWarning, match="jax.tree_map is gone from jax since 0.6.0") as caught:
        _ = capibara.jax.tree_map
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="jax.numpy.trapz") as caught:
        exec(compile("from capibara.jax.numpy import trapz", __file__, "exec"))
    assert caught[0].filename == __file__


def test_removed_names_are_not_advertised() -> None:
    assert "tree_map" not in dir(capibara.jax)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(name in NAMES for name in capibara.jax.__all__)


@pytest.mark.quick
def test_modules_that_are_also_objects_leave_the_object_alone() -> None:
    code = (
        "from capibara.jax.config import config\n"
        "from capibara.jax.checkpoint import checkpoint\n"
        "import capibara.jax.config, capibara.jax.checkpoint, jax\n"
        "assert capibara.jax.config is config and config.jax_enable_x64 is False\n"
        "assert capibara.jax.checkpoint is checkpoint is jax.checkpoint\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_attribute_of_a_module_that_is_gone(quiet: None) -> None:
    assert capibara.jax.linear_util.wrap_init is importlib.import_module("jax.extend.linear_util").wrap_init
    assert capibara.jax.lib.xla_bridge.get_backend().platform == "cpu"
    assert capibara.jax.experimental.maps.Mesh is jax.sharding.Mesh
    with pytest.raises(AttributeError, match="Nearest: Mesh"):
        _ = capibara.jax.experimental.maps.Mesch


def test_tree_functions(quiet: None) -> None:
    assert capibara.jax.tree_map(lambda x: x + 1, [1, {"a": 2}]) == [2, {"a": 3}]
    assert capibara.jax.tree_multimap(lambda x, y: x + y, [1], [2]) == [3]
    assert capibara.jax.tree_leaves([1, [2]]) == [1, 2]


@pytest.mark.quick
def test_pjit_takes_its_old_keywords(quiet: None) -> None:
    with jax.set_mesh(MeshConfig((4, 8)).build()):
        decorate = capibara.jax.pjit(in_axis_resources=P("data", "model"), out_axis_resources=P("model"))
        doubled = decorate(lambda x: 2 * x)(np.ones((8, 8)))
        assert doubled.sharding.spec == P("model")
        direct = capibara.jax.pjit(lambda x: x, out_axis_resources=P("data"))(np.ones(8))
        assert direct.sharding.spec == P("data")
    with pytest.raises(TypeError, match="not both"):
        capibara.jax.pjit(in_axis_resources=None, in_shardings=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_shard_map_takes_check_rep() -> None:
    from capibara.dropin import adapters as _adapters
    from capibara.jax.experimental.shard_map import shard_map

    mesh = MeshConfig((32,), ("data",)).build()
    for function in (shard_map, _adapters.shard_map):
        mapped = function(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), check_rep=False
        )
        assert mapped(jnp.ones(32))[0] == 32


def test_device_put_sharded_and_replicated(quiet: None) -> None:
    devices = jax.devices()[:4]
    shards = [{"a": np.full(2, i)} for i in range(4)]
    put = capibara.jax.device_put_sharded(shards, devices)["a"]
    assert [(shard.device, shard.data[0, 0].item()) for shard in put.addressable_shards] == [
        (device, i) for i, device in enumerate(devices)
    ]
    copies = capibara.jax.device_put_replicated(np.arange(3), devices)
    np.testing.assert_array_equal(copies, np.tile(np.arange(3), (4, 1)))
    assert len(copies.sharding.device_set) == 4
    with pytest.raises(ValueError, match="a shard a device"):
        capibara.jax.device_put_sharded(shards, devices[:3])


def test_numpy_names(quiet: None) -> None:
    np_ = capibara.jax.numpy
    assert np_.random is capibara.jax.random or np_.random is jax.random
    np.testing.assert_array_equal(
        np_.in1d(np.asarray([[1, 2], [3, 4]]), np.asarray([2, 3])), [False, True, True, False]
    )
    np.testing.assert_array_equal(np_.msort(jnp.asarray([[3, 1], [2, 5]])), [[2, 1], [3, 5]])
    assert np_.trapz(jnp.asarray([0.0, 1.0, 2.0])) == 2.0
    assert np.isneginf(np_.NINF)
    assert np.signbit(np_.NZERO)
    assert not np.signbit(np_.PZERO)
    assert np_.issubsctype(jnp.ones(2), jnp.floating)
    assert not np_.issubsctype(jnp.int32, jnp.floating)
    assert np_.row_stack is jnp.vstack


def test_index_update_and_friends(quiet: None) -> None:
    ops, x = capibara.jax.ops, jnp.arange(4)
    np.testing.assert_array_equal(ops.index_update(x, ops.index[1:3], 9), [0, 9, 9, 3])
    np.testing.assert_array_equal(ops.index_add(x, 0, 5), [5, 1, 2, 3])
    np.testing.assert_array_equal(ops.index_mul(x, 3, 2), [0, 1, 2, 6])
    np.testing.assert_array_equal(ops.index_max(x, 0, 2), [2, 1, 2, 3])
    np.testing.assert_array_equal(ops.index_min(x, 3, 1), [0, 1, 2, 1])


def test_random_names(quiet: None) -> None:
    random = capibara.jax.random
    assert isinstance(random.PRNGKey(0), random.KeyArray)
    np.testing.assert_array_equal(random.threefry2x32_key(3), random.PRNGKey(3, impl="threefry2x32"))
    assert random.rbg_key(3).shape == random.unsafe_rbg_key(3).shape == (4,)
    assert sorted(random.shuffle(random.PRNGKey(0), jnp.arange(9)).tolist()) == list(range(9))


def test_host_callbacks(quiet: None, capfd: pytest.CaptureFixture[str]) -> None:
    callback = importlib.import_module("capibara.jax.experimental.host_callback")
    seen: list[int] = []

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        x = callback.id_print(x, what="here")
        x = callback.id_tap(lambda value, transforms: seen.append(int(value)), x)
        return callback.call(lambda value: np.asarray(value) * 2, x, result_shape=jax.ShapeDtypeStruct((), jnp.int32))

    assert function(jnp.int32(21)) == 42
    jax.effects_barrier()
    assert seen == [21]
    assert "here: 21" in capfd.readouterr().out


def test_spherical_harmonics_keep_their_argument_order(quiet: None) -> None:
    azimuth, polar = jnp.asarray([0.3]), jnp.asarray([1.1])
    value = capibara.jax.scipy.special.sph_harm(jnp.asarray([0]), jnp.asarray([1]), azimuth, polar, n_max=1)
    np.testing.assert_allclose(value.real, np.sqrt(3 / (4 * np.pi)) * np.cos(1.1), rtol=1e-5)


def test_other_adapters(quiet: None) -> None:
    assert capibara.jax.curry(lambda a, b: a - b)(5)(3) == 2
    assert "multiply" in capibara.jax.xla_computation(lambda x: x * 2)(1.0).as_hlo_text()
    assert capibara.jax.lax.tie_in(1, 2) == 2
    aval = jax.typeof(1.0)
    assert capibara.jax.core.raise_to_shaped(aval) is aval
    assert not capibara.jax.core.raise_to_shaped(aval, weak_type=False).weak_type
    assert get("cloud_tpu_init.cloud_tpu_init")() is None
    assert np.from_dlpack(jnp.arange(3)).tolist() == [0, 1, 2]
    assert "dltensor" in repr(capibara.jax.dlpack.to_dlpack(jnp.arange(3)))
    with capibara.jax.experimental.disable_x64():
        assert jnp.asarray(np.float64(1)).dtype == jnp.float32
    # A CPU does not say what it allocates; where it does, it is a number of bytes.
    for name in ("device_memory_allocated", "device_memory_peak"):
        value = getattr(capibara.jax, name)()
        assert value is None or value >= 0


def test_pvary(quiet: None) -> None:
    mesh = MeshConfig((4,), ("data",)).build()
    mapped = jax.shard_map(
        lambda: capibara.jax.lax.pvary(jnp.ones(1), "data"), mesh=mesh, in_specs=(), out_specs=P("data")
    )
    assert mapped().shape == (4,)


@pytest.mark.quick
def test_what_0_4_30_had(quiet: None) -> None:
    """Names of its modules that today's jax has not, each with what it did."""
    assert capibara.jax.core.ConcretizationTypeError is jax.errors.ConcretizationTypeError
    assert capibara.jax.core.canonicalize_shape((np.int64(2), 3)) == (2, 3)
    assert capibara.jax.interpreters.xla.canonicalize_dtype(np.float64(1)).dtype == np.float32
    assert capibara.jax.interpreters.xla.abstractify(np.ones(3, np.int8)) == jax.typeof(np.ones(3, np.int8))
    assert capibara.jax.interpreters.batching.not_mapped is None
    built = capibara.jax.tree_util.build_tree(jax.tree.structure({"a": (1, 2), "b": 3}), ((1, 2), 3))
    assert built == {"a": (1, 2), "b": 3}
    with importlib.import_module("capibara.jax.experimental.x64_context").enable_x64():
        assert jnp.asarray(np.float64(1)).dtype == jnp.float64


def test_the_config_was_in_a_module_of_its_name() -> None:
    with pytest.warns(DeprecationWarning, match="jax.config.config is gone") as caught:
        assert capibara.jax.config.config is capibara.jax.config
    assert caught[0].filename == __file__


def test_loads_and_stores_of_pallas(quiet: None) -> None:
    pl = capibara.jax.experimental.pallas

    def kernel(x: Any, y: Any) -> None:
        pl.store(y, slice(0, 4), 2 * pl.load(x, slice(4, 8)))
        pl.store(y, slice(4, 8), pl.swap(y, slice(0, 4), pl.load(x, slice(0, 4), mask=None)))
        with pytest.raises(TypeError, match=r"pl.load has no mask any more.*ref.at"):
            pl.load(x, slice(0, 4), mask=jnp.ones(4, bool))

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8,), "float32"), interpret=True)
    np.testing.assert_array_equal(call(jnp.arange(8.0)), [0, 1, 2, 3, 8, 10, 12, 14])


@pytest.mark.quick
def test_names_that_later_releases_removed(quiet: None) -> None:
    """What they stand for now takes the calls that they took."""
    ref = capibara.jax.array_ref(jnp.zeros(2))
    ref[0] = 3.0
    assert ref[...].tolist() == [3.0, 0.0]
    assert isinstance(ref, capibara.jax.ArrayRef)
    assert capibara.jax.experimental.mutable_array(jnp.ones(1))[...] == 1
    assert capibara.jax.get_ty(jnp.ones(3)).shape == (3,)
    assert {"Auto", "Explicit", "Manual"} <= set(capibara.jax.sharding.AxisTypes.__members__)
    assert get("lib.xla_client.bfloat16") is jnp.bfloat16
    assert get("lib.xla_client.FftType") is jax.lax.FftType
    assert isinstance(jax.devices()[0], get("lib.xla_extension.Device"))
    assert get("interpreters.xla.xb").get_backend().platform == "cpu"
    assert capibara.jax.core.is_concrete(jnp.ones(1))
    assert get("experimental.array_api.linalg.det") is jnp.linalg.det
    assert get("experimental.array_api.fft.fft") is jnp.fft.fft
    assert get("util.to_dlpack") is get("dlpack.to_dlpack")


def test_exported_functions(quiet: None) -> None:
    old = importlib.import_module("capibara.jax.experimental.export")
    exported = old.export(jax.jit(lambda x: 2 * x))(jax.ShapeDtypeStruct((2,), jnp.float32))
    np.testing.assert_array_equal(old.call(exported)(jnp.ones(2)), [2, 2])
    np.testing.assert_array_equal(old.call_exported(exported)(jnp.ones(2)), [2, 2])
    assert old.default_lowering_platform() == "cpu"
    assert old.minimum_supported_serialization_version <= exported.calling_convention_version
    pytest.importorskip("flatbuffers", reason="jax serializes by way of flatbuffers")
    assert len(old.serialize(exported, vjp_order=1)) > len(old.serialize(exported))


def test_barrier_wait(quiet: None) -> None:
    callback = importlib.import_module("capibara.jax.experimental.host_callback")
    seen: list[float] = []
    jax.jit(lambda x: callback.id_tap(lambda value, transforms: seen.append(float(value)), x))(2.0)
    assert callback.barrier_wait("here") is None
    assert seen == [2.0]
