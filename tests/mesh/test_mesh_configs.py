"""Mesh configurations: what they refuse, what they build, and the error when devices are few."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from capibara.mesh.mesh import MeshConfig, TPUv4MeshConfigurations, create_tpu_mesh_config

PRESETS = {"CULTURAL_ANALYSIS": (4, 8), "QUANTUM_CLASSICAL": (8, 4), "SPIKING_NEURAL": (16, 2)}


@pytest.mark.quick
@pytest.mark.parametrize("name", PRESETS)
def test_preset_builds_a_mesh_of_its_shape(name: str) -> None:
    config = getattr(TPUv4MeshConfigurations(), name)
    assert config.shape == PRESETS[name]
    built = config.build()
    assert isinstance(built, Mesh)
    assert built.devices.shape == PRESETS[name]
    assert built.axis_names == ("data", "model")
    assert set(built.axis_types) == {AxisType.Auto}
    assert len({device.id for device in built.devices.flat}) == 32


def test_presets_are_listed_and_frozen() -> None:
    presets = TPUv4MeshConfigurations()
    assert {name: config.shape for name, config in presets} == PRESETS
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets.CULTURAL_ANALYSIS.shape = (1, 1)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets.SPIKING_NEURAL = MeshConfig((1, 1))  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(), (0, 8), (4, -8), (4.0, 8), ("4", 8), (True, 8), "48", 32, None])
def test_shape_must_be_whole_numbers(shape: object) -> None:
    with pytest.raises(ValueError, match="mesh shape is one or more whole numbers"):
        MeshConfig(shape)  # type: ignore[arg-type]


def test_shape_takes_lists_and_numpy_integers() -> None:
    assert MeshConfig([np.int64(4), 8]).shape == (4, 8)  # type: ignore[list-item, arg-type]
    assert hash(MeshConfig([4, 8])) == hash(MeshConfig((4, 8)))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("data",), ("data", "data"), "ab", ("data", ""), ("data", 1)])
def test_axis_names_must_fit_the_shape(names: object) -> None:
    with pytest.raises(ValueError, match="one name an axis"):
        MeshConfig((4, 8), names)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), "32", None, True])
def test_memory_limit_must_be_positive(limit: object) -> None:
    with pytest.raises(ValueError, match="memory_limit_gb is a positive number"):
        MeshConfig((4, 8), memory_limit_gb=limit)  # type: ignore[arg-type]


def test_unknown_target_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'inferense'.*Did you mean 'inference'.*'training'.*'balanced'"):
        create_tpu_mesh_config((4, 8), "inferense", 32.0)


def test_documented_call() -> None:
    config = create_tpu_mesh_config(mesh_shape=(4, 8), optimization_target="training", memory_limit_gb=16.0)
    assert (config.shape, config.target, config.memory_limit_gb, config.size) == (
        (4, 8),
        "training",
        16.0,
        32,
    )
    assert config.axes == {"data": 4, "model": 8}


def test_default_axis_names_follow_the_rank() -> None:
    assert create_tpu_mesh_config((8,)).axis_names == ("data",)
    assert create_tpu_mesh_config((2, 4, 4)).axis_names == ("data", "model", "expert")
    with pytest.raises(ValueError, match=r"no default names.*pass axis_names"):
        create_tpu_mesh_config((2, 2, 2, 2))


def test_too_few_devices_says_how_to_get_them() -> None:
    with pytest.raises(ValueError) as caught:
        MeshConfig((4, 8)).build(jax.devices()[:1])
    text = str(caught.value)
    assert "needs 32 devices. Got 1 cpu device." in text
    assert "v4-64 slice (32 chips; Google's v4-32 is 16 chips)" in text
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=32" in text


def test_no_slice_is_named_where_none_has_that_size() -> None:
    with pytest.raises(ValueError) as caught:
        MeshConfig((5, 9)).build(jax.devices()[:2])
    assert "slice" not in str(caught.value)


def test_fewer_than_attached_takes_the_first() -> None:
    built = MeshConfig((2, 2)).build()
    assert sorted(device.id for device in built.devices.flat) == [d.id for d in jax.devices()[:4]]


def test_given_devices_must_be_exactly_enough() -> None:
    with pytest.raises(ValueError, match=r"exactly 4 devices. Got 5.*devices\[:4\]"):
        MeshConfig((2, 2)).build(jax.devices()[:5])


def test_an_arranged_array_keeps_its_order() -> None:
    arranged = np.asarray(jax.devices()[:4])[::-1].reshape(2, 2)
    assert (MeshConfig((2, 2)).build(arranged).devices == arranged).all()
