"""A cache bounded in bytes: on the devices with the host behind it, or on the host alone."""

from __future__ import annotations

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.hardware.facts import GiB
from capibara.memory import ArrayCache, MemoryLimitError, create_optimized_cache

ENTRY = 1024 * 4
ROOM = 3


def entry(number: int) -> np.ndarray:
    return np.full(1024, number, np.float32)


def cache_of(entries: float = ROOM, use_hbm: bool = True, prefetch_enabled: bool = True, **more: object) -> ArrayCache:
    return create_optimized_cache(entries * ENTRY / GiB, use_hbm, prefetch_enabled, **more)  # type: ignore[arg-type]


@pytest.mark.quick
@pytest.mark.parametrize("use_hbm", [False, True])
def test_it_reads_and_writes_like_a_dict(use_hbm: bool) -> None:
    with cache_of(use_hbm=use_hbm) as cache:
        for number in range(3):
            cache[number] = jnp.asarray(entry(number)) if number else entry(number)
        assert sorted(cache) == [0, 1, 2]
        assert len(cache) == 3
        assert 1 in cache
        assert 7 not in cache
        for number in range(3):
            assert isinstance(cache[number], jax.Array)
            np.testing.assert_array_equal(cache[number], entry(number))
        del cache[1]
        assert 1 not in cache
        with pytest.raises(KeyError):
            cache[1]
        with pytest.raises(KeyError):
            del cache[1]
        cache[0] = entry(9)
        assert float(cache[0][0]) == 9
        assert cache.get("nothing") is None


@pytest.mark.quick
def test_it_is_bounded_and_the_host_has_what_made_room() -> None:
    with cache_of() as cache:
        for number in range(6):
            cache[number] = jnp.asarray(entry(number))
            assert cache.stats()["device_bytes"] <= ROOM * ENTRY
        assert cache.stats()["evictions"] == 3
        assert len(cache) == 6
        np.testing.assert_array_equal(cache[0], entry(0))  # from the host
        assert cache.stats()["misses"] == 1
        for number in range(6, 40):
            cache[number] = jnp.asarray(entry(number))
        stats = cache.stats()
        assert stats["device_bytes"] <= ROOM * ENTRY
        assert stats["host_bytes"] <= ROOM * ENTRY
        assert stats["dropped"] > 0
        assert 1 not in cache


def test_an_array_that_changes_places_with_another_is_not_lost() -> None:
    """With room for one on each side, the one that is read and the one that makes room for it cross."""
    with cache_of(1) as cache:
        cache["a"], cache["b"] = jnp.asarray(entry(1)), jnp.asarray(entry(2))
        for _ in range(3):
            assert float(cache["a"][0]) == 1
            assert float(cache["b"][0]) == 2
            assert cache.stats()["device_bytes"] == ENTRY
            assert cache.stats()["host_bytes"] <= ENTRY
        assert cache.stats()["dropped"] == 0


def test_on_the_host_nothing_stays_on_the_devices() -> None:
    with cache_of(use_hbm=False) as cache:
        for number in range(5):
            cache[number] = jnp.asarray(entry(number))
        assert list(cache) == [2, 3, 4]
        np.testing.assert_array_equal(cache[3], entry(3))
        stats = cache.stats()
        assert (stats["device_bytes"], stats["host_bytes"], stats["dropped"]) == (0, 3 * ENTRY, 2)


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(("policy", "left"), [("lru", {0, 2, 3}), ("lfu", {0, 1, 3}), ("fifo", {1, 2, 3})])
def test_policies_differ_in_what_goes(policy: str, left: set[int]) -> None:
    """0 is used twice and 1 longest ago but three times; then 3 comes."""
    with cache_of(use_hbm=True, cache_policy=policy) as cache:
        for number in range(3):
            cache[number] = jnp.asarray(entry(number))
        for number in (1, 1, 1, 0, 0, 2):
            cache[number]
        cache[3] = jnp.asarray(entry(3))
        on_device = {key for key in cache if cache._entries[key].array is not None}
    assert on_device == left


