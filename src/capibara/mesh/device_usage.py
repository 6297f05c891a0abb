"""How busy the attached devices are, by the sensors of their makers."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from capibara.errors import say_once

__all__ = ["device_utilization", "peak_memory"]

_log = logging.getLogger(__name__)


def device_utilization() -> float:
    """The part of the last moments in which this host's devices were computing, their mean, from 0 to 1.

    TPUs: the duty cycle that libtpu reports (its `sdk`). NVIDIA GPUs: NVML's, with nvidia-ml-py installed. nan where
    there is no sensor: on a CPU, without those packages, or before a TPU has published its first figure.
    """
    import jax

    sensor = _SENSORS.get(jax.local_devices()[0].platform)
    if sensor is None:
        return math.nan
    try:
        percents = [float(one) for one in sensor()]
    except ImportError as missing:
        say_once(_log, str(missing), "device_utilization is nan: %s", missing)
        return math.nan
    return sum(percents) / len(percents) / 100 if percents else math.nan


def peak_memory() -> float:
    """The most bytes that were in use on this process's devices at a time, summed; nan where no device says."""
    import jax

    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    return float(sum(known)) if known else math.nan


def _of_tpus() -> Iterable[Any]:
    return list(importlib.import_module("libtpu.sdk.tpumonitoring").get_metric("duty_cycle_pct").data())


def _of_nvidia_gpus() -> Iterable[Any]:
    import jax

    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(device.local_hardware_id) for device in jax.local_devices()]
        return [nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles]
    finally:
        nvml.nvmlShutdown()


_SENSORS: dict[str, Callable[[], Iterable[Any]]] = {"tpu": _of_tpus, "gpu": _of_nvidia_gpus}
