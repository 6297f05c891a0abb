"""GPUs that are not attached: what the compiler is told of them, and who may be asked."""

from __future__ import annotations

import re

import pytest

from capibara.compile import ChipCompiler, gpu_compiler
from capibara.hardware import abstract_devices
from capibara.hardware.chips import CHIPS, chip
from capibara.hardware.gpu_target import target_config
from capibara.hardware.topology import place


@pytest.mark.quick
def test_what_is_told_is_the_chips_own() -> None:
    told = target_config(chip("h200"))
    assert "core_count: 132" in told
    assert f"device_memory_size: {chip('h200').usable_hbm_bytes}" in told
    assert 'device_description_str: "NVIDIA H200"' in told
    assert re.search(r"dnn_version_info \{ major: \d+ minor: \d+ \}", told)
    assert "major: 8 minor: 0" in target_config(chip("a100_80gb"))


def test_every_gpu_of_the_table_can_be_told() -> None:
    for one in CHIPS:
        if one.platform == "gpu":
            assert f"memory_bandwidth: {int(one.hbm_bandwidth)}" in target_config(one)


def test_a_tpu_is_no_gpu() -> None:
    with pytest.raises(ValueError, match=r"one of ampere, hopper. Got tpu_v4. Fix: name h200"):
        target_config(chip("v4"))


def _compiler() -> ChipCompiler:
    found = gpu_compiler()
    if not found.available:
        pytest.skip(f"needs the GPU compiler: {found}")
    return found


@pytest.mark.parametrize("name", ["h200", "h200x8", "a100_80gb"])
def test_devices_to_compile_for(name: str) -> None:
    import jax
    import jax.numpy as jnp

    _compiler()
    devices = abstract_devices(name)
    assert len(devices) == place(name).chips
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == x.size * 2


def test_without_the_plugin_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capibara.compile.availability._is_there", lambda module: False)
    found = gpu_compiler()
    assert not found.available
    assert "No GPU is needed to compile" in str(found)
    assert str(found).endswith("pip install 'jax[cuda13]'")


def test_a_plugin_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jax-cuda13-plugin": "0.1", "jaxlib": "0.2"}
    monkeypatch.setattr("capibara.compile.availability._is_there", lambda module: True)
    monkeypatch.setattr("capibara.compile.availability._version", lambda names: versions[names[0]])
    assert "jax-cuda13-plugin 0.1 does not belong to jaxlib 0.2" in str(gpu_compiler())
