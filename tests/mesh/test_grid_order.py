"""Which grid dimensions a mesh axis takes, and the walk along them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from capibara.hardware.topology import slice_by_name
from capibara.mesh.grid_order import Part, coordinates, grid_axes, grid_parts

GRIDS = {"v4-32": (2, 2, 4), "v4-64": (2, 4, 4), "v4-128": (4, 4, 4)}


def shapes(chips: int, axes: int) -> list[tuple[int, ...]]:
    """Every mesh of so many chips and axes, axes of one included."""
    sizes = [size for size in range(1, chips + 1) if chips % size == 0]
    return [shape for shape in itertools.product(sizes, repeat=axes) if math.prod(shape) == chips]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mesh", "grid", "axes"),
    [
        # The documented meshes of 32 chips, on the grid that 32 chips have.
        ((4, 8), (2, 4, 4), (((2, 4),), ((0, 2), (1, 4)))),
        ((8, 4), (2, 4, 4), (((0, 2), (2, 4)), ((1, 4),))),
        ((16, 2), (2, 4, 4), (((1, 4), (2, 4)), ((0, 2),))),
        # Four chips in a square have two links each and close; four in a row have one at the ends.
        ((4, 4), (2, 2, 4), (((2, 4),), ((0, 2), (1, 2)))),
        ((1, 8, 1, 1, 4), (2, 4, 4), ((), ((0, 2), (2, 4)), (), (), ((1, 4),))),
        ((32,), (2, 4, 4), (((0, 2), (1, 4), (2, 4)),)),
        # Nothing but cutting gives 8 x 8 out of fours: one dimension is cut, not two.
        ((8, 8), (4, 4, 4), (((0, 2), (2, 4)), ((0, 2), (1, 4)))),
    ],
)
def test_the_rule(mesh: tuple[int, ...], grid: tuple[int, ...], axes: object) -> None:
    assert grid_axes(mesh, grid) == axes


def test_wrap_decides_between_a_long_ring_and_a_square() -> None:
    # 16 chips round a ring have two links each; 4x4 that close both ways have four.
    assert grid_axes((16, 16), (4, 4, 16), (True,) * 3) == (((2, 16),), ((0, 4), (1, 4)))
    # Only the long one closes: two links round it equal two dimensions that are open, and those have fewer hops.
    assert grid_axes((16, 16), (4, 4, 16), (False, False, True)) == (((2, 16),), ((0, 4), (1, 4)))
    # One dimension that closes against one that does not, of the same length.
    assert grid_axes((4, 4), (4, 4), (False, True)) == (((0, 4),), ((1, 4),))
    assert grid_axes((4, 4), (4, 4), (True, False)) == (((1, 4),), ((0, 4),))


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", GRIDS)
def test_every_mesh_of_a_grid(name: str, axes: int) -> None:
    where = slice_by_name(name)
    assert where.grid == GRIDS[name]
    for shape in shapes(where.chips, axes):
        parts = grid_parts(shape, where.grid, where.wrap)
        # Each axis has the size it was asked for, and each grid dimension is given away exactly once.
        assert [math.prod(part.size for part in axis) for axis in parts] == list(shape)
        for dim, size in enumerate(where.grid):
            given = sorted((part.stride, part.size) for axis in parts for part in axis if part.dim == dim)
            assert math.prod(part for _, part in given) == size
            assert [stride for stride, _ in given] == [math.prod(p for _, p in given[:i]) for i in range(len(given))]
        places = coordinates(shape, where.grid, where.wrap).reshape(-1, 3)
        assert len({tuple(place) for place in places.tolist()}) == where.chips
        assert (places >= 0).all()
        assert (places < where.grid).all()


def test_no_dimension_is_cut_where_whole_ones_do() -> None:
    for shape in shapes(32, 3):
        whole = any(
            all(math.prod(side for side, owner in zip((2, 4, 4), owners, strict=True) if owner == axis) == size
                for axis, size in enumerate(shape))
            for owners in itertools.product(range(3), repeat=3)
        )  # fmt: skip
        cut = any(part.size < (2, 4, 4)[part.dim] for axis in grid_parts(shape, (2, 4, 4)) for part in axis)
        assert cut is not whole, shape


def test_the_outer_axis_has_the_wide_stride_of_a_cut_dimension() -> None:
    assert grid_parts((2, 2), (4,)) == ((Part(0, 2, 2),), (Part(0, 2, 1),))
    assert coordinates((2, 2), (4,))[..., 0].tolist() == [[0, 1], [2, 3]]
    # Closed to a ring, the halves run against each other and everybody is next to everybody it talks to.
    assert coordinates((2, 2), (4,), (True,))[..., 0].tolist() == [[0, 1], [3, 2]]


def test_the_walk_is_closed_and_starts_at_the_corner() -> None:
    walk = coordinates((32,), (2, 4, 4))
    assert walk[0].tolist() == [0, 0, 0]
    assert (np.abs(walk - np.roll(walk, -1, axis=0)).sum(axis=1) == 1).all()


def test_an_odd_number_of_places_is_walked_back_and_forth() -> None:
    walk = coordinates((9,), (3, 3))
    assert (np.abs(np.diff(walk, axis=0)).sum(axis=1) == 1).all()


def test_a_large_pod_and_five_axes() -> None:
    shape, grid = (2, 4, 2, 8, 32), (16, 16, 16)
    parts = grid_parts(shape, grid, (True,) * 3)
    assert [math.prod(part.size for part in axis) for axis in parts] == list(shape)
    # The last axis chooses first: a whole dimension, and neighbours along the second one it needs.
    assert {(part.size, part.stride) for part in parts[-1]} == {(16, 1), (2, 1)}


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("shape", [(3, 64), (64, 3), (6, 32), (12, 16), (2, 3, 4, 8)])
def test_sizes_that_are_no_powers_of_two(shape: tuple[int, ...], wrap: bool) -> None:
    places = coordinates(shape, (4, 4, 12), (wrap,) * 3)
    assert len({tuple(place) for place in places.reshape(-1, 3).tolist()}) == 192
    # The last axis is neighbours from each place to the next.
    steps = np.abs(np.diff(places, axis=-2))
    if wrap:
        steps = np.minimum(steps, np.asarray((4, 4, 12)) - steps)
    assert steps.sum(axis=-1).max() == 1


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"every chip of the grid.*4x4 on a grid of 2x4x4.*multiply to 32"):
        grid_axes((4, 4), (2, 4, 4))
    with pytest.raises(ValueError, match=r"one value a grid dimension. Got 2 for a grid of 2x4x4"):
        grid_axes((4, 8), (2, 4, 4), (True, True))
