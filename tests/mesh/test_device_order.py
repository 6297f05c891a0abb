"""Devices put in order: whole hardware axes, slices outermost, and what is said when they cannot be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.mesh.chips import chips

from capibara.mesh.device_order import device_grid, in_mesh_order


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (16, 2), (2, 4, 4), (1, 8, 1, 1, 4)])
def test_a_mesh_axis_runs_along_whole_hardware_axes(shape: tuple[int, ...]) -> None:
    hardware = (2, 4, 4)
    grid = in_mesh_order(shape, chips(hardware))
    assert grid.shape == shape
    for axis in range(len(shape)):
        for line in np.moveaxis(grid, axis, -1).reshape(-1, shape[axis]):
            # What a collective runs over: along each hardware axis either one place or all of them.
            spread = [len({device.coords[dim] for device in line}) for dim in range(3)]
            assert all(width in (1, size) for width, size in zip(spread, hardware, strict=True))
            assert np.prod(spread) == len(line)


def test_the_order_devices_come_in_does_not_matter() -> None:
    devices = chips((2, 4, 4))
    assert (in_mesh_order((4, 8), devices) == in_mesh_order((4, 8), devices[::-1])).all()


def test_a_box_may_start_anywhere() -> None:
    devices = [replace(one, coords=tuple(at + 4 for at in one.coords)) for one in chips((2, 2, 4))]
    found = device_grid(devices)
    assert found is not None
    assert found.shape == (1, 2, 2, 4)
    assert in_mesh_order((4, 4), devices).shape == (4, 4)


def test_wrap_comes_from_the_slice_that_the_chips_fill() -> None:
    for grid, wrap in {(2, 4, 4): False, (4, 4, 4): True, (8, 4, 4): True, (4, 4, 6): False}.items():
        found = device_grid(chips(grid))
        assert found is not None
        assert found.wrap == (False, wrap, wrap, wrap), grid
    flat = device_grid(chips((16, 8, 1), kind="TPU v5e"))
    assert flat is not None
    assert flat.wrap == (False, True, False, False)


def test_a_split_hardware_axis_is_said(caplog: pytest.LogCaptureFixture) -> None:
    # 2x4x4 chips have no product of whole axes that is 32 by a factor pair such as (2, 2, 2, 2, 2).
    assert in_mesh_order((2, 2, 2, 2, 2), chips((2, 4, 4))).shape == (2, 2, 2, 2, 2)
    assert "mesh 2x2x2x2x2 splits a hardware axis of the grid 2x4x4" in caplog.text
    caplog.clear()
    in_mesh_order((4, 8), chips((2, 4, 4)))
    assert not caplog.text


def test_chips_with_a_hole_stay_as_they_come_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    devices = [one for one in chips((2, 2, 2)) if one.coords != (0, 0, 0)][:6]
    assert in_mesh_order((2, 3), devices).ravel().tolist() == devices
    assert "6 chips do not fill a box" in caplog.text


def test_two_cores_of_a_chip_are_nearest() -> None:
    grid = in_mesh_order((4, 2), chips((2, 2, 1), kind="TPU v3", cores=2))
    assert all(len({device.coords for device in pair}) == 1 for pair in grid)


def test_slices_are_the_outer_part_of_the_first_axes() -> None:
    grid = in_mesh_order((4, 16), chips((2, 4, 4), slices=2))
    assert [{device.slice_index for device in row} for row in grid] == [{0}, {0}, {1}, {1}]
    # Four slices over an axis of two and half of the next.
    grid = in_mesh_order((2, 16), chips((2, 2, 2), slices=4))
    assert [[device.slice_index for device in row] for row in grid] == [[0] * 8 + [1] * 8, [2] * 8 + [3] * 8]


def test_slices_of_different_sizes_and_odd_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equally many chips of each. Got 8 of slice 0, 4 of slice 1"):
        in_mesh_order((2, 6), chips((2, 2, 2), slices=2)[:12])
    with pytest.raises(ValueError, match=r"axes that divide by 3 together"):
        in_mesh_order((4, 8), [replace(one, slice_index=one.id % 3) for one in chips((2, 4, 4))])


def test_gpus_go_by_id() -> None:
    gpus = [SimpleNamespace(platform="gpu", id=id) for id in (3, 1, 2, 0)]
    assert [one.id for one in in_mesh_order((2, 2), gpus).flat] == [0, 1, 2, 3]
