"""Collectives on grids, against the closed forms."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.cost.links import KINDS, exchange, wire
from capibara.errors import UnknownNameError
from capibara.hardware.chips import chip
from capibara.hardware.topology import Slice, slice_by_grid, slice_by_name
from capibara.mesh.axis_wiring import wiring as hops
from capibara.mesh.device_order import slice_box
from capibara.mesh.grid_order import coordinates
from capibara.mesh.mesh import MeshConfig

W = 45e9
MB = 1e6


def _seconds(kind: str, mesh: MeshConfig, where: Slice, axes: tuple[str, ...], size: float) -> float:
    return exchange(wire(mesh, where), kind, axes, size).seconds


@pytest.mark.quick
def test_a_ring_a_line_and_a_plane() -> None:
    # 4x4x4 wraps: one axis of four is a ring, two links a chip.
    cube = slice_by_grid("v4", (4, 4, 4))
    mesh = MeshConfig((4, 4, 4), ("a", "b", "c"))
    assert _seconds("all_gather", mesh, cube, ("a",), 8 * MB) == pytest.approx(8 * MB * 3 / 4 / (2 * W))
    assert _seconds("all_reduce", mesh, cube, ("a",), 8 * MB) == pytest.approx(2 * 8 * MB * 3 / 4 / (2 * W))
    # Two axes at once: sixteen chips, four links.
    assert _seconds("reduce_scatter", mesh, cube, ("a", "b"), 8 * MB) == pytest.approx(8 * MB * 15 / 16 / (4 * W))
    # 2x2x4 does not wrap: four in a line, one link at its end.
    line = slice_by_name("v4-32")
    mesh = MeshConfig((4, 4), ("data", "model"))
    assert _seconds("all_gather", mesh, line, ("data",), 8 * MB) == pytest.approx(8 * MB * 3 / 4 / W)
    # The other axis lies on 2x2: two lines of two, both used.
    assert _seconds("all_gather", mesh, line, ("model",), 8 * MB) == pytest.approx(8 * MB * 3 / 4 / (2 * W))


def test_all_to_all_is_bound_by_the_cut_through_the_middle() -> None:
    cube = slice_by_grid("v4", (4, 4, 16))
    mesh = MeshConfig((16, 16), ("data", "model"))
    wiring = wire(mesh, cube)
    assert [s.size for s in wiring.inner(("data",))] == [16]
    # Sixteen chips in a ring: 16 n / 4 bytes go through two links each way.
    assert exchange(wiring, "all_to_all", ("data",), 1 * MB).seconds == pytest.approx(16 * MB / 4 / (2 * W))
    # On 4x4 the same bytes have four links a row and a column.
    assert exchange(wiring, "all_to_all", ("model",), 1 * MB).seconds == pytest.approx(4 * MB / 4 / (2 * W))


def test_a_split_dimension_is_slower_outside_and_has_no_ring_inside() -> None:
    cube = slice_by_grid("v4", (4, 4, 4))
    mesh = MeshConfig((2, 32), ("data", "model"))
    wiring = wire(mesh, cube)
    (outer,) = wiring.inner(("data",))
    assert (outer.size, outer.ways) == (2, 1)
    inner = [s for s in wiring.inner(("model",)) if s.size == 2]
    assert len(inner) == 1
    assert not inner[0].wraps
    assert max(outer.stride, inner[0].stride) == 2
    # 2x2x4 cut into four axes of two: the line of four is cut in two, and two pairs share each link of its outer half.
    line, four = slice_by_name("v4-32"), MeshConfig((2, 2, 2, 2), ("a", "b", "c", "d"))
    assert _seconds("all_gather", four, line, ("a",), 8 * MB) == pytest.approx(8 * MB / 2 / (W / 2))
    assert _seconds("all_gather", four, line, ("b",), 8 * MB) == pytest.approx(8 * MB / 2 / W)


def sends_on_a_link(mesh: MeshConfig, axis: int, where: Slice) -> float:
    """On the busiest link and direction, when each place sends to the next along an axis that lies on one dimension.

    The short way round; where both are as long, half each.
    """
    grid, wrap = slice_box(where)
    lines = np.moveaxis(coordinates(mesh.shape, grid, wrap), axis, 0)
    (dim,) = np.flatnonzero((lines[:-1] != lines[1:]).any(axis=tuple(range(lines.ndim - 1))))
    used: collections.Counter[tuple[object, ...]] = collections.Counter()
    for start, end in zip(lines, np.roll(lines, -1, axis=0), strict=True):
        for here, there in zip(start.reshape(-1, len(grid)), end.reshape(-1, len(grid)), strict=True):
            onward = int(there[dim] - here[dim]) % grid[dim]
            for away, way in ((onward, 1), (grid[dim] - onward, -1)):
                for hop in range(away if 2 * away <= grid[dim] else 0):
                    at = (int(here[dim]) + way * hop) % grid[dim]
                    used[*np.delete(here, dim).tolist(), at, way] += 1 if 2 * away < grid[dim] else 0.5
    return max(used.values())


@pytest.mark.parametrize("length", [4, 8, 12, 16])
def test_groups_that_share_a_link_are_those_of_the_order_that_is_built(length: int) -> None:
    """A ring cut in two is folded, so that its halves have the links at both ends; cut in four it is not."""
    where = slice_by_grid("v4", (4, 4, length))
    for cut in {(2, length // 2), (length // 2, 2), (2, 2, length // 4)}:
        mesh = MeshConfig((*cut, 4, 4), tuple("abcde"[: len(cut) + 2]))
        wiring = wire(mesh, where)
        for axis, name in enumerate(mesh.axis_names[: len(cut)]):
            for segment in wiring.inner((name,)):  # none of an axis of one
                if segment.wraps or segment.size == 2:  # along a longer line nobody sends from the end to the beginning
                    assert segment.sharing == sends_on_a_link(mesh, axis, where), (cut, name)
                if segment.wraps:
                    found = hops(mesh, on=where)[name]
                    assert segment.hops == segment.size // 2 * max(found.max_hops, found.closing_hops)


def test_a_folded_ring_gives_both_axes_whole_links() -> None:
    """8x8 on 4x4x4: each axis has a ring of four, and half of the ring that they share."""
    cube, mesh = slice_by_grid("v4", (4, 4, 4)), MeshConfig((8, 8), ("a", "b"))
    for axis in "ab":
        assert _seconds("all_gather", mesh, cube, (axis,), 8 * MB) == pytest.approx(8 * MB * 7 / 8 / (3 * W))
        assert _seconds("permute", mesh, cube, (axis,), 8 * MB) == pytest.approx(8 * MB / W)
    # Where the ends are not linked, the outer half has every second chip, and shares.
    open_ended = MeshConfig((2, 2, 8), ("a", "b", "c"))
    assert _seconds("permute", open_ended, slice_by_name("v4-64"), ("a",), 8 * MB) == pytest.approx(16 * MB / W)


def test_one_hop_costs_a_link() -> None:
    mesh = MeshConfig((4, 4), ("data", "model"))
    assert _seconds("permute", mesh, slice_by_name("v4-32"), ("data",), 9 * MB) == pytest.approx(9 * MB / W)


def test_an_axis_of_one_is_free() -> None:
    mesh = MeshConfig((16, 1), ("data", "model"))
    assert exchange(wire(mesh, slice_by_name("v4-32")), "all_reduce", ("model",), MB).seconds == 0


def test_latency_counts_hops() -> None:
    mesh = MeshConfig((4, 4), ("data", "model"))
    wiring = wire(mesh, slice_by_name("v4-32"), hop_seconds=1e-6)
    # Three hops to the end of a line, there and back again for an all_reduce.
    assert exchange(wiring, "all_gather", ("data",), MB).latency == pytest.approx(3e-6)
    assert exchange(wiring, "all_reduce", ("data",), MB).latency == pytest.approx(6e-6)


def test_gpus_of_one_host_are_switched_and_more_go_over_the_network() -> None:
    h200 = chip("h200")
    eight = wire(MeshConfig((8,), ("data",)), h200)
    assert eight.link == "NVLink"
    assert exchange(eight, "all_reduce", ("data",), 8 * MB).seconds == pytest.approx(2 * 8 * MB * 7 / 8 / 450e9)
    named = wire(MeshConfig((8,), ("data",)), Slice("h200x8", h200, (8,)))
    assert named == eight
    sixteen = wire(MeshConfig((16,), ("data",)), h200)
    both = exchange(sixteen, "all_reduce", ("data",), 8 * MB)
    # An eighth of it is left to exchange between the two hosts.
    assert both.seconds == pytest.approx(2 * 8 * MB * 7 / 8 / 450e9 + 2 * 1 * MB / 2 / 50e9)
    assert both.link == "DCN"


def test_several_slices_exchange_what_one_slice_has_shared_out() -> None:
    mesh = MeshConfig((8, 4), ("data", "model"))
    two = exchange(wire(mesh, slice_by_name("v4-32"), num_slices=2), "all_reduce", ("data",), 8 * MB)
    one = exchange(wire(MeshConfig((4, 4)), slice_by_name("v4-32")), "all_reduce", ("data",), 8 * MB)
    assert two.seconds == pytest.approx(one.seconds + 2 * (8 * MB / 4) / 2 / 6.25e9)
    assert two.link == "DCN"


def test_two_devices_of_one_chip_are_one_more_dimension() -> None:
    """A v3 chip shows up as two devices; they are neighbours, so the axis of two stays inside the chips."""
    wiring = wire(MeshConfig((4, 4, 2), ("a", "b", "core")), slice_by_grid("v3", (4, 4)))
    assert [(s.size, s.stride) for s in wiring.inner(("core",))] == [(2, 1)]
    assert [(s.size, s.stride) for s in wiring.inner(("a", "b"))] == [(4, 1), (4, 1)]


def test_bad_input_says_the_rule() -> None:
    with pytest.raises(ValueError, match=r"has 16 devices.*Got a mesh of 4x8 = 32"):
        wire(MeshConfig((4, 8)), slice_by_name("v4-32"))
    with pytest.raises(ValueError, match="Only TPUs come in slices"):
        wire(MeshConfig((8,), ("data",)), chip("h200"), 2)
    with pytest.raises(UnknownNameError, match="all_reduce"):
        exchange(wire(MeshConfig((4, 4)), slice_by_name("v4-32")), "all_reduc", ("data",), 1.0)
    with pytest.raises(UnknownNameError, match="Unknown mesh axis 'modle'"):
        exchange(wire(MeshConfig((4, 4)), slice_by_name("v4-32")), "all_reduce", ("modle",), 1.0)


@given(
    kind=st.sampled_from(KINDS),
    small=st.floats(1, 1e9),
    more=st.floats(0, 1e9),
    axes=st.sampled_from([("data",), ("model",), ("data", "model")]),
    grid=st.sampled_from([(4, 8, "v4:2x4x4"), (8, 8, "v4:4x4x4"), (2, 32, "v4:4x4x4"), (4, 4, "v4:2x2x4")]),
)
def test_more_bytes_are_never_faster(
    kind: str, small: float, more: float, axes: tuple[str, ...], grid: tuple[int, int, str]
) -> None:
    wiring = wire(MeshConfig(grid[:2]), slice_by_name(grid[2]))
    less, greater = exchange(wiring, kind, axes, small), exchange(wiring, kind, axes, small + more)
    assert 0 < less.seconds <= greater.seconds
    assert less.sent <= greater.sent


@given(kind=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), length=st.integers(1, 7))
def test_a_longer_axis_is_never_cheaper_a_byte(kind: str, length: int) -> None:
    """Along one grid dimension of a torus, 4 to 32 chips long."""

    def along(size: int) -> float:
        where = slice_by_grid("v4", (4, 4, size))
        mesh = MeshConfig((size, 16), ("data", "model"))
        wiring = wire(mesh, where)
        assert [s.size for s in wiring.inner(("data",))] == [size]
        return exchange(wiring, kind, ("data",), MB).seconds

    assert along(4 * length) <= along(4 * length + 4)
