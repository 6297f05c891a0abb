"""What is in use, the most that was, and what is freed past the threshold."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.hardware.facts import GiB
from capibara.memory import TpuMemoryMonitor, create_optimized_cache
from capibara.memory.live import live_bytes
from capibara.memory.monitor import Sampler

MiB = 2**20
DEVICE = 2
"""One that other tests leave empty."""


def ones(mebibytes: int) -> jax.Array:
    return jax.device_put(np.ones(mebibytes * MiB // 4, np.float32), jax.devices()[DEVICE])


@pytest.mark.quick
def test_usage_follows_the_arrays_and_peak_stays() -> None:
    gc.collect()
    monitor = TpuMemoryMonitor(memory_limit_gb=32.0, cleanup_threshold=0.85)
    before = monitor.used()[jax.devices()[DEVICE]]
    array = ones(64)
    assert monitor.used()[jax.devices()[DEVICE]] - before == 64 * MiB
    assert monitor.usage() >= 64 / 1024
    array.delete()
    assert monitor.used()[jax.devices()[DEVICE]] == before
    assert monitor.peak() >= 64 / 1024
    assert monitor.report()["devices"][str(jax.devices()[DEVICE])]["peak_bytes"] == before + 64 * MiB


@pytest.mark.quick
def test_a_buffer_counts_once_and_each_part_on_its_device() -> None:
    gc.collect()
    before = live_bytes()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    divided = jax.device_put(np.ones((8, 1024), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    alone = ones(1)
    again = jax.device_put(alone, alone.sharding)  # another object with the same memory
    on_host = jax.device_put(alone, alone.sharding.with_memory_kind("pinned_host"))

    def added() -> list[int]:
        now = live_bytes()
        return [now[device] - before[device] for device in jax.devices()[:9]]

    expected = [4096, 4096, 4096 + MiB, 4096, 4096, 4096, 4096, 4096, 0]
    assert added() == expected
    [part.data for part in divided.addressable_shards]  # jax keeps these parts as arrays of their own
    assert added() == expected
    assert again.nbytes == on_host.nbytes


@pytest.mark.quick
def test_past_the_threshold_a_check_empties_caches() -> None:
    gc.collect()
    there = max(live_bytes().values())
    monitor = TpuMemoryMonitor(memory_limit_gb=(there + 8 * MiB) / GiB, cleanup_threshold=0.5)
    with create_optimized_cache(cache_size_gb=1.0) as cache:
        cache["x"] = jax.device_put(
            np.ones(MiB, np.float32), jax.devices()[int(np.argmax(list(live_bytes().values())))]
        )
        cache["y"] = jax.device_put(
            np.ones(MiB, np.float32), jax.devices()[int(np.argmax(list(live_bytes().values())))]
        )
        assert monitor.over_threshold()
        assert monitor.check() >= 4 * MiB
        assert cache.stats()["evictions"] >= 1
        lenient = TpuMemoryMonitor(memory_limit_gb=(there + 8 * MiB) / GiB, cleanup_threshold=1.0)
        assert lenient.check() == 0


def test_inside_of_a_with_a_thread_looks() -> None:
    gc.collect()
    looked = threading.Event()

    class Told(TpuMemoryMonitor):
        def check(self) -> int:
            found = super().check()
            looked.set()
            return found

    with Told(memory_limit_gb=32.0, look_every=0.001) as monitor:
        array = ones(96)
        for _ in range(2):  # the first look may have begun before the array was there
            looked.clear()
            assert looked.wait(30)
        array.delete()
        thread = monitor._samplers[0]._thread
    assert monitor.peaks()[jax.devices()[DEVICE]] >= 96 * MiB
    assert thread is not None
    assert not thread.is_alive()


def test_an_allocators_own_figures_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU or a TPU: programs' temporaries are counted too, and a mark from before the monitor is not ours."""

    class Device:
        id = 0
        stats: dict[str, Any] = {"bytes_in_use": 5 * GiB, "peak_bytes_in_use": 40 * GiB}  # noqa: RUF012

        def memory_stats(self) -> dict[str, Any]:
            return dict(self.stats)

    device = Device()
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monitor = TpuMemoryMonitor(memory_limit_gb=64.0)
    assert monitor.usage() == 5
    assert monitor.peak() == 5
    device.stats = {"bytes_in_use": 2 * GiB, "peak_bytes_in_use": 41 * GiB}
    assert (monitor.usage(), monitor.peak()) == (2, 41)


def test_numbers_are_jaxs_own() -> None:
    """A key is no array beside its words, and deleted arrays are none."""
    gc.collect()
    before = sum(live_bytes().values())
    key = jax.random.key(0)
    assert sum(live_bytes().values()) - before == key.nbytes == 8
    gone = jnp.ones(1024)
    gone.delete()
    assert sum(live_bytes().values()) - before == 8


@pytest.mark.quick
def test_a_look_that_fails_is_said_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    looks = 0
    again = threading.Event()

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 2:
            again.set()
        raise RuntimeError("Array has been deleted")

    with Sampler(look, every=0.001):
        assert again.wait(30)
    assert caplog.text.count("Array has been deleted") == 1
