"""Primitives that work along dimensions: reductions, running sums, sorts, Fourier transforms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from capibara.program.factors import WHOLE, Factors, whole
from capibara.program.primitives.registry import Made, Shape, rule

__all__: list[str] = []

# Numbers of one row, as a power of two, that a sort or a transform works on without going back to memory. Assumed: a
# few ten KiB of them fit beside the unit that computes.
_ON_CHIP = 12


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


@rule("psum", "pmax", "pmin")
def named_reduction(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    """Over an axis that vmap named: outside of a shard_map that is a dimension of the array."""
    axes = params["axes"]
    if len(shapes) > 1 or not all(isinstance(axis, int) for axis in axes):
        note = f"a sum over {axes} is computed whole on every chip"
        return Made(whole(tuple(shapes), tuple(results)), float(sum(map(math.prod, shapes))), note=note)
    return reduction(shapes, results, params)


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
    # A sorting network: of its depth (depth + 1) / 2 stages those within a tile share one trip through memory.
    stages = depth * (depth + 1) / 2
    made = _along(shapes, results, {along}, stages * math.prod(shapes[0]) * len(shapes))
    beyond = max(0, depth - _ON_CHIP)
    return dataclasses.replace(made, moved=_trips(1 + beyond * (beyond + 1) / 2, shapes, results))


def _trips(count: float, shapes: list[Shape], results: list[Shape]) -> tuple[float, ...]:
    return (count,) * (len(shapes) + len(results))


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
    depth = math.log2(max(points, 2))
    made = _along(shapes, results, set(range(first, len(shapes[0]))), 5.0 * elements * depth)
    return dataclasses.replace(made, moved=_trips(math.ceil(depth / _ON_CHIP), shapes, results))


@rule("select_and_scatter_add")
def picked_of_windows(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    """The gradient of a maximum over windows: a window of one element leaves its dimension independent."""
    reach = params["window_dimensions"]
    kept = tuple(dim if size == 1 and shapes[0][dim] == shapes[1][dim] else WHOLE for dim, size in enumerate(reach))
    return Made(Factors((kept, kept), (kept,), results[0]), float(math.prod(shapes[0]) * math.prod(reach)))


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", "select_and_gather_add")
def window(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    # A window that reaches over one element only leaves its dimension independent.
    reach = params["window_dimensions"]
    gone = {dim for dim, size in enumerate(reach) if size != 1 or results[0][dim] != shapes[0][dim]}
    return _along(shapes, results, gone, float(math.prod(results[0]) * math.prod(reach)))
