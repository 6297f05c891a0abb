"""Primitives that run on the matrix units: products, convolutions, factorisations."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from capibara.program.factors import WHOLE, Factors
from capibara.program.primitives.registry import Made, Shape, rule

__all__: list[str] = []


@rule("dot_general")
def dot_general(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    left, right = shapes
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    one, other = [WHOLE] * len(left), [WHOLE] * len(right)
    lengths: list[int] = []

    def new(size: int) -> int:
        lengths.append(size)
        return len(lengths) - 1

    for i, j in zip(left_batch, right_batch, strict=True):
        one[i] = other[j] = new(left[i])
    batch = tuple(range(len(lengths)))
    summed = []
    for i, j in zip(left_sum, right_sum, strict=True):
        one[i] = other[j] = new(left[i])
        summed.append(one[i])
    rows = [new(left[i]) for i in range(len(left)) if one[i] == WHOLE]
    columns = [new(right[j]) for j in range(len(right)) if other[j] == WHOLE]
    for side, free in ((one, rows), (other, columns)):
        given = iter(free)
        side[:] = [next(given) if factor == WHOLE else factor for factor in side]
    factors = Factors(
        (tuple(one), tuple(other)), ((*batch, *rows, *columns),), tuple(lengths), frozenset(summed)
    )  # fmt: skip
    return Made(factors, 2.0 * math.prod(lengths), matrix=True, mnk=(batch, tuple(rows), tuple(columns), tuple(summed)))


@rule("ragged_dot_general")
def ragged_dot(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    """Rows [m, k] by groups' matrices [g, k, n], turned or not, and the matrices' gradient, [m, k] by [m, n].

    Where a group's rows begin is counted from the first row on, so that rows cannot be split without counting anew;
    nor can groups. Each row meets one group's matrix.
    """
    left, right = shapes[:2]
    numbers = params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    ragged, grouped = set(numbers.lhs_ragged_dimensions), set(numbers.rhs_group_dimensions)
    one, other = [WHOLE] * len(left), [WHOLE] * len(right)
    lengths: list[int] = []

    def new(size: int) -> int:
        lengths.append(size)
        return len(lengths) - 1

    for i, j in zip((*left_batch, *left_sum), (*right_batch, *right_sum), strict=True):
        if i not in ragged:
            one[i] = other[j] = new(left[i])
    rows = [i for i in range(len(left)) if i not in (*left_batch, *left_sum)]
    columns = [j for j in range(len(right)) if j not in (*right_batch, *right_sum) and j not in grouped]
    for i in rows:
        one[i] = WHOLE if i in ragged else new(left[i])
    for j in columns:
        other[j] = new(right[j])
    out = [*(one[i] for i in (*left_batch, *rows)), *(other[j] for j in columns)]
    flops, idle = 2.0 * math.prod(left) * math.prod(right[j] for j in columns), 0.0
    if ragged <= set(left_sum):
        # A result for each group. XLA has no program of its own for it on any platform: it multiplies all rows for
        # each group, those of the others being zeros (seen in a step compiled for v4, 2026-11-16).
        out = [WHOLE, *out]
        flops, idle = flops * results[0][0], flops * (results[0][0] - 1)
    rest = tuple((WHOLE,) * len(shape) for shape in shapes[2:])
    summed = frozenset(one[i] for i in left_sum if one[i] != WHOLE)
    factors = Factors((tuple(one), tuple(other), *rest), (tuple(out),), tuple(lengths), summed)
    return Made(factors, flops, matrix=True, idle=idle)


@rule("conv_general_dilated")
def convolution(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    image, kernel = shapes
    spec = params["dimension_numbers"]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    one, other, out = [WHOLE] * len(image), [WHOLE] * len(kernel), [WHOLE] * len(results[0])
    if batch_groups == 1:
        one[spec.lhs_spec[0]] = out[spec.out_spec[0]] = 0
    if groups == 1:
        # Summed over; with groups of the batch too, where it is the batch of a grouped convolution's gradient.
        one[spec.lhs_spec[1]] = other[spec.rhs_spec[1]] = 1
        if batch_groups == 1:
            other[spec.rhs_spec[0]] = out[spec.out_spec[1]] = 2
    many = max(groups, batch_groups)
    # After the three that are split, those that only say how large the product is: places, taps, groups.
    lengths = (
        results[0][spec.out_spec[0]], kernel[spec.rhs_spec[1]], kernel[spec.rhs_spec[0]] // many,
        math.prod(results[0][dim] for dim in spec.out_spec[2:]), math.prod(kernel[dim] for dim in spec.rhs_spec[2:]),
        many,
    )  # fmt: skip
    factors = Factors((tuple(one), tuple(other)), (tuple(out),), lengths, frozenset({1}))
    sizes = ((5,), (0, 3), (2,), (1, 4))
    products = results[0][spec.out_spec[0]] * results[0][spec.out_spec[1]] * kernel[spec.rhs_spec[1]]
    spatial = zip(
        (image[dim] for dim in spec.lhs_spec[2:]), (kernel[dim] for dim in spec.rhs_spec[2:]),
        (results[0][dim] for dim in spec.out_spec[2:]), params["window_strides"], params["padding"],
        params["lhs_dilation"], params["rhs_dilation"], strict=True,
    )  # fmt: skip
    for length, taps, places, stride, padding, between, apart in spatial:
        products *= _meetings(length, taps, places, stride, int(padding[0]), between, apart)
    return Made(factors, 2.0 * products, matrix=True, mnk=sizes)


@functools.lru_cache(maxsize=4096)
def _meetings(length: int, taps: int, places: int, stride: int, before: int, between: int, apart: int) -> float:
    """How often a tap of the kernel meets an element of the image along one dimension: not padding, not a hole.

    `between` and `apart` are the dilations of image and kernel. A gradient of a strided convolution is one over an
    image with holes, which no compiler multiplies.
    """
    if places * taps > 1 << 22:  # too long to count: the ends are a small part of it
        return places * taps / between
    at = np.arange(places)[:, None] * stride - before + np.arange(taps)[None] * apart
    return float(np.count_nonzero((at >= 0) & (at <= (length - 1) * between) & (at % between == 0)))


@rule("tridiagonal_solve")
def tridiagonal_solve(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    # Three diagonals [..., n] and right sides [..., n, k]: one sweep down and one up.
    return Made(_independent(shapes[-1][:-2], shapes, results), 8.0 * math.prod(shapes[-1]))


@rule("triangular_solve")
def triangular_solve(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    # Every number of the right sides meets half of a row of the triangle.
    triangle, sides = shapes
    return Made(_independent(triangle[:-2], shapes, results), float(math.prod(sides) * triangle[-1]))


def _independent(batch: Shape, shapes: list[Shape], results: list[Shape]) -> Factors:
    """Leading dimensions are problems of their own."""
    lead = len(batch)
    sides = tuple(
        tuple(dim if dim < lead and shape[:lead] == batch else WHOLE for dim in range(len(shape)))
        for shape in (*shapes, *results)
    )
    return Factors(sides[: len(shapes)], sides[len(shapes) :], batch)


@rule("cholesky", "lu", "householder_product", "geqrf", "qr", "eigh", "svd", "eig", "schur",
      "hessenberg", "tridiagonal", "geqp3")  # fmt: skip
def factorisation(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    # Cubic in the last two dimensions, which are whole; leading ones are independent problems.
    *batch, rows, columns = shapes[0]
    factors = _independent(tuple(batch), shapes, results)
    return Made(factors, 2.0 * math.prod(batch) * rows * columns * min(rows, columns))


@rule("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd",
      "dot_product_attention_bwd_wrapper")  # fmt: skip
def vendor_attention(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    """cuDNN's attention, [batch, length, heads, width]: batch and, where keys have as many, heads are independent."""
    (batch, length, heads, width), keys = shapes[0], shapes[1]

    def side(shape: Shape) -> tuple[int, ...]:
        if len(shape) != 4 or shape[0] != batch:
            return (WHOLE,) * len(shape)
        return (0, WHOLE, 1 if shape[2] == heads == keys[2] else WHOLE, WHOLE)

    factors = Factors(tuple(map(side, shapes)), tuple(map(side, results)), (batch, heads))
    # Two products forward; five backward, the scores being made again. Half of them under a causal mask.
    products = 5 if len(results) > 2 else 2
    causal = "CAUSAL" in str(params.get("mask_type", "")).upper()
    flops = 2.0 * products * batch * heads * length * keys[1] * width
    return Made(factors, flops / 2 if causal else flops, matrix=True)
