"""Primitives that work along dimensions: reductions, running sums, sorts, Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from capibara.parallel.program.factors import WHOLE, Factors
from capibara.parallel.program.registry import Made, Shape, rule

__all__: list[str] = []


def _dims(value: Any) -> tuple[int, ...]:
    return tuple(int(dim) for dim in (value if isinstance(value, Iterable) else (value,)))


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
      "argmin", "reduce")  # fmt: skip
def reduction(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    gone = set(_dims(params["axes"] if "axes" in params else params["dimensions"]))
    every = tuple(range(len(shapes[0])))
    kept = tuple(dim for dim in every if dim not in gone)
    sides = tuple(every if shape == shapes[0] else (WHOLE,) * len(shape) for shape in shapes)
    factors = Factors(sides, tuple(kept for _ in results), shapes[0], frozenset(gone))
    return Made(factors, float(math.prod(shapes[0])))


def _along(shapes: list[Shape], results: list[Shape], gone: set[int], flops: float) -> Made:
    """Work along some dimensions, which one chip must hold whole; the others are independent."""
    kept = tuple(WHOLE if dim in gone else dim for dim in range(len(shapes[0])))
    sides = tuple(kept if len(shape) == len(kept) else (WHOLE,) * len(shape) for shape in shapes)
    return Made(Factors(sides, tuple(kept for _ in results), shapes[0]), flops)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    along = int(params["axis"])
    steps = math.ceil(math.log2(max(shapes[0][along], 2)))
    return _along(shapes, results, {along}, float(steps * math.prod(shapes[0])))


@rule("sort")
def sort(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    along = int(params["dimension"])
    depth = math.ceil(math.log2(max(shapes[0][along], 2)))
    return _along(shapes, results, {along}, float(depth * math.prod(shapes[0]) * len(shapes)))


@rule("top_k", "approx_top_k")
def top_k(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    last = len(shapes[0]) - 1
    depth = math.ceil(math.log2(max(shapes[0][last], 2)))
    return _along(shapes, results, {int(params.get("reduction_dimension", last)) % (last + 1)},
                  float(depth * math.prod(shapes[0])))  # fmt: skip


@rule("fft")
def fft(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    points = math.prod(params["fft_lengths"])
    first = len(shapes[0]) - len(params["fft_lengths"])
    elements = max(math.prod(shapes[0]), math.prod(results[0]))
    return _along(
        shapes, results, set(range(first, len(shapes[0]))), 5.0 * elements * math.log2(max(points, 2))
    )  # fmt: skip


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_gather_add")
def window(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    # A window that reaches over one element only leaves its dimension independent.
    reach = params["window_dimensions"]
    gone = {dim for dim, size in enumerate(reach) if size != 1 or results[0][dim] != shapes[0][dim]}
    return _along(shapes, results, gone, float(math.prod(results[0]) * math.prod(reach)))
