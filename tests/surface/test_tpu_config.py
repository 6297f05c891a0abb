"""TPUConfig: what it refuses, the layouts it gives, what it finds hot, and what it measures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.mesh.context import tpu_v4_optimization_context
from capibara.surface.tpu_config import ScalingConfig, TPUConfig

CONFIG = TPUConfig(num_chips=32, topology="4x8")


def test_the_default_is_the_documented_pod() -> None:
    assert TPUConfig() == TPUConfig(
        num_chips=32,
        topology="4x8",
        memory_per_chip=32 * 1024**3,
        flops_per_chip=275e12,
        compute_dtype="bfloat16",
        param_dtype="float32",
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.num_chips = 16  # type: ignore[misc]
    assert hash(TPUConfig()) == hash(CONFIG)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"topology": "4x4"}, r"multiply to num_chips=32. Got '4x4' = 16. .*topology='4x8', or num_chips=16"),
        ({"num_chips": 7}, r"multiply to num_chips=7.*topology='1x7'"),
        ({"topology": "4 by 8"}, "sizes joined by x"),
        ({"topology": "0x8"}, "sizes joined by x"),
        ({"topology": "2x2x2x4"}, "one to three sizes"),
        ({"topology": (4, 8)}, "sizes joined by x"),
        ({"num_chips": 32.0}, "num_chips is a whole number"),
        ({"num_chips": True}, "num_chips is a whole number"),
        ({"memory_per_chip": 0}, "memory_per_chip is a positive number"),
        ({"memory_per_chip": "32GB"}, "memory_per_chip is a positive number"),
        ({"flops_per_chip": math.nan}, "flops_per_chip is a positive number"),
        ({"compute_dtype": "bfloat61"}, r"compute_dtype 'bfloat61'. Did you mean 'bfloat16'.*'float32'"),
        ({"param_dtype": "int8"}, r"param_dtype 'int8'.*Choices: 'float64', 'float32', 'bfloat16', 'float16'"),
        ({"scaling_config": 0.8}, "scaling_config is a ScalingConfig"),
    ],
)
def test_what_is_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TPUConfig(**keywords)


def test_dtypes_may_be_jax_and_numpy_types() -> None:
    config = TPUConfig(compute_dtype=jnp.bfloat16, param_dtype=np.dtype("float32"))  # type: ignore[arg-type]
    assert (config.compute_dtype, config.param_dtype) == ("bfloat16", "float32")
    assert TPUConfig(param_dtype=np.float32) == config  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compute", "param", "mixed"),
    [("bfloat16", "float32", True), ("float16", "float32", True), ("float32", "float32", False),
     ("bfloat16", "bfloat16", False), ("float32", "bfloat16", False)],
)  # fmt: skip
def test_mixed_means_products_narrower_than_parameters(compute: str, param: str, mixed: bool) -> None:
    config = TPUConfig(compute_dtype=compute, param_dtype=param)
    assert config.use_mixed_precision is mixed
    assert config.get_memory_config()["use_mixed_precision"] is mixed


@pytest.mark.parametrize(
    ("compute", "param", "precision"),
    [("bfloat16", "float32", "mixed"), ("bfloat16", "bfloat16", "bfloat16"), ("float32", "float32", "float32")],
)
def test_the_policy_with_these_types(compute: str, param: str, precision: str) -> None:
    found = TPUConfig(compute_dtype=compute, param_dtype=param).precision
    assert found == precision
    with tpu_v4_optimization_context(precision=found):
        assert jax.config.jax_default_matmul_precision == compute


def test_types_without_a_policy_say_so() -> None:
    with pytest.raises(ValueError, match=r"precision policy.*compute_dtype='float16'"):
        _ = TPUConfig(compute_dtype="float16").precision


def test_utilization_of_the_peak() -> None:
    # 32 chips at 275e12 are 8.8e15 a second.
    assert CONFIG.total_flops == 8.8e15
    assert CONFIG.mfu(flops=4.4e15, seconds=2.0) == 0.25
    assert TPUConfig(flops_per_chip=137.5e12).mfu(4.4e15, 2.0) == 0.5
    with pytest.raises(ValueError, match="seconds is a positive number"):
        CONFIG.mfu(1.0, 0.0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 512), P("data", "model")),
        ((64, 128, 512), P("data", None, "model")),
        ((64, 3, 5, 7, 512), P("data", None, None, None, "model")),
        ((64,), P("data")),
        ((), P()),
        ((6, 512), P(None, "model")),
        ((64, 12), P("data", None)),
        ((6, 12), P(None, None)),
        ((0, 8), P("data", "model")),
    ],
)
def test_the_layout_of_a_tensor(shape: tuple[int, ...], spec: P) -> None:
    assert CONFIG.get_sharding_spec(shape) == spec
    # jax takes it: nothing that does not divide is left in.
    NamedSharding(CONFIG.mesh_config().build(), CONFIG.get_sharding_spec(tensor_shape=shape)).shard_shape(shape)


def test_other_topologies_have_other_axes() -> None:
    assert TPUConfig(32, "32").get_sharding_spec((64, 64)) == P("data", None)
    cube = TPUConfig(32, "2x4x4")
    assert cube.get_sharding_spec((6, 8)) == P("data", "model")
    assert cube.mesh_config().axes == {"data": 2, "model": 4, "expert": 4}
    with pytest.raises(ValueError, match="shape is whole numbers"):
        CONFIG.get_sharding_spec((4.0, 8))  # type: ignore[arg-type]


def test_the_memory_that_is_described_is_the_mesh_limit() -> None:
    config = TPUConfig(memory_per_chip=16 * 1024**3, param_dtype="bfloat16")
    found = config.get_memory_config()
    assert found["total_memory"] == 32 * 16 * 1024**3
    assert found["max_params"] == 32 * 8 * 1024**3
    assert config.mesh_config("training").memory_limit_gb == found["memory_limit_gb"] == 16.0
    assert config.mesh_config("training").target == "training"


@pytest.mark.quick
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, np.ndarray.tolist])
def test_hotspots_are_what_a_loop_finds(kind: Any) -> None:
    load = np.random.default_rng(0).uniform(0, 1, (4, 8)).astype(np.float32)
    load[0, 0], load[3, 7] = np.nan, 0.9
    wanted = [(i, j) for i in range(4) for j in range(8) if load[i, j] > 0.8]
    found = CONFIG.detect_hotspots(kind(load))
    assert found == wanted
    assert len(wanted) > 1
    assert {type(index) for place in found for index in place} == {int}


def test_the_threshold_decides_and_is_not_itself_hot() -> None:
    load = jnp.asarray([[0.5, 1.0], [2.0, 3.0]], jnp.bfloat16)
    at = lambda threshold: TPUConfig(scaling_config=ScalingConfig(threshold)).detect_hotspots(load)  # noqa: E731
    assert CONFIG.scaling_config.load_threshold == 0.8
    assert at(1.0) == [(1, 0), (1, 1)]
    assert at(0.1) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert at(5) == []
    # bfloat16's nearest to 0.8 is 0.80078: above.
    assert CONFIG.detect_hotspots(jnp.asarray([[0.8]], jnp.bfloat16)) == [(0, 0)]
    with pytest.raises(ValueError, match="load_threshold is a positive number"):
        ScalingConfig(-1.0)


@pytest.mark.parametrize("load", [np.ones(4), np.ones((2, 2, 2)), 0.5, [["a", "b"]], [[1j]], [[1], [1, 2]]])
def test_a_load_is_a_table_of_numbers(load: Any) -> None:
    with pytest.raises(ValueError, match="table of numbers with two axes"):
        CONFIG.detect_hotspots(load)


def test_the_axis_with_more_hot_places_is_split_over_both() -> None:
    rows = np.zeros((4, 8))
    rows[:, 2] = 1.0  # four rows are hot, one column
    columns = np.zeros((4, 8))
    columns[1, :3] = 1.0
    assert CONFIG.optimize_sharding(rows) == P(("data", "model"), None)
    assert CONFIG.optimize_sharding(load=columns) == P(None, ("data", "model"))
    assert CONFIG.optimize_sharding(np.eye(4)) == P(None, ("data", "model"))
    assert CONFIG.optimize_sharding() == CONFIG.optimize_sharding(np.zeros((4, 8))) == P("data", "model")


def test_usage_is_measured() -> None:
    before = CONFIG.profile_tpu_usage()
    held = jnp.ones((1024, 1024), jnp.float32).block_until_ready()
    after = CONFIG.profile_tpu_usage()
    assert set(after) == {"memory_allocated", "memory_peak", "device_count", "device_utilization"}
    assert after["memory_allocated"] - before["memory_allocated"] == held.nbytes
    assert after["device_count"] == len(jax.devices())
    if jax.default_backend() == "cpu":
        # A CPU has neither an allocator that counts nor a sensor.
        assert math.isnan(after["memory_peak"])
        assert math.isnan(after["device_utilization"])


@pytest.mark.parametrize("shape", [(-4, 8), 5, (True, 8), "ab", (4.0,)])
def test_a_shape_is_whole_numbers(shape: Any) -> None:
    with pytest.raises(ValueError, match="shape is whole numbers from 0 up"):
        CONFIG.get_sharding_spec(shape)


def test_absurd_figures_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="use topology='1x1000000000000000009'"):  # a prime
        TPUConfig(num_chips=10**18 + 9)
    with pytest.raises(ValueError, match="flops is a positive number"):
        CONFIG.mfu(-1.0, 1.0)
    assert CONFIG.mfu(0, 1.0) == 0
