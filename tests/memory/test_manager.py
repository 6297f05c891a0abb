"""The limit holds: what does not fit waits on the host, bit for bit, or compressed within its bound."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.hardware import devices
from capibara.hardware.facts import GiB
from capibara.memory import MemoryLimitError, TpuMemoryManager, create_optimized_cache
from capibara.memory.live import live_bytes

SIDE = 64
TENSOR = SIDE * SIDE * 4
"""Bytes of one tensor below."""


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape or (SIDE, SIDE)).astype(np.float32)


def manager_of(tensors: float, **settings: Any) -> TpuMemoryManager:
    """A manager whose limit has room for so many tensors beside what other tests left alive."""
    gc.collect()
    there = max(live_bytes().values())
    settings = {"cleanup_threshold": 1.0, "prefetch_enabled": False, **settings}
    return TpuMemoryManager(memory_limit_gb=(there + tensors * TENSOR + 512) / GiB, **settings)


def states(manager: TpuMemoryManager) -> dict[str, str]:
    return {name: tensor["state"] for name, tensor in manager.stats()["tensors"].items()}


@pytest.mark.parametrize("prefetch", [False, True])
def test_three_times_the_limit_completes_within_it(prefetch: bool) -> None:
    # Below the limit by the one tensor that the caller makes before the manager hears of it.
    manager = manager_of(4, prefetch_enabled=prefetch, cleanup_threshold=0.8)
    expected = [numbers(seed) for seed in range(12)]
    with manager.managed_context():
        for number, values in enumerate(expected):
            manager.register(f"layer {number}", jnp.asarray(values), policy="offload")
            assert max(live_bytes().values()) <= manager.limit_bytes
        for _ in range(2):
            for number, values in enumerate(expected):
                array = manager.get(f"layer {number}")
                assert max(live_bytes().values()) <= manager.limit_bytes
                np.testing.assert_array_equal(np.asarray(array), values)
                del array
    stats = manager.stats()
    assert stats["peak_bytes"] <= manager.limit_bytes
    assert stats["offloads"] >= 8
    assert stats["host_bytes"] >= 8 * TENSOR
    assert (stats["prefetch_hits"] > 0) == prefetch


def test_special_values_come_back_bit_for_bit() -> None:
    values = np.array([np.nan, -0.0, np.inf, 1e-42, 3.5], np.float32)
    values[0:1].view(np.uint32)[0] = 0x7FC12345  # a not-a-number with a payload
    manager = manager_of(4)
    manager.register("x", jax.device_put(values), policy="offload")
    manager.offload("x")
    assert np.array_equal(np.asarray(manager.get("x")).view(np.uint32), values.view(np.uint32))


@pytest.mark.quick
def test_an_offloaded_tensor_is_gone_from_the_device_and_returns_with_its_sharding() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    place = NamedSharding(mesh, PartitionSpec("data", "model"))
    values = numbers(0)
    array = jax.device_put(values, place)
    manager = TpuMemoryManager(memory_limit_gb=1.0, prefetch_enabled=False)
    manager.register("weights", array, policy="offload")
    before = live_bytes()[jax.devices()[0]]
    manager.offload("weights")
    assert array.is_deleted()
    assert before - live_bytes()[jax.devices()[0]] == TENSOR // 8
    back = manager.get("weights")
    assert back.sharding == place
    np.testing.assert_array_equal(np.asarray(back), values)


@pytest.mark.quick
def test_divided_tensors_count_by_device() -> None:
    """A limit is of each device: eight devices hold eight times as much."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    manager = manager_of(1)
    for number in range(4):
        manager.register(str(number), jax.device_put(numbers(number), NamedSharding(mesh, PartitionSpec("data"))))
    assert set(states(manager).values()) == {"device"}
    whole = jax.device_put(numbers(9), NamedSharding(mesh, PartitionSpec()))
    manager.register("replicated", whole)
    assert states(manager)["0"] == "host"


@pytest.mark.quick
def test_a_tensor_above_the_limit_is_refused_before_it_is_allocated() -> None:
    manager = TpuMemoryManager(memory_limit_gb=TENSOR / GiB)
    large = np.zeros((SIDE, 2 * SIDE), np.float32)
    before = live_bytes()
    with pytest.raises(
        MemoryLimitError, match=rf"{TENSOR} bytes of a device\. Got 'large'.* {2 * TENSOR} bytes"
    ) as error:
        manager.register("large", large)
    assert isinstance(error.value, ValueError)
    fix = re.search(r"memory_limit_gb=([\d.e-]+)", str(error.value))
    assert fix is not None
    TpuMemoryManager(memory_limit_gb=float(fix[1])).register("large", large)
    assert error.value.autopsy is not None
    assert live_bytes() == before
    assert "large" not in manager


