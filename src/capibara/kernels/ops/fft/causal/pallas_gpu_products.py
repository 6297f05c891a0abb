"""The matrix products of long causal filters on Hopper, for the 64 rows of a warpgroup and 64 columns at a time.

`pallas_gpu` beside this says what they are for. Operands in shared memory are given as `Blocks`.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

HALVES = (0, 1)
COSINE, SINE, MINUS_SINE = range(3)  # the planes of the matrix
PRODUCTS = 4  # that each function here starts, and does not wait for


def block(plane: Any, row: Any, column: Any) -> Any:
    """The place of a block among those of its matrix: of a plane, a half of its rows and a half of its columns."""
    return 4 * plane + 2 * row + column


class Blocks:
    """Blocks in shared memory at places counted from a zero."""

    def __init__(self, ref: Any, zero: Any) -> None:
        self.ref, self.zero = ref, zero

    def __call__(self, plane: Any, row: Any, column: Any) -> Any:
        return self.ref.at[self.zero + block(plane, row, column)]


def _transposed(ref: Any) -> Any:
    return plgpu.transpose_ref(ref, (1, 0))


def first(sums: Any, matrix: Any, x: Any, half: Any, column: int) -> None:
    """A X for 64 rows and 64 columns: two planes."""
    for inner in HALVES:
        for plane in (COSINE, SINE):
            plgpu.wgmma(sums[plane], matrix(plane, half, inner), x(0, inner, column))


def first_of_pair(sums: Any, matrix: Any, x: Any, half: Any, column: int) -> None:
    """The same where X has 64 rows, and the places of the other 64 have its imaginary plane."""
    re, im = (x(0, plane, column) for plane in range(2))
    plgpu.wgmma(sums[0], matrix(COSINE, half, 0), re)
    plgpu.wgmma(sums[1], matrix(SINE, half, 0), re)
    plgpu.wgmma(sums[0], matrix(MINUS_SINE, half, 0), im)
    plgpu.wgmma(sums[1], matrix(COSINE, half, 0), im)


def second(sums: Any, matrix: Any, planes: Any, inner: int, column: int) -> None:
    """What 64 columns of U give of U Aᵀ, for 64 of its columns."""
    cosine, sine, minus = (_transposed(matrix(plane, column, inner)) for plane in range(3))
    re, im = planes
    plgpu.wgmma(sums[0], re, cosine)
    plgpu.wgmma(sums[1], re, sine)
    plgpu.wgmma(sums[0], im, minus)
    plgpu.wgmma(sums[1], im, cosine)


def third(sums: Any, matrix: Any, planes: Any, inner: int, column: int) -> None:
    """What 64 columns of V give of V conj(A), for 64 of its columns."""
    cosine, sine, minus = (matrix(plane, inner, column) for plane in range(3))
    re, im = planes
    plgpu.wgmma(sums[0], re, cosine)
    plgpu.wgmma(sums[1], re, minus)
    plgpu.wgmma(sums[0], im, sine)
    plgpu.wgmma(sums[1], im, cosine)


def last(total: Any, matrix: Any, w: Any, half: Any, column: int) -> None:
    """The real part of A^H W for 64 rows and 64 columns."""
    for inner in HALVES:
        for plane in (COSINE, SINE):
            plgpu.wgmma(total, _transposed(matrix(plane, inner, half)), w(plane, inner, column))


def last_of_pair(total: Any, matrix: Any, w: Any, half: Any, column: int) -> None:
    """Of the first 64 rows of A^H W, the real part by one warpgroup, the imaginary one by the other."""
    for inner in HALVES:
        plgpu.wgmma(total, _transposed(matrix(COSINE, inner, 0)), w(half, inner, column))
        plgpu.wgmma(total, _transposed(matrix(SINE + half, inner, 0)), w(1 - half, inner, column))
