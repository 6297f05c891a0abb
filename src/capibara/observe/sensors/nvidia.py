"""NVIDIA GPUs by NVML, the driver's own library (`nvidia-ml-py`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from capibara.distribution import NAME
from capibara.errors import CapibaraError
from capibara.observe.sensors.reading import Reading

__all__ = ["NvidiaSensor"]


class NvidiaSensor:
    """Readings of "gpu:0" and on, numbered as NVML does: by the bus, whatever CUDA_VISIBLE_DEVICES says.

    The library is opened at the first reading, and again after a failure: a driver that is reset comes back.

    Args:
      nvml: the module, where it is not the installed `pynvml`.
    """

    name = "nvidia"
    accelerators = True

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._devices: list[tuple[str, Any, str]] | None = None

    def read(self) -> Sequence[Reading]:
        try:
            if self._devices is None:
                self._open()
            assert self._devices is not None
            return [self._reading(*device) for device in self._devices]
        except Exception:
            self._devices = None
            raise

    def _open(self) -> None:
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError as missing:
                raise CapibaraError(f"GPUs are read by nvidia-ml-py: pip install '{NAME}[monitor]'") from missing
        self._nvml.nvmlInit()
        devices = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            name = self._nvml.nvmlDeviceGetName(handle)
            devices.append((f"gpu:{index}", handle, name.decode() if isinstance(name, bytes) else name))
        self._devices = devices

    def _reading(self, source: str, handle: Any, chip: str) -> Reading:
        nvml = self._nvml
        values: dict[str, float] = {}

        def ask(give: Callable[[], dict[str, float]]) -> None:
            try:
                values.update(give())
            except nvml.NVMLError as error:
                # What a kind of GPU does not tell is left out. Anything else, a GPU that fell off the bus above all,
                # is an error of the whole sensor.
                if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                    raise

        def memory() -> dict[str, float]:
            told = nvml.nvmlDeviceGetMemoryInfo(handle)
            return {"memory_used": float(told.used), "memory_total": float(told.total)}

        ask(memory)
        ask(lambda: {"utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100})
        ask(lambda: {"temperature": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))})
        ask(lambda: {"power": nvml.nvmlDeviceGetPowerUsage(handle) / 1000})  # it says milliwatts
        ask(lambda: {"clock": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6})
        return Reading(source, "gpu", values, chip)

    def close(self) -> None:
        if self._devices is not None:
            self._devices = None
            self._nvml.nvmlShutdown()