@pytest.mark.quick
def test_what_is_in_use_is_left_alone_and_named_when_there_is_no_room() -> None:
    manager = manager_of(2)
    for name in "abc":
        manager.register(name, numbers(ord(name)))
    a, b = manager.get("a"), manager.get("b")
    with pytest.raises(MemoryLimitError, match=r"nothing here can free; in use: a, b"):
        manager.get("c")
    assert not a.is_deleted()
    np.testing.assert_array_equal(np.asarray(b), numbers(ord("b")))
    with pytest.raises(ValueError, match="somebody has"):
        manager.offload("a")
    del a
    np.testing.assert_array_equal(np.asarray(manager.get("c")), numbers(ord("c")))
    assert states(manager) == {"a": "host", "b": "device", "c": "device"}


@pytest.mark.quick
def test_a_tensor_of_policy_keep_stays() -> None:
    manager = manager_of(2)
    kept = jnp.asarray(numbers(0))
    manager.register("kept", kept, policy="keep")
    for name in "abc":
        manager.register(name, jnp.asarray(numbers(ord(name))))
    assert states(manager)["kept"] == "device"
    assert states(manager)["a"] == "host"
    with pytest.raises(ValueError, match="stays"):
        manager.offload("kept")


def test_past_the_threshold_caches_go_before_tensors() -> None:
    gc.collect()
    with create_optimized_cache(cache_size_gb=1.0) as cache:
        manager = manager_of(4, cleanup_threshold=1.0)
        cache["first"], cache["second"] = jnp.asarray(numbers(1)), jnp.asarray(numbers(2))
        cache["first"]  # so that "second" was used longest ago
        manager.register("a", jnp.asarray(numbers(3)))
        manager.register("b", jnp.asarray(numbers(4)))
        manager.register("c", jnp.asarray(numbers(5)))
        assert cache.stats()["evictions"] == 1
        assert set(states(manager).values()) == {"device"}
        assert cache._entries["second"].array is None
        assert cache._entries["first"].array is not None
        manager.register("d", jnp.asarray(numbers(6)))
        manager.register("e", jnp.asarray(numbers(7)))
        assert cache.stats()["device_bytes"] == 0
        assert states(manager)["a"] == "host"


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_the_threshold_is_where_room_is_made(threshold: float) -> None:
    manager = TpuMemoryManager(memory_limit_gb=8 * TENSOR / GiB, cleanup_threshold=threshold, prefetch_enabled=False)
    gc.collect()
    there = live_bytes()[jax.devices()[1]]
    for number in range(8):
        manager.register(str(number), jax.device_put(numbers(number), jax.devices()[1]))
    fits = int((8 * TENSOR * threshold - there) // TENSOR)
    on_device = sum(state == "device" for state in states(manager).values())
    assert on_device <= fits
    assert (on_device < 5) == (threshold == 0.5)


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["compress_bfloat16", "compress_int8"])
def test_compression_is_within_its_bound_and_only_where_it_is_enabled(policy: str) -> None:
    values = numbers(0)
    for enabled in (True, False):
        manager = TpuMemoryManager(memory_limit_gb=1.0, prefetch_enabled=False, compression_enabled=enabled)
        manager.register("x", jnp.asarray(values), policy=policy)
        manager.offload("x")
        tensor = manager.stats()["tensors"]["x"]
        assert tensor["state"] == ("compressed" if enabled else "host")
        back = np.array(manager.get("x"))
        worst = float(np.abs(back - values).max())
        if not enabled:
            assert worst == 0
            continue
        assert 0 < worst <= tensor["error_bound"]
        assert worst == pytest.approx(tensor["measured_error"], rel=1e-6)
        # Again: nothing more is lost, and the figures are still those of the first time.
        manager.offload("x")
        assert np.array_equal(np.asarray(manager.get("x")), back)
        assert manager.stats()["tensors"]["x"]["measured_error"] == tensor["measured_error"]


def test_compressed_tensors_go_to_the_host_when_that_is_not_enough() -> None:
    there = max(live_bytes().values())  # what other tests left is no part of what may be freed
    half = (there + 3 * TENSOR) / (there + 6 * TENSOR)
    manager = manager_of(6, compression_enabled=True, cleanup_threshold=half)
    expected = {str(number): numbers(number) for number in range(12)}
    for name, values in expected.items():
        manager.register(name, jnp.asarray(values), policy="compress_int8")
    assert {"compressed", "compressed on the host"} <= set(states(manager).values())
    for name, values in expected.items():
        array = manager.get(name)
        bound = manager.stats()["tensors"][name]["error_bound"]
        assert np.abs(np.asarray(array) - values).max() <= bound
        assert bound <= np.abs(values).max() / 127
        del array
    assert manager.stats()["peak_bytes"] <= manager.limit_bytes


def test_a_tensor_with_an_infinity_is_offloaded_instead() -> None:
    values = numbers(0)
    values[3, 3] = np.inf
    manager = TpuMemoryManager(memory_limit_gb=1.0, compression_enabled=True)
    manager.register("x", jnp.asarray(values), policy="compress_int8")
    manager.offload("x")
    assert states(manager)["x"] == "host"
    assert np.array_equal(np.asarray(manager.get("x")), values)


