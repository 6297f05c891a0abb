"""Gradient buckets: many leaves joined into few flat arrays, one collective for each.

A collective on a small array takes as long as its latency. Leaves are joined by type, in reverse order, for a backward
pass makes the last layers' gradients first: the first bucket can travel while the others are still being computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.errors import rule_error
from capibara.kernels.core.operands import as_array
from capibara.kernels.ops.collective.axes import AxisName, Tree, check_reducible, read_axes, read_reduction
from capibara.kernels.ops.collective.reference import all_reduce

# Large beside the latency of a ring of 32 (tens of microseconds; a 45 GB/s link moves 32 MiB in 0.7 ms), small beside
# a model's gradients, so that there is something to overlap.
BUCKET_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one type that travel together: which they are, where each starts, and how many values that makes."""

    dtype: np.dtype[Any]
    members: tuple[int, ...]
    starts: tuple[int, ...]
    length: int


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Which leaves of a tree go into which bucket, from shapes and types alone."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]
    buckets: tuple[Bucket, ...]

    def flatten(self, tree: Any, dtype: Any = None) -> list[jax.Array]:
        """The buckets as flat arrays, in their own type or in `dtype`; what is between two leaves is zero."""
        leaves = jax.tree.leaves(tree)
        return [self._joined(bucket, leaves, dtype or bucket.dtype) for bucket in self.buckets]

    def _joined(self, bucket: Bucket, leaves: list[Any], dtype: Any) -> jax.Array:
        parts = []
        ends = (*bucket.starts[1:], bucket.length)
        for member, start, end in zip(bucket.members, bucket.starts, ends, strict=True):
            flat = jnp.asarray(leaves[member]).reshape(-1).astype(dtype)
            parts.append(jnp.pad(flat, (0, end - start - flat.size)) if flat.size < end - start else flat)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def restore(self, arrays: Sequence[Any], dtype: Any = None) -> Any:
        """The tree whose buckets these are; leaves have their own types, or `dtype`."""
        leaves: list[Any] = [None] * len(self.shapes)
        for bucket, array in zip(self.buckets, arrays, strict=True):
            for member, start in zip(bucket.members, bucket.starts, strict=True):
                shape = self.shapes[member]
                part = lax.slice(array, (start,), (start + math.prod(shape),))
                leaves[member] = part.reshape(shape).astype(dtype or self.dtypes[member])
        return jax.tree.unflatten(self.tree, leaves)


def plan_buckets(tree: Any, bucket_bytes: int = BUCKET_BYTES, *, align: int = 1) -> BucketPlan:
    """Group the leaves by type, the last first, into buckets of up to `bucket_bytes`; a larger leaf has its own.

    Buckets are in the order in which a backward pass completes them. Every leaf starts at a multiple of `align` values.
    Leaves are arrays or ShapeDtypeStructs.

    >>> shapes = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(5, jnp.bfloat16), "c": jnp.zeros(4)}
    >>> [(bucket.dtype.name, bucket.members, bucket.length) for bucket in plan_buckets(shapes).buckets]
    [('bfloat16', (1,), 5), ('float32', (2, 0), 10)]
    """
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise rule_error("bucket_bytes is a positive whole number", repr(bucket_bytes), f"use {BUCKET_BYTES}")
    leaves, structure = jax.tree.flatten(tree)
    leaves = [x if hasattr(x, "dtype") and hasattr(x, "shape") else as_array("buckets", "a leaf", x) for x in leaves]
    shapes = tuple(tuple(x.shape) for x in leaves)
    dtypes = tuple(jnp.dtype(x.dtype) for x in leaves)
    done: list[tuple[int, Bucket]] = []  # with the leaf that completed it, the order in which they can start
    open_: dict[Any, Bucket] = {}
    for number in reversed(range(len(leaves))):
        dtype, size = dtypes[number], math.prod(shapes[number])
        room = -(-size // align) * align
        bucket = open_.pop(dtype, None)
        if bucket is not None and (bucket.length + room) * dtype.itemsize > bucket_bytes:
            done.append((bucket.members[-1], bucket))
            bucket = None
        if bucket is None:
            open_[dtype] = Bucket(dtype, (number,), (0,), room)
        else:
            open_[dtype] = Bucket(
                dtype, (*bucket.members, number), (*bucket.starts, bucket.length), bucket.length + room
            )
    done += [(bucket.members[-1], bucket) for bucket in open_.values()]
    ordered = tuple(bucket for _, bucket in sorted(done, key=lambda made: -made[0]))
    return BucketPlan(structure, shapes, dtypes, ordered)


def bucketed(
    tree: Tree, bucket_bytes: int = BUCKET_BYTES
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], Tree]]:
    """The leaves of a tree as flat buckets, and the function that makes the tree of them again, bit for bit.

    >>> buckets, restore = bucketed({"w": jnp.ones((2, 3)), "b": jnp.zeros(4), "n": jnp.arange(3)}, bucket_bytes=32)
    >>> [(x.dtype.name, x.shape) for x in buckets]
    [('float32', (6,)), ('int32', (3,)), ('float32', (4,))]
    >>> restore(buckets)["w"].shape
    (2, 3)
    """
    plan = plan_buckets(tree, bucket_bytes)
    return plan.flatten(tree), plan.restore


def one_after_another(arrays: Sequence[Any], run: Callable[[Any], Any], overlap: bool) -> list[Any]:
    """`run` of every array. Without `overlap` each one starts when the one before it is finished.

    The compiler may move and join collectives that do not hang on each other. A barrier makes the next operand hang on
    the last result, so that nothing is sent before it has arrived.
    """
    made: list[Any] = []
    for array in arrays:
        if made and not overlap:
            array, made[-1] = _barrier((array, made[-1]))
        made.append(run(array))
    return made


def _barrier(arrays: Any) -> Any:
    """An optimization barrier that keeps what shard_map knows of each array.

    JAX before 0.12 marks all that comes out as varying over what any of it varies over: a sum that is the same on
    every device would no longer be known to be. There the barrier is made without those marks, and they stay as they
    were.
    Both results must be used: a compiler drops an operand of a barrier whose result is not.
    """
    if jax.__version_info__ >= (0, 12):
        return lax.optimization_barrier(arrays)
    from jax._src.config import _check_vma

    with _check_vma(False):
        return lax.optimization_barrier(arrays)


def bucketed_all_reduce(
    tree: Tree, axis_name: AxisName, *, op: str = "sum", bucket_bytes: int = BUCKET_BYTES, overlap: bool = True
) -> Tree:
    """The sum (mean, max, min) over the devices of every leaf, by one collective a bucket, inside shard_map.

    Args:
      tree: arrays of any types; each is reduced in its own.
      axis_name: a mesh axis of shard_map, or several.
      op: "sum", "mean", "max" or "min". A mean takes floats.
      bucket_bytes: leaves of one type are joined up to this.
      overlap: the buckets do not wait for each other, so that the compiler can run them beside the backward pass that
        makes the next one. Off, they go one after another.
    """
    op = read_reduction(op)
    names, devices = read_axes("bucketed_all_reduce", axis_name, on_global=False)
    plan = plan_buckets(tree, bucket_bytes)
    for bucket in plan.buckets:
        check_reducible("bucketed_all_reduce", jax.ShapeDtypeStruct(plan.shapes[bucket.members[0]], bucket.dtype), op)

    def reduce(array: Any) -> Any:
        return all_reduce(array, axis_name=names, devices=devices, op=op)

    return plan.restore(one_after_another(plan.flatten(tree), reduce, overlap))
