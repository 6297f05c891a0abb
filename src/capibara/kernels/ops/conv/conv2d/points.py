"""Winograd's transforms for 3x3 filters, and what they do to rounding errors.

F(m, 3) gives m outputs of a filter of 3 from m + 2 inputs d with m + 2 products:

    y = Aᵀ [(G g) ⊙ (Bᵀ d)],

polynomials being multiplied by their values at m + 1 points and infinity. In two dimensions each transform is applied
along rows and along columns, and the products of one position are a matrix product over the channels.

The points decide how much rounding errors grow. `amplification` measures it, and the points here are the best of the
small fractions by that measure: for F(4, 3), ±2/3 and ±3/2 give 7.1 where the usual ±1 and ±2 give 31.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.spec import unit_roundoff

TAPS = 3
POINTS: dict[int, tuple[Fraction, ...]] = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (Fraction(0), Fraction(2, 3), Fraction(-2, 3), Fraction(3, 2), Fraction(-3, 2)),
    6: tuple(map(Fraction, ("0", "1", "-1", "1/2", "-1/2", "2", "-2"))),
}
TILES = tuple(POINTS)
MOST_TIMES_DIRECT = 4.0
"""Where products have fewer bits than float32, a tile whose bound is over this many times the direct form's refuses,
unless the caller asks for it."""

Matrix = tuple[tuple[Fraction, ...], ...]


class Transforms(NamedTuple):
    """The three matrices of F(m, 3), exactly."""

    inputs: Matrix  # Bᵀ, [m + 2, m + 2]
    filters: Matrix  # G, [m + 2, 3]
    outputs: Matrix  # Aᵀ, [m, m + 2]


def _with_roots(roots: Sequence[Fraction]) -> list[Fraction]:
    """The coefficients of Π (x - root), lowest power first."""
    made = [Fraction(1)]
    for root in roots:
        made = [Fraction(0), *made]
        for power in range(len(made) - 1):
            made[power] -= root * made[power + 1]
    return made


@functools.lru_cache(maxsize=16)
def transforms(tile: int) -> Transforms:
    """The matrices for output tiles of `tile`.

    >>> [list(map(str, row)) for row in transforms(2).outputs]
    [['1', '1', '1', '0'], ['0', '1', '-1', '1']]
    """
    if tile not in POINTS:
        raise rule_error(f"Winograd's output tiles are {', '.join(map(str, TILES))}", tile, "pass one of these")
    points = POINTS[tile]
    inputs, filters = [], []
    for i, x in enumerate(points):
        others = [y for j, y in enumerate(points) if j != i]
        scale = Fraction(1)
        for y in others:
            scale *= x - y
        inputs.append((*_with_roots(others), Fraction(0)))
        filters.append(tuple(x**k / scale for k in range(TAPS)))
    # The point at infinity: the highest coefficient of each polynomial.
    inputs.append(tuple(_with_roots(points)))
    filters.append(tuple(Fraction(int(k == TAPS - 1)) for k in range(TAPS)))
    outputs = tuple((*(x**k for x in points), Fraction(int(k == tile - 1))) for k in range(tile))
    return Transforms(tuple(inputs), tuple(filters), outputs)


@functools.lru_cache(maxsize=16)
def amplification(tile: int) -> float:
    """How many times larger a rounding error of the products is in the result, against the direct sum's.

    Let every input and weight be an independent number of variance 1, so that the direct result has variance 9 a
    channel. Along one axis a transformed input has variance bᵢ = Σₖ Bᵀᵢₖ², a transformed weight gᵢ = Σₖ Gᵢₖ². An error
    of relative size u in one of them, or in their product, enters output a with variance u² Σᵢ Aᵀₐᵢ² bᵢ gᵢ, against a
    result of variance 3. In two dimensions the ratio is squared, and its root, the growth of the error itself, is
    maxₐ Σᵢ Aᵀₐᵢ² bᵢ gᵢ / 3. It does not depend on how the rows of the matrices are scaled.

    >>> [round(amplification(tile), 1) for tile in (2, 4, 6)]
    [1.7, 7.1, 46.3]
    """
    made = transforms(tile)
    weight = [
        float(sum(b * b for b in of_inputs) * sum(g * g for g in of_filters))
        for of_inputs, of_filters in zip(made.inputs, made.filters, strict=True)
    ]
    return max(sum(float(a * a) * w for a, w in zip(row, weight, strict=True)) for row in made.outputs) / TAPS


def direct_error_bound(dtype: Any, cin: int, product_unit: float | None = None) -> float:
    """The relative error of the direct 3x3 sum over `cin` channels, against the largest result.

    One rounding of the result; sums in float32 (float64 where the operands are) grow with the root of their length,
    four of them for an unlucky draw. `product_unit` is the roundoff that the products' operands take where the matrix
    units round them (none by default: 16-bit operands are exact).
    """
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    return unit_roundoff(dtype) + 4 * wide * (9 * max(cin, 1)) ** 0.5 + 2 * (product_unit or 0.0)


def winograd_error_bound(tile_size: int, dtype: Any, cin: int, product_unit: float | None = None) -> float:
    """The relative error that Winograd's tile over `cin` channels stays under, against the largest result.

    Each product has two transformed operands rounded to the products' type (their own type for 16-bit operands: a
    transformed number no longer fits; `product_unit` where the matrix units round further), transforms of eight
    roundings, and a sum over the channels, all in float32; `amplification` times as much is in the result, which is
    rounded once more.

    >>> winograd_error_bound(4, "float32", 256) < 4 * direct_error_bound("float32", 256)
    True
    >>> winograd_error_bound(4, "bfloat16", 256) > 4 * direct_error_bound("bfloat16", 256)
    True
    """
    dtype = jnp.dtype(dtype)
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    operands = max(unit_roundoff(dtype), product_unit or 0.0)
    # Two independent roundings a product add as their root mean square.
    inside = 2**0.5 * operands + wide * (8 + 4 * max(cin, 1) ** 0.5)
    return unit_roundoff(dtype) + amplification(tile_size) * inside
