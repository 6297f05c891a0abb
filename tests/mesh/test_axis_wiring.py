"""Hops along the axes of a mesh, on stand-ins for chips and by slice name."""

from __future__ import annotations

import collections
import itertools
import math

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from tests.mesh.chips import chips

from capibara.hardware.topology import Slice, slice_by_name
from capibara.mesh.axis_wiring import AxisWiring, wiring
from capibara.mesh.mesh import MeshConfig, TPUv4MeshConfigurations

NAMES = ("a", "b", "c", "d", "e")


def config(*shape: int) -> MeshConfig:
    return MeshConfig(shape, NAMES[: len(shape)])


@pytest.mark.quick
def test_the_presets_on_32_chips() -> None:
    found = {name: wiring(one, on="v4-64") for name, one in TPUv4MeshConfigurations()}
    # Four chips in a row, no wrap-around: three hops back. Everything else is neighbours all round.
    row = AxisWiring(size=4, max_hops=1, mean_hops=1.0, closing_hops=3)
    assert found["CULTURAL_ANALYSIS"] == {"data": row, "model": AxisWiring(8, 1, 1.0, 1)}
    assert found["QUANTUM_CLASSICAL"] == {"data": AxisWiring(8, 1, 1.0, 1), "model": row}
    assert found["SPIKING_NEURAL"] == {"data": AxisWiring(16, 1, 1.0, 1), "model": AxisWiring(2, 1, 1.0, 1)}
    assert not row.ring
    assert found["SPIKING_NEURAL"]["data"].ring


@pytest.mark.parametrize("name", ["v4-32", "v4-64", "v4-128"])
@pytest.mark.parametrize("axes", [2, 3])
def test_every_mesh_is_at_least_as_near_as_jax_lays_it(name: str, axes: int) -> None:
    where = slice_by_name(name)
    devices = chips(where.grid)  # type: ignore[arg-type]
    sizes = [2**power for power in range(where.chips.bit_length())]
    for shape in itertools.product(sizes, repeat=axes):
        if math.prod(shape) != where.chips:
            continue
        ours = wiring(Mesh(config(*shape).build(devices).devices, NAMES[:axes]))
        assert ours == wiring(config(*shape), on=name), "the devices lie where the rule says"
        laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        theirs = wiring(Mesh(laid, NAMES[:axes]))
        for axis in NAMES[:axes]:
            assert ours[axis].max_hops <= theirs[axis].max_hops, (shape, axis)
        if where.wrap[0]:
            assert all(one.ring for one in ours.values()), shape


def ring_steps_on_a_link(devices: np.ndarray, axis: int, where: Slice) -> int:
    """Steps of two-way rings over an axis, all its groups at once, that share the busiest link and direction of it.

    A step goes along one dimension of the grid after the other, the short way round.
    """
    lines = np.moveaxis(np.asarray([chip.coords for chip in devices.flat]).reshape(*devices.shape, -1), axis, 0)
    used: collections.Counter[tuple[tuple[int, ...], int, int]] = collections.Counter()
    for line in lines.reshape(len(lines), -1, lines.shape[-1]).swapaxes(0, 1):
        for step in {1, len(line) - 1}:
            for start, end in zip(line, np.roll(line, -step, axis=0), strict=True):
                at = start.copy()
                for dim, size in enumerate(where.grid):
                    away = int(end[dim] - at[dim])
                    if where.wrap[dim] and abs(away) > size // 2:
                        away -= int(math.copysign(size, away))
                    for _ in range(abs(away)):
                        way = int(np.sign(away))
                        used[tuple(map(int, at)), dim, way] += 1
                        at[dim] = (at[dim] + way) % size
    return max(used.values())


def test_rings_share_links_no_more_than_as_jax_lays_them() -> None:
    """What docs/meshes.md counts: meshes of two and three axes on three grids."""
    compared: collections.Counter[str] = collections.Counter()
    for name, axes in itertools.product(("v4-32", "v4-64", "v4-128"), (2, 3)):
        where = slice_by_name(name)
        devices = chips(where.grid)  # type: ignore[arg-type]
        for shape in itertools.product([2**power for power in range(1, 7)], repeat=axes):
            if math.prod(shape) != where.chips:
                continue
            laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
            for axis in range(axes):
                ours, theirs = (
                    ring_steps_on_a_link(one, axis, where) for one in (config(*shape).build(devices).devices, laid)
                )
                assert ours <= theirs, (name, shape, axis)
                compared["fewer" if ours < theirs else "as many"] += 1
    assert compared == {"fewer": 27, "as many": 54}


def test_the_last_axis_is_always_neighbours() -> None:
    for name in ("v4-32", "v4-64", "v4-128", "v4-256", "v4-1024"):
        chips_ = slice_by_name(name).chips
        for power in range(1, chips_.bit_length()):
            last = wiring(config(chips_ // 2**power, 2**power), on=name)["b"]
            assert last.max_hops == 1, (name, power)


def test_an_order_that_ignores_the_grid_is_seen() -> None:
    devices = np.asarray(chips((2, 4, 4)), dtype=object)
    scattered = devices[np.random.default_rng(0).permutation(32)].reshape(4, 8)
    assert wiring(Mesh(scattered, ("data", "model")))["model"].mean_hops > 1.5


def test_a_cut_dimension_costs_the_outer_axis() -> None:
    found = wiring(config(2, 2, 8), on="v4-64")
    assert (found["a"].max_hops, found["b"].max_hops, found["c"].max_hops) == (2, 1, 1)


def test_the_two_devices_of_a_chip_need_no_link() -> None:
    # v3-32 is 16 chips of two devices, 4x4.
    found = wiring(config(16, 2), on="v3-32")
    assert (found["b"].max_hops, found["a"].max_hops, found["a"].ring) == (0, 1, True)
    on_devices = wiring(Mesh(config(16, 2).build(chips((4, 4, 1), kind="TPU v3", cores=2)).devices, NAMES[:2]))
    assert on_devices == found


def test_several_slices_are_crossed_by_the_first_axis() -> None:
    mesh = Mesh(config(4, 16).build(chips((2, 4, 4), slices=2)).devices, ("data", "model"))
    found = wiring(mesh)
    assert found["data"].crosses_slices
    assert not found["data"].ring
    assert not found["model"].crosses_slices
    assert found["model"].max_hops == 1


def test_devices_that_lie_nowhere_need_a_slice() -> None:
    mesh = MeshConfig((4, 8)).build()
    assert wiring(mesh, on="v4-64") == wiring(MeshConfig((4, 8)), on="v4-64")
    with pytest.raises(ValueError, match=r'32 cpu devices that do not.*on="v4-64"'):
        wiring(mesh)
    with pytest.raises(ValueError, match="not built lies nowhere"):
        wiring(MeshConfig((4, 8)))
    with pytest.raises(ValueError, match=r"every device of v4-32 \(16 chips, 2x2x4\), 16. Got a mesh of 4x8 = 32"):
        wiring(mesh, on="v4-32")


def test_jax_devices_are_used_as_they_are() -> None:
    assert MeshConfig((4, 8)).build().devices.ravel().tolist() == jax.devices()[:32]
