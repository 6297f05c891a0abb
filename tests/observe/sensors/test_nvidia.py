"""GPUs by NVML, from a module that stands in for it and answers as `pynvml` does."""

# ruff: noqa: N802 - the names are NVML's

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from capibara.errors import CapibaraError
from capibara.observe.sensors import NvidiaSensor


class _Error(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Nvml:
    """Two GPUs, of which the second tells no power."""

    NVMLError = _Error
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.lost = False

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return b"NVIDIA H200" if handle else "NVIDIA H200"  # older releases give bytes

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=150_000_000_000, used=75_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.lost:
            raise _Error(self.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_TEMPERATURE_GPU
        return 54

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return 1980  # MHz

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise _Error(self.NVML_ERROR_NOT_SUPPORTED)
        return 612_345


@pytest.mark.quick
def test_what_it_tells() -> None:
    nvml = Nvml()
    sensor = NvidiaSensor(nvml)
    first, second = sensor.read()
    assert (first.source, first.kind, first.chip) == ("gpu:0", "gpu", "NVIDIA H200")
    assert first.values == {
        "memory_used": 75e9, "memory_total": 150e9, "utilization": 0.87, "temperature": 54.0, "power": 612.345,
        "clock": 1.98e9,
    }  # fmt: skip
    assert second.chip == "NVIDIA H200"
    assert "power" not in second.values, "what it does not tell is left out"
    sensor.read()
    assert nvml.opened == 1
    sensor.close()
    assert nvml.closed == 1


@pytest.mark.quick
def test_a_gpu_that_fell_off_the_bus_fails_the_sensor_and_it_opens_again() -> None:
    nvml = Nvml()
    sensor = NvidiaSensor(nvml)
    sensor.read()
    nvml.lost = True
    with pytest.raises(_Error, match="15"):
        sensor.read()
    nvml.lost = False
    assert len(sensor.read()) == 2
    assert nvml.opened == 2


@pytest.mark.quick
def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(CapibaraError, match=r"pip install 'capibara-jax\[monitor\]'"):
        NvidiaSensor().read()


@pytest.mark.quick
def test_the_installed_module_has_the_names() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py: pip install '.[monitor]'")
    for name in vars(Nvml):
        assert name.startswith("_") or hasattr(pynvml, name), name
    assert pynvml.NVML_CLOCK_SM == Nvml.NVML_CLOCK_SM
    assert pynvml.NVML_ERROR_NOT_SUPPORTED == Nvml.NVML_ERROR_NOT_SUPPORTED
