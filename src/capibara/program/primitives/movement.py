"""Primitives that move elements: which dimensions stay together, and how many bytes really move."""

from __future__ import annotations

import math
from typing import Any

from capibara.program.factors import WHOLE, Factors
from capibara.program.primitives.registry import Made, Shape, rule

__all__: list[str] = []


@rule("reshape", "squeeze", "expand_dims")
def reshape(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    old, new = shapes[0], results[0]
    before, after = [WHOLE] * len(old), [WHOLE] * len(new)
    factors: list[int] = []
    if 0 in old:  # of no elements there is nothing to split
        return Made(Factors((tuple(before),), (tuple(after),), (), linear=True))
    i = j = 0
    while i < len(old) and j < len(new):
        if old[i] == 1 or new[j] == 1:  # nothing to carry
            i, j = i + (old[i] == 1), j + (old[i] != 1)
            continue
        first, second, left, right = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        # The outer dimensions of both sides carry the split, where one is a multiple of the other.
        small, large = sorted((old[first], new[second]))
        if small and large % small == 0:
            before[first] = after[second] = len(factors)
            factors.append(small)
    return Made(Factors((tuple(before),), (tuple(after),), tuple(factors), linear=True))


@rule("transpose")
def transpose(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    order = tuple(int(dim) for dim in params["permutation"])
    return Made(Factors((tuple(range(len(order))),), (order,), shapes[0], linear=True))


@rule("broadcast_in_dim")
def broadcast_in_dim(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    new = results[0]
    placed = tuple(int(dim) for dim in params["broadcast_dimensions"])
    before = tuple(dim if size == new[dim] else WHOLE for size, dim in zip(shapes[0], placed, strict=True))
    rest = tuple((WHOLE,) * len(shape) for shape in shapes[1:])
    return Made(Factors((before, *rest), (tuple(range(len(new))),), new))


@rule("iota", "iota_2x32_shape", "empty", "empty2", "rng_uniform", "rng_bit_generator")
def made_here(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    # Each chip can make any part of it.
    sides: list[tuple[int, ...]] = []
    lengths: list[int] = []
    start = 0
    for shape in results:
        sides.append(tuple(range(start, start + len(shape))))
        lengths += shape
        start += len(shape)
    return Made(Factors(tuple((WHOLE,) * len(shape) for shape in shapes), tuple(sides), tuple(lengths)))


def _same_or_whole(one: Shape, other: Shape) -> tuple[int, ...]:
    return tuple(dim if a == b else WHOLE for dim, (a, b) in enumerate(zip(one, other, strict=True)))


@rule("slice", "dynamic_slice", "rev", "pad")
def slices(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    old, new = shapes[0], results[0]
    kept = _same_or_whole(old, new)
    turned = {int(dim) for dim in params.get("dimensions", ())}
    if "padding_config" in params:
        turned = {dim for dim, pads in enumerate(params["padding_config"]) if any(pads)}
    kept = tuple(WHOLE if dim in turned else factor for dim, factor in enumerate(kept))
    rest = tuple((WHOLE,) * len(shape) for shape in shapes[1:])
    moved = (*(0.0 for _ in shapes), 2.0) if "padding_config" not in params else None
    return Made(Factors((kept, *rest), (kept,), old), moved=moved)


@rule("dynamic_update_slice")
def update_slice(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    old, part = shapes[:2]
    every = tuple(range(len(old)))
    rest = tuple((WHOLE,) * len(shape) for shape in shapes[2:])
    return Made(
        Factors((every, _same_or_whole(part, old), *rest), (every,), old), moved=(0.0, 2.0, *(0.0 for _ in rest), 0.0)
    )


@rule("concatenate")
def concatenate(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    joined = int(params["dimension"])
    kept = tuple(WHOLE if dim == joined else dim for dim in range(len(results[0])))
    return Made(Factors(tuple(kept for _ in shapes), (kept,), results[0]))


@rule("split")
def split(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    cut = int(params["axis"])
    kept = tuple(WHOLE if dim == cut else dim for dim in range(len(shapes[0])))
    return Made(Factors((kept,), tuple(kept for _ in results), shapes[0]))


@rule("stack")
def stack(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    every = tuple(range(len(shapes[0])))
    at = int(params["axis"]) % len(results[0])
    return Made(Factors(tuple(every for _ in shapes), ((*every[:at], WHOLE, *every[at:]),), shapes[0]))


@rule("unstack")
def unstack(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    every = tuple(range(len(results[0])))
    at = int(params["axis"]) % len(shapes[0])
    return Made(Factors(((*every[:at], WHOLE, *every[at:]),), tuple(every for _ in results), results[0]))


@rule("tile")
def tile(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    kept = _same_or_whole(shapes[0], results[0])
    return Made(Factors((kept,), (kept,), shapes[0]))


@rule("gather")
def gather(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    table, ids = shapes
    numbers, taken = params["dimension_numbers"], params["slice_sizes"]
    lengths: list[int] = []
    out, reduced = [WHOLE] * len(results[0]), set()
    before, index = [WHOLE] * len(table), [WHOLE] * len(ids)
    rest = (dim for dim in range(len(out)) if dim not in numbers.offset_dims)
    for dim, at in zip(range(len(ids) - 1), rest, strict=True):
        index[dim] = out[at] = len(lengths)
        lengths.append(ids[dim])
    windows = iter(numbers.offset_dims)
    for dim, size in enumerate(table):
        if dim in numbers.operand_batching_dims:
            at = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
            before[dim] = index[at]
        elif dim in numbers.collapsed_slice_dims:
            # Rows that another chip holds are masked, and the chips' parts are summed.
            before[dim] = len(lengths)
            reduced.add(len(lengths))
            lengths.append(size)
        else:
            at = next(windows)
            if taken[dim] == size:
                before[dim] = out[at] = len(lengths)
                lengths.append(size)
    # The compiler leaves the table where it is, brings the indices to it, and moves the rows that were found.
    stays = frozenset(factor for factor in before if factor >= 0)
    made = Factors((tuple(before), tuple(index)), (tuple(out),), tuple(lengths), frozenset(reduced), granted=stays)
    return Made(made, moved=(0.0, 1.0, 2.0))


@rule("scatter-add", "scatter_add", "scatter", "scatter-mul", "scatter-min", "scatter-max", "scatter_mul",
      "scatter_min", "scatter_max", "scatter-sub", "scatter_sub")  # fmt: skip
def scatter(shapes: list[Shape], results: list[Shape], params: dict[str, Any]) -> Made:
    table, ids, updates = shapes
    numbers = params["dimension_numbers"]
    before, index, given = list(range(len(table))), [WHOLE] * len(ids), [WHOLE] * len(updates)
    lengths, reduced = list(table), set()
    rest = (dim for dim in range(len(updates)) if dim not in numbers.update_window_dims)
    batched = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    sums = params.get("update_jaxpr") is not None
    for dim, at in zip(range(len(ids) - 1), rest, strict=True):
        if dim in batched:
            index[dim] = given[at] = batched[dim]
        elif sums:
            index[dim] = given[at] = len(lengths)
            reduced.add(len(lengths))
            lengths.append(ids[dim])
    windows, stays = iter(numbers.update_window_dims), set()
    for dim, size in enumerate(table):
        if dim in numbers.inserted_window_dims or dim in numbers.operand_batching_dims:
            continue
        at = next(windows)
        if updates[at] == size:
            given[at] = dim
            stays.add(dim)
        else:
            before[dim] = WHOLE
    sides = (tuple(before), tuple(index), tuple(given))
    # As with a lookup: rows come to the table, not the table's columns to the rows.
    made = Factors(sides, (tuple(before),), tuple(lengths), frozenset(reduced), granted=frozenset(stays))
    return Made(made, flops=float(math.prod(updates)), moved=(0.0, 1.0, 3.0, 0.0))
