"""Where the places of a mesh lie on the grid of chips: which grid dimensions each mesh axis takes, and in what order.

The last mesh axis is the one that talks most (`training_mesh` says why), so it chooses first. The rule, in order:

1. As few grid dimensions as possible are cut between mesh axes: two axes that share a dimension share its links.
2. From the last axis to the first, the most bandwidth. Each grid dimension an axis runs along adds a link each way,
   and another where the axis closes through a wrap-around; places that lie `stride` chips apart share every link
   between them with the lines in between.
3. Then the fewest hops from end to end, then the squarest part, then the lowest grid dimensions: those are the ones
   inside of a host.

Along one mesh axis that has several grid dimensions the places follow a closed walk from chip to neighbouring chip,
so that a ring over the axis has one link a step. Everything here is arithmetic on shapes: no device is touched.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from capibara.errors import rule_error

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Part", "coordinates", "grid_axes", "grid_parts"]


class Part(NamedTuple):
    """A piece of one grid dimension that a mesh axis takes."""

    dim: int
    size: int
    stride: int
    """How far apart its places are: 1 for a whole dimension, and for the part of a cut one that lies closest."""


def grid_axes(
    mesh_shape: Sequence[int], grid: Sequence[int], wrap: Sequence[bool] | None = None
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each mesh axis, the grid dimensions it takes and how many places of each; () for an axis of one.

    `wrap` says for each grid dimension whether its ends are linked; none are, unless said. Where a dimension is cut
    between mesh axes, the later one has the places that are neighbours (`grid_parts` gives the strides).

    Examples:
        >>> grid_axes((4, 8), (2, 4, 4))
        (((2, 4),), ((0, 2), (1, 4)))
        >>> grid_axes((8, 4), (2, 2, 8))
        (((2, 8),), ((0, 2), (1, 2)))
    """
    return tuple(tuple((part.dim, part.size) for part in axis) for axis in grid_parts(mesh_shape, grid, wrap))


def grid_parts(
    mesh_shape: Sequence[int], grid: Sequence[int], wrap: Sequence[bool] | None = None
) -> tuple[tuple[Part, ...], ...]:
    """`grid_axes` with the distance between the places of each part."""
    return _assigned(*_checked(mesh_shape, grid, wrap))


def coordinates(mesh_shape: Sequence[int], grid: Sequence[int], wrap: Sequence[bool] | None = None) -> np.ndarray:
    """The chip of each place of the mesh: integers of shape (*mesh_shape, dimensions of the grid)."""
    import numpy as np

    sizes, dims, wraps = _checked(mesh_shape, grid, wrap)
    axes = _assigned(sizes, dims, wraps)
    found = np.zeros((*sizes, len(dims)), dtype=int)
    for dim in range(len(dims)):
        # (mesh axis, its part of this dimension), the widest stride first: the digits of a coordinate.
        digits = sorted(
            ((axis, part) for axis, parts in enumerate(axes) for part in parts if part.dim == dim),
            key=lambda digit: -digit[1].stride,
        )
        if not digits:
            continue
        code = _code(tuple(part.size for _, part in digits), wraps[dim])
        index = tuple(_digit(axis, axes[axis], dim, sizes) for axis, _ in digits)
        found[..., dim] = np.asarray(code)[index]
    return found


def _checked(
    mesh_shape: Sequence[int], grid: Sequence[int], wrap: Sequence[bool] | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]:
    sizes, dims = tuple(int(size) for size in mesh_shape), tuple(int(size) for size in grid)
    wraps = (False,) * len(dims) if wrap is None else tuple(bool(one) for one in wrap)
    if min((*sizes, *dims), default=0) < 1 or math.prod(sizes) != math.prod(dims):
        raise rule_error(
            "A mesh takes every chip of the grid it lies on",
            f"a mesh of {_text(sizes)} on a grid of {_text(dims)}",
            f"choose mesh sizes that multiply to {math.prod(dims)}",
        )
    if len(wraps) != len(dims):
        raise rule_error(
            "wrap has one value a grid dimension", f"{len(wraps)} for a grid of {_text(dims)}", "pass Slice.wrap"
        )
    return sizes, dims, wraps


# Parts of cut dimensions; what each axis pays; how much of each dimension it takes: from the last axis to the first.
_Choice: TypeAlias = tuple[int, tuple[tuple[float, ...], ...], tuple[tuple[int, ...], ...]]


