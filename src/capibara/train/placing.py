"""Batches on a mesh: which rows of them this process reads, and each array where the layout puts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from capibara.errors import rule_error
from capibara.processes import process_count

__all__ = ["copied", "place", "rows_and_length", "share_of"]


def rows_and_length(batch: Any) -> tuple[int, int]:
    """Of a batch of ids its rows and their tokens; of any other its rows, and 1."""
    rows = int(jax.tree.leaves(batch)[0].shape[0])
    ids = batch.get("inputs") if isinstance(batch, Mapping) else None
    if ids is None or len(ids.shape) != 2 or not np.issubdtype(ids.dtype, np.integer):
        return rows, 1
    return rows, int(ids.shape[1])


def copied(x: Any, wanted: Any) -> jax.Array:
    """A copy where the step wants it, since the step takes its memory over, and this may be the caller's own array.

    Copied first: what is only moved may share memory where it already lies on one of the devices.
    """
    return jax.device_put(jax.numpy.array(x, wanted.dtype, copy=True), wanted.sharding, may_alias=False)


def share_of(batch: Any) -> tuple[int, int]:
    """(i, n): of a batch of these shapes in n equal parts this process's devices read from the i-th alone.

    Which rows lie where is the layout's choice: along a model axis over processes each of them has all rows, and
    the devices of a mesh need not be in the order of processes.
    """
    inputs = jax.tree.leaves(batch)[0]  # all arrays of a batch have their rows in one order
    rows = inputs.shape[0]
    spans = [index[0].indices(rows) for index in inputs.sharding.addressable_devices_indices_map(inputs.shape).values()]
    first, last = min(start for start, *_ in spans), max(stop for _, stop, _ in spans) - 1
    for count in range(process_count(), 1, -1):
        if rows % count == 0 and first // (rows // count) == last // (rows // count):
            return first // (rows // count), count
    return 0, 1


def place(batch: Any, wanted: Any, share: tuple[int, int] = (0, 1)) -> Any:
    """A batch, or the part of it that `share` says, as arrays over all devices, where `wanted` has them."""
    here: Any = jax.tree.structure(batch)  # jax's stubs do not compare it
    if here != jax.tree.structure(wanted):
        raise rule_error(
            "Every batch has the same arrays",
            f"{here}, the first {jax.tree.structure(wanted)}",
            "give each all of them",
        )
    return jax.tree.map(lambda x, shape: _placed(np.asarray(x), shape, share), batch, wanted)


def _placed(rows: np.ndarray, wanted: Any, share: tuple[int, int]) -> jax.Array:
    number, parts = share
    expected = (wanted.shape[0] // parts, *wanted.shape[1:])
    if rows.shape != expected:
        raise rule_error(
            "Every batch has the first one's shape",
            f"{list(rows.shape)}, the first {list(expected)}",
            "pad it, or drop the last one",
        )
    rows = rows.astype(wanted.dtype)
    if process_count() == 1:
        return jax.device_put(rows, wanted.sharding)
    before = number * expected[0]

    def part(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(wanted.shape[0])
        return rows[(slice(first - before, last - before), *index[1:])]

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)
