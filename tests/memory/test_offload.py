"""Copies in the host's memory, of each kind that a platform may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from capibara.memory import HBMOptimizer, create_optimized_cache, offload
from capibara.memory.offload import HostCopy, host_kind, put


def device_with(*kinds: str) -> Any:
    memories = [SimpleNamespace(kind=kind) for kind in kinds]

    class Device:
        def addressable_memories(self) -> list[Any]:
            return memories

        def default_memory(self) -> Any:
            return memories[0]

    return Device()


@pytest.mark.quick
def test_pinned_memory_is_taken_where_there_is_some() -> None:
    assert host_kind(device_with("device", "unpinned_host", "pinned_host")) == "pinned_host"
    assert host_kind(device_with("device", "unpinned_host")) == "unpinned_host"
    assert host_kind(device_with("unpinned_host")) is None  # a CPU whose own memory it is
    assert host_kind(jax.devices()[0]) == "pinned_host"


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", None])
@pytest.mark.parametrize("spec", [PartitionSpec("data", None), PartitionSpec(None, "model"), PartitionSpec()])
def test_the_same_bits_in_the_same_place(
    kind: str | None, spec: PartitionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "host_kind", lambda device: kind)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    values = np.random.default_rng(0).integers(0, 2**31, (8, 8), np.int32)
    for given in (values, jax.device_put(values, NamedSharding(mesh, spec))):
        copy = HostCopy(given, NamedSharding(mesh, spec)).wait()
        assert copy.nbytes == 8 * values.nbytes // (4 if spec == PartitionSpec("data", None) else 2 if any(spec) else 1)
        if isinstance(given, jax.Array):
            given.delete()
        back = copy.to_device()
        assert back.sharding == NamedSharding(mesh, spec)
        np.testing.assert_array_equal(np.asarray(back), values)
        np.testing.assert_array_equal(copy.to_numpy(), values)


def aligned(count: int) -> np.ndarray:
    """Zeros whose memory jax would share on a CPU."""
    room = np.zeros(4 * count + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + 4 * count].view(np.float32)


@pytest.mark.quick
def test_a_numpy_array_may_change_afterwards() -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = aligned(1 << 16)
    copy, there = HostCopy(values, place).wait(), put(values, place).block_until_ready()
    with create_optimized_cache(cache_size_gb=1.0) as cache:
        cache["x"] = values
        (streamed,) = HBMOptimizer().stream([values])
        values[:] = 7
        for array in (copy.to_device(), there, cache["x"], streamed):
            assert not np.asarray(array).any()