@functools.lru_cache(maxsize=1024)
def _assigned(sizes: tuple[int, ...], grid: tuple[int, ...], wrap: tuple[bool, ...]) -> tuple[tuple[Part, ...], ...]:
    @functools.cache
    def best(axis: int, left: tuple[int, ...]) -> _Choice:
        """The best way to give what is `left` to mesh axis `axis` and those before it: cut parts, costs, choices."""
        if axis < 0:
            return 0, (), ()
        stride = tuple(whole // rest for whole, rest in zip(grid, left, strict=True))
        found = []
        for taken in _factors(sizes[axis], left):
            rest = best(axis - 1, tuple(a // b for a, b in zip(left, taken, strict=True)))
            cuts = sum(1 < part < whole for part, whole in zip(taken, grid, strict=True))
            cost = _cost(taken, stride, grid, wrap)
            found.append((cuts + rest[0], (cost, *rest[1]), (taken, *rest[2])))
        return min(found)

    parts = []
    left = grid
    for taken in best(len(sizes) - 1, grid)[2]:
        parts.append(tuple(Part(dim, size, grid[dim] // left[dim]) for dim, size in enumerate(taken) if size > 1))
        left = tuple(a // b for a, b in zip(left, taken, strict=True))
    return tuple(reversed(parts))


def _factors(size: int, left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to write `size` as a product of divisors of what is left of each grid dimension."""
    if not left:
        if size == 1:
            yield ()
        return
    for part in range(1, math.gcd(size, left[0]) + 1):
        if left[0] % part == 0 and size % part == 0:
            yield from ((part, *others) for others in _factors(size // part, left[1:]))


def _cost(
    taken: tuple[int, ...], stride: tuple[int, ...], grid: tuple[int, ...], wrap: tuple[bool, ...]
) -> tuple[float, ...]:
    """What one axis pays, to be compared: less bandwidth, hops, how oblong it is, which dimensions it takes."""
    used = [dim for dim, part in enumerate(taken) if part > 1]
    # A part that reaches from one end of a wrapped dimension to the other can go both ways round.
    closed = [wrap[dim] and taken[dim] * stride[dim] == grid[dim] for dim in range(len(grid))]
    bandwidth = sum((2 if closed[dim] else 1) / stride[dim] for dim in used)
    hops = sum((taken[dim] // 2 if closed[dim] else taken[dim] - 1) * stride[dim] for dim in used)
    return (-bandwidth, hops, max((taken[dim] for dim in used), default=1), *used)


@functools.lru_cache(maxsize=1024)
def _code(sizes: tuple[int, ...], wrap: bool) -> np.ndarray:
    """The coordinate along one grid dimension for each combination of digits, the one of the widest stride first.

    Plain digits keep every part's places an equal stride apart. Running back in every second block brings the two
    halves of a wrapped dimension together: of four chips in a ring, cut in two and two, the pairs (0, 1), (3, 2) have
    only neighbours, where (0, 1), (2, 3) are two hops apart. Whichever has the shorter longest hop is taken.
    """
    import numpy as np

    length = math.prod(sizes)
    plain = np.arange(length).reshape(sizes)
    folded = np.empty(sizes, dtype=int)
    for position, digits in enumerate(_snake(sizes)):
        folded[digits] = position

    def longest(code: np.ndarray) -> tuple[int, float]:
        steps = [np.abs(np.diff(code, axis=axis)).ravel() for axis in range(code.ndim)]
        hops = np.concatenate([np.minimum(step, length - step) if wrap else step for step in steps])
        return int(hops.max(initial=0)), float(hops.sum())

    return min((plain, folded), key=longest)


def _digit(axis: int, parts: tuple[Part, ...], dim: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Which place of its part of `dim` each place of the mesh has, shaped to broadcast over the mesh."""
    import numpy as np

    walk = _walk(parts)
    which = [part.dim for part in parts].index(dim)
    along = np.asarray([place[which] for place in walk])
    return along.reshape([sizes[axis] if one == axis else 1 for one in range(len(sizes))])


@functools.lru_cache(maxsize=1024)
def _walk(parts: tuple[Part, ...]) -> tuple[tuple[int, ...], ...]:
    """The places of a box in an order in which each is a neighbour of the one before, and the last of the first.

    With two dimensions or more and an even number of places there is such a closed walk: every row but its first
    place back and forth, then home along the first places. Rows run across the even dimension of the widest stride,
    which is stepped along least. Otherwise it is back and forth all the way, and open.
    """
    sizes = tuple(part.size for part in parts)
    even = [which for which, part in enumerate(parts) if part.size % 2 == 0]
    if len(parts) < 2 or not even:
        return tuple(_snake(sizes))
    rows = max(even, key=lambda which: parts[which].stride)
    columns = list(_snake(sizes[:rows] + sizes[rows + 1 :]))
    walk = [(0, 0)]
    for row in range(sizes[rows]):
        there = range(1, len(columns))
        walk += [(row, column) for column in (there if row % 2 == 0 else reversed(there))]
    walk += [(row, 0) for row in range(sizes[rows] - 1, 0, -1)]
    return tuple((*columns[column][:rows], row, *columns[column][rows:]) for row, column in walk)


def _snake(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The places of a box, one dimension back and forth inside of the other."""
    if not sizes:
        yield ()
        return
    inner = list(_snake(sizes[1:]))
    for outer, back in zip(range(sizes[0]), itertools.cycle((False, True))):
        yield from ((outer, *one) for one in (reversed(inner) if back else inner))


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
