"""Slice names, chip grids and what libtpu is asked for."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.errors import TPUError, UnknownNameError
from capibara.hardware import (
    CHIPS,
    Slice,
    abstract_devices,
    chip,
    slice_by_grid,
    slice_by_name,
    slice_for,
    slice_names,
)

ALL_NAMES = list(slice_names())
TPUS = [one for one in CHIPS if one.platform == "tpu"]

# From the vendor's pages: name, chips, grid, hosts.
PUBLISHED = [
    ("v2-8", 4, (2, 2), 1),
    ("v2-32", 16, (4, 4), 4),
    ("v2-512", 256, (16, 16), 64),
    ("v3-8", 4, (2, 2), 1),
    ("v3-32", 16, (4, 4), 4),
    ("v3-2048", 1024, (32, 32), 256),
    ("v4-8", 4, (2, 2, 1), 1),
    ("v4-16", 8, (2, 2, 2), 2),
    ("v4-32", 16, (2, 2, 4), 4),
    ("v4-64", 32, (2, 4, 4), 8),
    ("v4-128", 64, (4, 4, 4), 16),
    ("v4-256", 128, (4, 4, 8), 32),
    ("v4-384", 192, (4, 4, 12), 48),
    ("v4-512", 256, (4, 8, 8), 64),
    ("v4-1024", 512, (8, 8, 8), 128),
    ("v4-1536", 768, (8, 8, 12), 192),
    ("v4-2048", 1024, (8, 8, 16), 256),
    ("v4-4096", 2048, (8, 16, 16), 512),
    ("v5p-8", 4, (2, 2, 1), 1),
    ("v5p-64", 32, (2, 4, 4), 8),
    ("v5p-1152", 576, (4, 12, 12), 144),
    ("v5p-1920", 960, (4, 12, 20), 240),
    ("v5p-3072", 1536, (8, 12, 16), 384),
    ("v5p-3200", 1600, (4, 20, 20), 400),
    ("v5p-6912", 3456, (12, 12, 24), 864),
    ("v5p-8192", 4096, (16, 16, 16), 1024),
    ("v5p-10368", 5184, (12, 12, 36), 1296),
    ("v5p-12288", 6144, (16, 16, 24), 1536),
    ("v5litepod-1", 1, (1, 1), 1),
    ("v5litepod-8", 8, (2, 4), 1),
    ("v5litepod-16", 16, (4, 4), 4),
    ("v5e-256", 256, (16, 16), 64),
    ("v6e-8", 8, (2, 4), 1),
    ("v6e-32", 32, (4, 8), 8),
    ("tpu7x-16", 8, (2, 2, 2), 2),
    ("tpu7x-4096", 2048, (8, 16, 16), 512),
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "chips", "grid", "hosts"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_published_slices(name: str, chips: int, grid: tuple[int, ...], hosts: int) -> None:
    found = slice_by_name(name)
    assert (found.chips, found.grid, found.hosts) == (chips, grid, hosts)


@pytest.mark.quick
@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_name_goes_to_a_grid_and_back(name: str) -> None:
    found = slice_by_name(name)
    assert found.name == name
    assert slice_by_grid(found.chip, found.grid) == found
    assert slice_for(found.chip, chips=found.chips) == found
    assert slice_by_name(f"{name.split('-')[0]}:{'x'.join(map(str, found.grid))}") == found
    assert slice_by_name(found.topology_name) == found
    assert found.accelerator_type is not None
    assert slice_by_name(found.accelerator_type) == found
    assert math.prod(found.grid) == found.chips
    assert found.hosts * math.prod(found.chips_per_host_bounds) == found.chips
    assert len(found.wrap) == len(found.grid)
    counted = found.chips if found.chip.name in ("tpu_v5e", "tpu_v6e") else found.cores
    assert name.endswith(f"-{counted}")


def test_names_are_many_and_distinct() -> None:
    assert len(set(ALL_NAMES)) == len(ALL_NAMES)
    assert {"v4-4096", "v4-8192", "v3-1024", "v6e-256"} <= set(ALL_NAMES)
    assert list(slice_names("v5e")) == [f"v5e-{n}" for n in (1, 4, 8, 16, 32, 64, 128, 256)]


@pytest.mark.quick
def test_google_s_v4_32_is_16_chips_and_the_pod_of_32_chips_is_v4_64() -> None:
    small, pod = slice_by_name("v4-32"), slice_for("v4", chips=32)
    assert (small.chips, small.cores, small.hosts, small.wrap) == (16, 32, 4, (False,) * 3)
    assert (pod.name, pod.grid, pod.devices) == ("v4-64", (2, 4, 4), 32)
    assert str(small) == "v4-32 (16 chips, 2x2x4)"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("v4-64", (False, False, False)),
        ("v4-128", (True, True, True)),
        ("v4-256", (True, True, True)),
        ("v5p-16", (False, False, False)),
        ("v5p-8192", (True, True, True)),
        ("v5e-64", (False, False)),
        ("v5e-128", (False, True)),
        ("v6e-256", (True, True)),
        ("v2-256", (False, True)),
        ("v3-512", (False, False)),
        ("v3-2048", (True, True)),
    ],
)
def test_wrap_around_links(name: str, wrap: tuple[bool, ...]) -> None:
    assert slice_by_name(name).wrap == wrap


@pytest.mark.quick
def test_libtpu_is_asked_for_the_topology_as_it_names_it() -> None:
    assert slice_by_name("v4-64").topology_args == {
        "platform": "tpu",
        "topology_name": "v4:2x4x4",
        "chip_config_name": "megacore",
        "chips_per_host_bounds": (2, 2, 1),
        "num_slices": 1,
    }
    assert slice_by_name("v5litepod-8").topology_args["chips_per_host_bounds"] == (2, 4, 1)
    assert slice_by_name("v5e-16").accelerator_type == "v5litepod-16"
    assert slice_by_name("v5p-8").topology_name == "v5:2x2x1"


def test_devices_are_chips_except_where_the_two_halves_stay_apart() -> None:
    assert slice_by_name("v4-32").devices == 16
    assert slice_by_name("v3-32").devices == 32
    assert slice_by_name("tpu7x-16").devices == 16


def test_a_grid_that_is_not_the_default_of_its_size_keeps_its_own_name() -> None:
    long = slice_by_name("v4:4x4x16")
    assert (long.name, long.chips, long.accelerator_type) == ("v4:4x4x16", 256, None)
    assert slice_by_name(long.name) == long != slice_by_name("v4-512")


@given(name=st.sampled_from(ALL_NAMES), data=st.data())
def test_axes_may_come_in_any_order(name: str, data: st.DataObject) -> None:
    found = slice_by_name(name)
    turned = data.draw(st.sampled_from(list(itertools.permutations(found.grid))))
    assert slice_by_grid(found.chip, turned) == found


@given(name=st.sampled_from([n for n in ALL_NAMES if n.startswith(("v2", "v3", "v5e", "v6e"))]))
def test_flat_slices_take_the_third_coordinate_that_devices_report(name: str) -> None:
    found = slice_by_name(name)
    assert slice_by_grid(found.chip, (*found.grid, 1)) == found


@given(which=st.sampled_from(TPUS), chips=st.integers(-3, 10_000))
def test_a_size_has_a_slice_or_an_error_with_the_nearest(which: object, chips: int) -> None:
    sizes = {slice_by_name(name).chips for name in slice_names(which)}  # type: ignore[arg-type]
    if chips in sizes:
        assert slice_for(which, chips).chips == chips  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match=rf"Got {chips} chip.*Fix: use .*\d+ chips?,"):
            slice_for(which, chips)  # type: ignore[arg-type]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("v4-33", ["v4-32 (16 chips, 2x2x4)", "v4-64 (32 chips, 2x4x4)", "v4-32 means 16 chips", "'v4-33'"]),
        ("v4-24", ["v4-16 (8 chips", "v4-32 (16 chips"]),
        ("v4-1000000", ["v4-8192 (4096 chips"]),
        ("v5e-12", ["counts chips", "v5e-8 (8 chips, 2x4)", "v5e-16 (16 chips, 4x4)"]),
        ("v4", ["add a size", "v4-32"]),
        ("v4:3x3x3", ["a grid of 3x3x3", "whole 4x4x4 cubes"]),
        ("v4:0x2x2", ["a grid of 0x2x2"]),
        ("v5e:32x32", ["a grid of 32x32", "v5e-256"]),
    ],
)
def test_a_wrong_size_says_the_rule_what_arrived_and_the_nearest(wrong: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="Fix:") as caught:
        slice_by_name(wrong)
    for word in words:
        assert word in str(caught.value)
    # Messages count chips: the other count only confuses, as the documents' "v4-32" shows.
    assert "core" not in str(caught.value).lower()


@pytest.mark.quick
@pytest.mark.parametrize("wrong", ["v9-8", "banana", "", "v4 32", "-32"])
def test_an_unknown_generation_names_the_choices(wrong: str) -> None:
    with pytest.raises(UnknownNameError, match="v4-32"):
        slice_by_name(wrong)


def test_only_tpus_come_in_slices() -> None:
    with pytest.raises(ValueError, match=r"Only TPUs come in slices.*h200"):
        slice_for("h200", chips=8)


def test_a_slice_is_given_back() -> None:
    found = slice_by_name("v4-8")
    assert slice_by_name(found) is found
    assert found == Slice("v4-8", chip("v4"), (2, 2, 1))


@pytest.mark.quick
def test_without_libtpu_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name))
    with pytest.raises(TPUError, match=r"v4-64 \(32 chips.*pip install 'jax\[tpu\]'.*x86-64"):
        abstract_devices("v4-64")


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ["v4-32", "v4-64"])
def test_libtpu_makes_the_devices(name: str) -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    wanted = slice_by_name(name)
    devices = abstract_devices(wanted)
    assert len(devices) == wanted.devices
    assert {device.device_kind for device in devices} <= set(wanted.chip.device_kinds)
