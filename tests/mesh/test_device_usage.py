"""Utilization and peak memory, from stand-ins for the sensors."""

from __future__ import annotations

import logging
import math
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from capibara.mesh.device_usage import device_utilization, peak_memory


def attach(monkeypatch: pytest.MonkeyPatch, platform: str, peaks: list[int | None]) -> None:
    devices = [
        SimpleNamespace(
            platform=platform,
            local_hardware_id=index,
            memory_stats=lambda peak=peak: None if peak is None else {"peak_bytes_in_use": peak},
        )
        for index, peak in enumerate(peaks)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)


def test_the_mean_duty_cycle_of_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, "tpu", [10, 20])
    # The library gives percents as text, one a chip, and nothing before it has sampled.
    published: list[str] = ["20.00", "80.00"]
    asked: list[str] = []

    def get_metric(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(data=lambda: published)

    monkeypatch.setitem(sys.modules, "libtpu", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "libtpu.sdk", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "libtpu.sdk.tpumonitoring", SimpleNamespace(get_metric=get_metric))
    assert device_utilization() == 0.5
    assert asked == ["duty_cycle_pct"]
    published.clear()
    assert math.isnan(device_utilization())


def test_the_mean_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, "gpu", [1, 2, 3])
    ended: list[bool] = []
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: ended.append(True),
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=10 * handle),
        ),
    )
    assert device_utilization() == 0.1
    assert ended == [True]


@pytest.mark.usefixtures("nothing_said_yet")
def test_no_sensor_is_nan_and_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    attach(monkeypatch, "gpu", [1])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.WARNING):
        assert math.isnan(device_utilization())
        assert math.isnan(device_utilization())
    assert caplog.text.count("device_utilization is nan") == 1


def test_peaks_are_summed_where_devices_say(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, "tpu", [10, 20])
    assert peak_memory() == 30
    attach(monkeypatch, "cpu", [None, None])
    assert math.isnan(peak_memory())