@pytest.mark.quick
def test_prefetch_brings_from_the_host_in_the_background() -> None:
    with cache_of() as cache:
        for number in range(5):
            cache[number] = jnp.asarray(entry(number))
        assert cache.prefetch([0, 4, "nothing"]) == 1  # 4 is on the device, and nobody knows "nothing"
        np.testing.assert_array_equal(cache[0], entry(0))  # waits for the transfer, if need be
        stats = cache.stats()
        assert (stats["prefetched"], stats["prefetch_hits"], stats["hits"], stats["misses"]) == (1, 1, 1, 0)
    with cache_of(prefetch_enabled=False) as cache:
        for number in range(5):
            cache[number] = jnp.asarray(entry(number))
        assert cache.prefetch([0]) == 0
        assert cache._worker is None
        cache[0]
        assert cache.stats()["misses"] == 1


def test_prefetch_to_the_devices_from_a_cache_on_the_host() -> None:
    with cache_of(8, use_hbm=False) as cache:
        for number in range(8):
            cache[number] = entry(number)
        assert cache.prefetch([0, 1]) == 2
        np.testing.assert_array_equal(cache[0], entry(0))
        np.testing.assert_array_equal(cache[1], entry(1))
        assert cache.stats()["prefetch_hits"] == 2
        assert cache.stats()["transfers"] == 2
        assert cache.stats()["device_bytes"] == 0  # each was for one read


@pytest.mark.quick
def test_what_is_not_there_is_loaded() -> None:
    loaded: list[object] = []
    release = threading.Event()

    def load(key: object) -> np.ndarray:
        loaded.append((key, threading.current_thread() is threading.main_thread()))
        assert release.wait(30)
        return entry(int(str(key)))

    with cache_of(load=load) as cache:
        assert cache.prefetch([5]) == 1
        assert 5 not in cache  # it is still being loaded, and this goes on
        release.set()
        np.testing.assert_array_equal(cache[5], entry(5))
        np.testing.assert_array_equal(cache[6], entry(6))
        assert loaded == [(5, False), (6, True)]
        assert cache.stats()["loads"] == 2


def test_a_load_that_fails_is_the_readers_error() -> None:
    def load(key: object) -> np.ndarray:
        raise OSError("no such file")

    with cache_of(load=load) as cache:
        cache.prefetch([1])
        with pytest.raises(OSError, match="no such file"):
            cache[1]


@pytest.mark.quick
def test_an_entry_above_the_size_is_refused_and_what_was_there_stays() -> None:
    with cache_of(2) as cache:
        cache["x"] = entry(1)
        with pytest.raises(MemoryLimitError, match=rf"of {3 * ENTRY} bytes on a device, in a cache of {2 * ENTRY}"):
            cache["x"] = np.zeros(3 * 1024, np.float32)
        assert float(cache["x"][0]) == 1
        with pytest.raises(ValueError, match="arrays"):
            cache["y"] = 3.5  # type: ignore[assignment]


def test_sharded_entries_count_by_device_and_return_where_they_lay() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    place = NamedSharding(mesh, PartitionSpec("data"))
    with cache_of(1) as cache:
        for number in range(12):
            cache[number] = jax.device_put(entry(number), place)
        assert cache.stats()["device_bytes"] == ENTRY
        assert cache.stats()["evictions"] == 4
        assert cache[0].sharding == place
        np.testing.assert_array_equal(cache[0], entry(0))


def test_an_array_that_its_reader_donated() -> None:
    with cache_of() as cache:
        cache["x"] = jnp.asarray(entry(1))
        jax.jit(lambda x: x + 1, donate_argnums=0)(cache["x"])
        with pytest.raises(KeyError):
            cache["x"]


def test_threads_share_it() -> None:
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for key in np.random.default_rng(seed).integers(0, 8, 60):
                cache.prefetch([int(key) + 1])
                assert float(cache[int(key)][0]) == key
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            failed.append(error)

    with cache_of(load=lambda key: entry(int(str(key)))) as cache:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not failed
        assert cache.stats()["device_bytes"] <= ROOM * ENTRY


def test_a_closed_cache_says_so_and_its_thread_ends() -> None:
    cache = cache_of(2)
    for number in range(3):
        cache[number] = entry(number)
    cache.prefetch([0])
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        cache[0]
    dropped = cache_of(2)
    for number in range(3):
        dropped[number] = entry(number)
    dropped.prefetch([0])
    dropped[0]
    thread = next(iter(dropped._worker._threads))  # type: ignore[union-attr]
    del dropped
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.quick
@pytest.mark.parametrize("size", [0, -1, float("inf"), "4"])
def test_sizes_are_checked(size: float) -> None:
    with pytest.raises(ValueError, match="cache_size_gb is a number of GiB above 0"):
        create_optimized_cache(size)
