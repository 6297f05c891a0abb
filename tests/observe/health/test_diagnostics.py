"""A planted fault of each kind is found and named by the device, link or host that has it; a clean machine has none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tests.observe.stand_ins import Chips

from capibara.hardware.topology import slice_by_name
from capibara.observe.health import HostFiles, TpuDiagnostics, arithmetic, links, memory
from capibara.observe.health.report import HealthReport


def _devices() -> list[Any]:
    return jax.devices()[:4]


def _ring() -> Mesh:
    return Mesh(np.asarray(_devices()), ("ring",))


def _even(pairs: Sequence[tuple[Any, Any]], size: int) -> float:
    return size / 1e9


@pytest.fixture
def diagnose() -> Callable[..., HealthReport]:
    """A check of four virtual devices whose links all take the same time, unless a test says otherwise."""

    def run(**given: Any) -> HealthReport:
        known: dict[str, Any] = {"devices": _devices(), "hosts": [], "sensors": [], "measure": _even}
        return TpuDiagnostics(**known | given).run_full_health_check()

    return run


@pytest.mark.quick
def test_a_clean_machine_reports_nothing() -> None:
    """The parts are as they are, but for what this machine's load and limits decide: how long a link takes, and what
    /dev/shm has."""
    report = TpuDiagnostics(devices=_devices(), hosts=["127.0.0.1"]).run_full_health_check()
    assert [found for found in report.findings if found.check not in ("link", "host")] == []
    assert report.all_chips_online is report.memory_healthy is True
    assert [link["devices"] for link in report.details["links"]] == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert all(link["bytes_per_second"] > 0 for link in report.details["links"])
    assert report.details["memory_bytes"] == {f"device {number}": 4 << 20 for number in range(4)}


def test_even_links_are_all_well(diagnose: Callable[..., HealthReport]) -> None:
    report = diagnose()
    assert [found for found in report.findings if found.check != "host"] == []
    assert report.interconnect_ok is True


@pytest.mark.quick
def test_a_wrong_answer_names_its_device(diagnose: Callable[..., HealthReport]) -> None:
    def product(a: Any, b: Any) -> Any:
        right = arithmetic.multiply(a, b)
        return right.at[5, 17].add(1.0) if a.devices() == {_devices()[2]} else right

    report = diagnose(product=product)
    [found] = report.findings
    assert (found.check, found.subject) == ("matmul", "device 2")
    assert "1 of 16,384 elements of a bfloat16 product, first [5, 17]" in found.text
    assert report["all_chips_online"] is False
    assert report["memory_healthy"] is report["interconnect_ok"] is True
    assert not report.healthy


def test_a_fault_of_one_type_and_one_that_comes_and_goes_are_found() -> None:
    calls = iter(range(100))

    def product(a: Any, b: Any) -> Any:
        right = arithmetic.multiply(a, b)
        return right * 2 if a.dtype == np.float32 and next(calls) == 2 else right

    [found] = arithmetic.check_products(_devices()[:1], product)
    assert found.evidence["dtype"] == "float32"


def test_a_device_that_hangs_and_one_that_raises_are_named(diagnose: Callable[..., HealthReport]) -> None:
    let_go = threading.Event()

    def product(a: Any, b: Any) -> Any:
        if a.devices() == {_devices()[1]}:
            let_go.wait(60)
        if a.devices() == {_devices()[3]}:
            raise RuntimeError("INTERNAL: core dumped")
        return arithmetic.multiply(a, b)

    # Compiled, so that only the one that hangs is late.
    arithmetic.check_products(_devices())
    memory.check_memory(_devices())
    try:
        report = diagnose(product=product, deadline_s=8.0)
    finally:
        let_go.set()
    assert [(one.check, one.subject) for one in report.findings] == [("matmul", "device 1"), ("matmul", "device 3")]
    assert "no answer within 8 s" in report.findings[0].text
    assert "INTERNAL: core dumped" in report.findings[1].text
    assert report.interconnect_ok is None
    assert "device 1 hangs" in report.details["not_run"]["links"]


@pytest.mark.quick
@pytest.mark.parametrize("pattern", memory.PATTERNS)
def test_a_bit_that_does_not_hold_names_its_device(pattern: str) -> None:
    def write(device: Any, name: str, block: int, words: int) -> Any:
        written = memory.fill(device, name, block, words)
        return written.at[7].set(written[7] ^ 16) if device.id == 1 and name == pattern else written

    found, _ = memory.check_memory(_devices()[:2], 0.01, write)
    assert [(one.check, one.subject) for one in found] == [("memory", "device 1")]
    assert found[0].evidence == {"pattern": pattern, "words": 1, "bits": 16, "block": 0}
    assert "first word 7, bits 0x00000010" in found[0].text


def test_the_patterns_have_every_bit_both_ways() -> None:
    words = np.concatenate([np.asarray(make(np.arange(64, dtype=np.uint32))) for make in memory.PATTERNS.values()])
    assert np.bitwise_or.reduce(words) == 0xFFFFFFFF
    assert np.bitwise_and.reduce(words) == 0
    address = np.asarray(memory.PATTERNS["address"](np.arange(1 << 16, dtype=np.uint32)))
    assert len(np.unique(address)) == 1 << 16


@pytest.mark.quick
def test_memory_share_is_how_much_is_tested(diagnose: Callable[..., HealthReport]) -> None:
    sizes: list[int] = []

    def write(device: Any, pattern: str, block: int, words: int) -> Any:
        sizes.append(4 * words)
        return memory.fill(device, pattern, block, words)

    report = diagnose(devices=_devices()[:1], memory_share=1e-6, write=write)
    told = report.details["memory_bytes"]
    assert all(0 < size < 1 << 20 for size in told.values()), told
    assert max(sizes) <= max(told.values())
    with pytest.raises(ValueError, match="memory_share is above 0"):
        TpuDiagnostics(memory_share=2.0)


def _slow(first: int, second: int, by: float = 2.0) -> Callable[[Sequence[tuple[Any, Any]], int], float]:
    def measure(pairs: Sequence[tuple[Any, Any]], size: int) -> float:
        slow = any({a.id, b.id} == {first, second} for a, b in pairs)
        return (by if slow else 1.0) * size / 1e9

    return measure


@pytest.mark.quick
def test_a_link_at_half_speed_is_named(diagnose: Callable[..., HealthReport]) -> None:
    report = diagnose(measure=_slow(1, 2))
    [found] = report.findings
    assert (found.check, found.subject) == ("link", "link 1-2 of axis 'devices'")
    assert "0.5 GB/s, 50% of the median of the others' 1 GB/s" in found.text
    assert report["interconnect_ok"] is False
    assert report["all_chips_online"] is True
    assert report.details["axes"] == {"devices": {"bytes_per_second": pytest.approx(0.5e9)}}


@pytest.mark.quick
def test_each_axis_of_a_mesh_has_its_links() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    found, measured, axes = links.check_links(mesh, _slow(2, 6))
    assert [one.subject for one in found] == ["link 2-6 of axis 'data'"]
    assert len([one for one in measured if one.axis == "data"]) == 4
    assert len([one for one in measured if one.axis == "model"]) == 8  # two rings of four
    assert axes == pytest.approx({"data": 0.5e9, "model": 1e9})


@pytest.mark.quick
def test_a_link_that_was_slow_once_is_not_named() -> None:
    """The machine did something else: it is measured again before anybody is blamed."""
    times: dict[frozenset[int], Iterator[float]] = {}

    def measure(pairs: Sequence[tuple[Any, Any]], size: int) -> float:
        ends = frozenset(device.id for pair in pairs for device in pair)
        return next(times.setdefault(ends, iter([5.0, 5.0, *[1.0] * 20]))) * size / 1e9 if 0 in ends else size / 1e9

    found, _, _ = links.check_links(_ring(), measure)
    assert found == []


class _Chip:
    """A device of a TPU slice, as far as links ask."""

    platform, device_kind, process_index, slice_index = "tpu", "TPU v4", 0, 0

    def __init__(self, number: int, coords: tuple[int, int, int]) -> None:
        self.id, self.coords = number, coords


def test_on_a_tpu_links_are_those_of_the_grid_and_held_against_the_table() -> None:
    grid = np.empty((2, 4), object)
    for place in np.ndindex(2, 4):
        grid[place] = _Chip(4 * place[0] + place[1], (place[0], place[1], 0))

    class Grid:
        devices, axis_names = grid, ("x", "y")

    asked: list[int] = []

    def all_slow(pairs: Sequence[tuple[Any, Any]], size: int) -> float:
        asked.append(len(pairs))
        return size / 20e9

    mesh: Any = Grid()
    # No ring along y: the ends of a line of four are not beside each other.
    assert len(links.links_of(mesh)) == 4 + 2 * 3
    found, _, axes = links.check_links(mesh, all_slow)
    assert len(found) == 10, "each at 20 of 45 GB/s, though none is slower than the others"
    assert "44% of the chip's published 45 GB/s" in found[0].text
    asked.clear()

    def well(pairs: Sequence[tuple[Any, Any]], size: int) -> float:
        asked.append(len(pairs))
        return size / 40e9

    found, measured, axes = links.check_links(mesh, well)
    assert found == []
    assert asked == [4, 4, 6, 6], "both ways of each axis, and no link alone"
    assert axes == {"x": pytest.approx(40e9), "y": pytest.approx(40e9)}
    assert {one.bandwidth for one in measured} == {None}


@pytest.mark.quick
def test_the_ends_of_a_slice_that_wraps_are_beside_each_other() -> None:
    grid = np.empty((4, 4, 4), object)
    for number, place in enumerate(np.ndindex(4, 4, 4)):
        grid[place] = _Chip(number, place)

    class Cube:
        devices, axis_names = grid, ("x", "y", "z")

    mesh: Any = Cube()
    assert len(links.links_of(mesh, slice_by_name("v4-128"))) == 3 * 64
    assert len(links.links_of(mesh)) == 3 * 48, "without a slice that says so, nothing goes round"


@pytest.mark.quick
def test_a_wrong_sum_names_its_device_and_axis() -> None:
    def reduce(mesh: Mesh, axis: str, numbers: np.ndarray) -> Any:
        right = links.all_reduce(mesh, axis, numbers)
        shards = [one.data + (one.device.id == 3) for one in right.addressable_shards]
        return jax.make_array_from_single_device_arrays(right.shape, right.sharding, shards)

    assert links.check_sums(_ring()) == []
    [found] = links.check_sums(_ring(), reduce)
    assert (found.check, found.subject) == ("collective", "device 3")
    assert "along axis 'ring': 11 and not 10" in found.text


@pytest.mark.quick
def test_temperature_and_clock_are_none_without_a_sensor_and_named_with_one(
    diagnose: Callable[..., HealthReport],
) -> None:
    one = _devices()[:1]
    report = diagnose(devices=one)
    assert report.temperature_normal is None
    assert report.clock_normal is None
    assert report.healthy
    chips = Chips(2, temperature=80.0, clock=1.05e9)
    report = diagnose(devices=one, sensors=[chips])
    assert (report.temperature_normal, report.clock_normal) == (True, True)
    report = diagnose(devices=one, sensors=[chips], max_temperature=75.0)
    assert [found.subject for found in report.findings] == ["tpu:0", "tpu:1"]
    assert (report["temperature_normal"], report.clock_normal) == (False, True)
    chips.figures["clock"] = 0.5e9  # the table has 1.05 GHz for a v4
    report = diagnose(devices=one, sensors=[chips])
    assert [found.check for found in report.findings] == ["clock", "clock"]
    assert (report["temperature_normal"], report.clock_normal) == (True, False)


@pytest.mark.quick
def test_devices_that_should_be_there(diagnose: Callable[..., HealthReport], monkeypatch: pytest.MonkeyPatch) -> None:
    one = _devices()[:1]
    assert diagnose(devices=one, expected_devices=32).all_chips_online
    report = diagnose(devices=one, expected_devices=64)
    assert [str(found.text) for found in report.findings] == ["32 devices are there and 64 should be"]
    assert not report.all_chips_online
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-32")
    files = HostFiles(hugepages=Path("/nowhere"), tpu_lock=Path("/nowhere"))
    report = diagnose(devices=one, tpu="TPU v4", host_files=files)
    assert report.findings[0].evidence == {"there": 32, "expected": 4}  # of one host


@pytest.mark.quick
def test_a_missing_host_keeps_the_chips_from_being_opened(diagnose: Callable[..., HealthReport]) -> None:
    report = diagnose(hosts=["127.0.0.1", "no-such-host.invalid"])
    [found] = report.findings
    assert (found.check, found.subject) == ("missing_host", "host no-such-host.invalid")
    assert report.all_chips_online is False
    assert report.memory_healthy is report.interconnect_ok is None
    assert "host no-such-host.invalid is missing" in report.details["not_run"]["devices"]


@pytest.mark.quick
def test_bad_input() -> None:
    for given, text in [
        ({"max_temperature": -1.0}, "max_temperature is in degrees"),
        ({"deadline_s": 0.0}, "deadline_s is above 0"),
        ({"expected_devices": 0}, "expected_devices is 1 or more"),
    ]:
        with pytest.raises(ValueError, match=text):
            TpuDiagnostics(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host_deadline_s is above 0"):
        TpuDiagnostics(hosts=["127.0.0.1"], host_deadline_s=0.0).run_full_health_check()
    with pytest.raises(KeyError, match="a health report has all_chips_online"):
        HealthReport(True, None, None, None, None, True)["chips"]