def test_prefetch_brings_what_comes_next_before_it_is_asked_for() -> None:
    manager = manager_of(3, prefetch_enabled=True)
    for name in "abcd":
        manager.register(name, numbers(ord(name)))
    manager.get("a")
    assert manager._pending is not None
    manager._pending.result()
    assert states(manager)["b"] == "device"  # registered after "a"
    manager.get("b")
    assert manager.stats()["prefetch_hits"] == 1
    manager.get("a")
    manager.get("c")
    manager._pending.result()
    manager.offload("c")
    manager.get("a")
    manager._pending.result()
    assert states(manager)["c"] == "device"  # what followed "a" last time


def test_names_that_are_unknown_donated_or_replaced() -> None:
    manager = TpuMemoryManager(memory_limit_gb=1.0, prefetch_enabled=False)
    with pytest.raises(ValueError, match="registered before"):
        manager.get("nothing")
    manager.register("x", jnp.asarray(numbers(0)))
    jax.jit(lambda x: x + 1, donate_argnums=0)(manager.get("x"))
    with pytest.raises(ValueError, match="donated"):
        manager.get("x")
    manager.register("x", jnp.asarray(numbers(1)))
    manager.register("x", jnp.asarray(numbers(2)))
    assert np.array_equal(np.asarray(manager.get("x")), numbers(2))
    manager.release("x")
    assert "x" not in manager


@pytest.mark.quick
def test_a_donated_tensor_is_told_of_after_room_was_made() -> None:
    manager = manager_of(2)
    manager.register("x", jnp.asarray(numbers(0)))
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(manager.get("x"))
    others = [jnp.asarray(numbers(seed)) for seed in range(1, 4)]
    assert manager.clean() == 0  # past the limit, with nothing that could go
    assert states(manager)["x"] == "deleted elsewhere"
    assert not manager.holds_away()
    with pytest.raises(ValueError, match="donated"):
        manager.get("x")
    del donated, others


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"memory_limit_gb": 0}, "above 0"),
        ({"memory_limit_gb": float("nan")}, "above 0"),
        ({"memory_limit_gb": 1.0, "cleanup_threshold": 1.5}, "at most 1"),
    ],
)
def test_settings_are_checked(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TpuMemoryManager(**settings)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("array", "policy", "said"),
    [
        (numbers(0), "compress", "Did you mean 'compress_int8'"),
        (np.arange(4), "compress_int8", "float32"),
        ([1.0, 2.0], "offload", "jax or numpy array"),
    ],
)
def test_tensors_are_checked(array: Any, policy: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TpuMemoryManager(memory_limit_gb=1.0).register("x", array, policy=policy)


def test_a_limit_above_the_device_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TpuMemoryManager(memory_limit_gb=1e6).limit_bytes < 1e6 * GiB
    monkeypatch.setattr(devices, "host_memory_bytes", lambda: 1024)
    with pytest.raises(MemoryLimitError, match=r"Fix: divide it over more devices"):  # no limit would do
        TpuMemoryManager(memory_limit_gb=32.0).register("large", np.zeros(512, np.float32))


def test_room_is_made_ahead_of_a_program() -> None:
    manager = manager_of(4)
    for number in range(4):
        manager.register(str(number), jnp.asarray(numbers(number)))
    assert manager.make_room(2 * TENSOR) >= 2 * TENSOR
    with pytest.raises(MemoryLimitError, match="bytes more"):
        manager.make_room(100 * TENSOR)


def test_threads_end_with_the_context_and_the_manager() -> None:
    before = set(threading.enumerate())
    manager = manager_of(3, prefetch_enabled=True)
    for name in "abcd":
        manager.register(name, numbers(ord(name)))
    with manager.managed_context():
        manager.get("a")
        started = set(threading.enumerate()) - before
        assert len(started) == 2
    del manager
    gc.collect()
    for thread in started:
        thread.join(60)
    assert not [thread for thread in started if thread.is_alive()]


def test_an_interpreter_ends_inside_of_a_context() -> None:
    code = (
        "import numpy as np; from capibara.memory import *\n"
        "m = TpuMemoryManager(memory_limit_gb=1.0); m.managed_context().__enter__()\n"
        "c = create_optimized_cache(cache_size_gb=0.1, use_hbm=False); c['k'] = np.ones(8); c.prefetch(['k'])\n"
        "TpuMemoryMonitor(memory_limit_gb=1.0).__enter__()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_prefetch_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(4, prefetch_enabled=True)
    for name in "ab":
        manager.register(name, numbers(0), policy="offload")

    def broken(*_: Any) -> None:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(manager, "_prefetch", broken)
    manager.get("a")
    assert manager._worker is not None
    manager._worker.shutdown(wait=True)
    assert "the link is down" in caplog.text
