"""What is attached: on this machine, on virtual devices, and on stand-ins for TPUs and GPUs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from capibara.hardware import attached, chip, default, slice_attached, slice_by_name, summary
from capibara.hardware import devices as devices_module

GiB = 1024**3


def fake(platform: str, kind: str, index: int, **more: Any) -> SimpleNamespace:
    """A jax device as far as this room looks at one."""
    stats = {"bytes_limit": more.pop("limit")} if "limit" in more else None
    return SimpleNamespace(
        platform=platform,
        device_kind=kind,
        id=index,
        process_index=more.pop("process_index", 0),
        memory_stats=lambda: stats,
        **more,
    )


def fake_slice(name: str, **more: Any) -> list[SimpleNamespace]:
    """The devices a TPU slice shows, one for each chip or, where they stay apart, for each half of one."""
    found = slice_by_name(name)
    grid = (*found.grid, 1)[:3]
    coords = [xyz for xyz in itertools.product(*map(range, grid)) for _ in range(found.chip.devices_per_chip)]
    kind = found.chip.device_kinds[0]
    return [fake("tpu", kind, index, coords=xyz, **more) for index, xyz in enumerate(coords)]


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(found: list[SimpleNamespace]) -> None:
        monkeypatch.setattr(jax, "devices", lambda *args: found)
        monkeypatch.setattr(jax, "local_devices", lambda *args, **kwargs: found)

    return put


@pytest.mark.quick
def test_what_is_really_attached() -> None:
    found = attached()
    assert len(found) == jax.device_count()
    assert [one.index for one in found] == [device.id for device in jax.devices()]
    assert {one.platform for one in found} <= {"tpu", "gpu", "cpu"}
    assert default() in found
    if found[0].platform == "cpu":
        assert found[0].chip is chip("cpu")
        assert found[0].memory_limit_bytes == chip("cpu").hbm_bytes
        assert slice_attached() is None
        assert "CPU" in summary()


@pytest.mark.quick
def test_virtual_devices_are_called_virtual() -> None:
    # A fresh process: XLA reads the flag once.
    code = (
        "from capibara.hardware import attached, summary; print(summary()); "
        "print(sum(one.virtual for one in attached()))"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=32", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    line, count = done.stdout.splitlines()
    assert line.startswith("32 virtual devices on one host CPU")
    assert count == "32"


def test_a_single_cpu_is_not_virtual(attach: Any) -> None:
    attach([fake("cpu", "cpu", 0)])
    assert summary().startswith("one host CPU, ")
    assert not attached()[0].virtual


def test_cpu_processes(attach: Any) -> None:
    attach([fake("cpu", "cpu", index, process_index=index // 2) for index in range(8)])
    assert summary().startswith("8 virtual devices on 4 CPU processes")


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("name", ["v4-8", "v4-32", "v4-64", "v4-128", "v5e-8", "v6e-64", "v3-32", "tpu7x-8"])
def test_a_slice_is_known_by_its_coordinates(attach: Any, name: str) -> None:
    attach(fake_slice(name))
    assert slice_attached() == slice_by_name(name)


@pytest.mark.quick
def test_a_tpu_summary_counts_chips(attach: Any) -> None:
    attach(fake_slice("v4-8", limit=int(30.75 * GiB)))
    assert summary() == "4 TPU v4 chips on one host, slice v4-8 (2x2x1), 30.8 GiB each"
    attach(fake_slice("v3-8"))
    assert summary() == "4 TPU v3 chips on one host, slice v3-8 (2x2)"
    assert attached()[0].chip is chip("v3")


def test_part_of_a_slice_has_no_name(attach: Any) -> None:
    attach(fake_slice("v4-8")[:1])
    assert slice_attached() is None
    assert summary() == "1 TPU v4 chip on one host"
    # Three corners of a square span 2x2 and are not one.
    attach(fake_slice("v4-8")[:3])
    assert slice_attached() is None


def test_of_several_slices_the_first_counts(attach: Any) -> None:
    first, second = fake_slice("v4-8", slice_index=0), fake_slice("v4-16", slice_index=1)
    attach(first + second)
    assert slice_attached() == slice_by_name("v4-8")


def test_an_unknown_tpu_is_none_and_not_an_error(attach: Any) -> None:
    attach([fake("tpu", "TPU v99", 0, coords=(0, 0, 0))])
    assert attached()[0].chip is None
    assert slice_attached() is None
    assert summary() == "1 TPU v99 chip on one host"


@pytest.mark.quick
@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_a_gpu(attach: Any, platform: str) -> None:
    attach([fake(platform, "NVIDIA H200", 0, limit=100 * GiB)])
    (found,) = attached()
    assert (found.platform, found.memory_limit_bytes, found.coords) == ("gpu", 100 * GiB, None)
    assert found.chip is chip("h200")
    assert summary() == "1 NVIDIA H200 GPU, 100.0 GiB"
    assert slice_attached() is None


def test_another_process_s_memory_is_not_asked_for(attach: Any) -> None:
    def refuse() -> dict[str, int]:
        raise RuntimeError("memory_stats is for addressable devices")

    there = fake("tpu", "TPU v4", 1, coords=(1, 0, 0), process_index=1)
    there.memory_stats = refuse
    attach([fake("tpu", "TPU v4", 0, coords=(0, 0, 0), limit=GiB), there])
    assert [one.memory_limit_bytes for one in attached()] == [GiB, None]


def test_default_follows_jax_s_default_device() -> None:
    last = jax.devices()[-1]
    with jax.default_device(last):
        assert default().index == last.id
    assert default().index == jax.devices()[0].id


def test_default_follows_a_platform_name() -> None:
    with jax.default_device("cpu"):
        assert default().platform == "cpu"


def test_the_names_are_the_room_s() -> None:
    for name in devices_module.__all__:
        assert getattr(devices_module, name).__module__ == devices_module.__name__
