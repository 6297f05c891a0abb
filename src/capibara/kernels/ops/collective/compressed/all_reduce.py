"""An all-reduce that sends int8 codes: about a quarter of the bytes of float32.

Two phases, as in any bandwidth-optimal all-reduce. Every device encodes its numbers and sends each other device that
one's share (all-to-all); it decodes what arrives and adds it up in float32. It encodes its share of the sum, and all
gather all shares. A number is rounded twice, however many devices there are; every device decodes the same codes, so
the result is the same bits everywhere.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import rule_error
from capibara.kernels.ops.collective.axes import (
    AxisName,
    Tree,
    gather_known,
    read_axes,
    read_reduction,
    vary_over,
)
from capibara.kernels.ops.collective.buckets import BUCKET_BYTES, one_after_another, plan_buckets
from capibara.kernels.ops.collective.compressed.codec import Encoded, decode_int8, encode_int8, seed_of
from capibara.kernels.ops.collective.compressed.feedback import check_state
from capibara.kernels.ops.collective.compressed.rules import check_block, check_compressible, check_sum
from capibara.kernels.ops.collective.compressed.tpu.codec import LANES

WHO = "compressed_all_reduce"
REGISTER = 8 * LANES  # numbers of a TPU's vector register


class Metrics(NamedTuple):
    """What compression did to this all-reduce: the same numbers on every device."""

    non_finite: jax.Array
    """Values that were NaN or infinite when they were encoded, on all devices, and in the sum."""
    unsent: jax.Array
    """Norm of what was not sent over the norm of what should have been; all devices together."""


class _Way(NamedTuple):
    """What all buckets of a call have in common."""

    outer: tuple[str, ...]
    devices: int
    inner: tuple[str, ...]
    inner_devices: int
    block: int


class _Reduced(NamedTuple):
    total: jax.Array
    kept: jax.Array
    non_finite: jax.Array
    squares: jax.Array  # of what was not sent, and of what should have been


@overload
def compressed_all_reduce(
    tree: Tree, axis_name: AxisName, *, op: str = "sum", block_size: int = 256, state: Tree | None = None,
    key: Any = None, inner_axis_name: AxisName | None = None, bucket_bytes: int = BUCKET_BYTES, overlap: bool = True,
    return_metrics: Literal[False] = False,
) -> tuple[Tree, Tree | None]: ...  # fmt: skip


@overload
def compressed_all_reduce(
    tree: Tree, axis_name: AxisName, *, op: str = "sum", block_size: int = 256, state: Tree | None = None,
    key: Any = None, inner_axis_name: AxisName | None = None, bucket_bytes: int = BUCKET_BYTES, overlap: bool = True,
    return_metrics: Literal[True],
) -> tuple[Tree, Tree | None, Metrics]: ...  # fmt: skip


def compressed_all_reduce(
    tree: Tree,
    axis_name: AxisName,
    *,
    op: str = "sum",
    block_size: int = 256,
    state: Tree | None = None,
    key: Any = None,
    inner_axis_name: AxisName | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
    return_metrics: bool = False,
) -> tuple[Tree, Tree | None] | tuple[Tree, Tree | None, Metrics]:
    """(the sum or mean over the devices of every leaf, the new state), sent as blockwise int8, inside shard_map.

    The error of an element is bounded by `error_bound`: 1/127 of the sum of its block's largest magnitudes on each
    device, twice that with `key`. With a state, what an all-reduce does not send is sent with the next. One
    device has nobody to send to, and nothing is rounded. A NaN or an infinity is a NaN in its place of the result.

    Args:
      tree: arrays of bfloat16, float16 or float32; the result has their types. Every leaf begins a block of its own.
      axis_name: the mesh axis, or axes, whose devices exchange codes.
      op: "sum" or "mean". A largest or smallest value is one of those given, which codes do not keep.
      block_size: values that share a scale.
      state: from `feedback_state` or the last call; None for no feedback, and None is returned.
      key: a JAX key, a new one each step: rounding at random, right on average. The devices may share the key;
        they draw differently.
      inner_axis_name: an axis of fast links. Its devices reduce exactly, in float32, and each then exchanges its part
        over `axis_name`, the slow links.
      bucket_bytes: leaves are joined into buckets of up to this many bytes of their own type.
      overlap: as in `bucketed_all_reduce`.
      return_metrics: return (tree, state, Metrics) instead.
    """
    op = read_reduction(op)
    check_sum(op)
    check_block(block_size)
    outer, devices = read_axes(WHO, axis_name, on_global=False)
    inner, inner_devices = (
        ((), 1) if inner_axis_name is None else read_axes(WHO, inner_axis_name, "inner_axis_name", on_global=False)
    )
    if set(inner) & set(outer):
        raise rule_error(
            "inner_axis_name and axis_name are different axes",
            (inner_axis_name, axis_name),
            "name the fast axis as inner_axis_name",
        )
    way = _Way(outer, devices, inner, inner_devices, block_size)
    plan = plan_buckets(tree, bucket_bytes, align=block_size)
    for shape, dtype in zip(plan.shapes, plan.dtypes, strict=True):
        check_compressible(jax.ShapeDtypeStruct(shape, dtype))
    buckets = [_constant(x) for x in plan.flatten(tree, jnp.float32)]
    if state is not None:
        check_state(state, tree)
        own = jax.tree.map(lambda kept: kept[0], state)
        buckets = [x + kept for x, kept in zip(buckets, plan.flatten(own, jnp.float32), strict=True)]

    keys = [None] * len(buckets)
    if key is not None:
        seed_of(key)  # which says what a key is, where this is none
        mine = jax.random.fold_in(key, lax.axis_index((*outer, *inner)))
        keys = list(jax.random.split(mine, max(len(buckets), 1)))[: len(buckets)]
    numbered = iter(keys)
    made = one_after_another(buckets, lambda x: _reduce(x, way, next(numbered)), overlap)

    total = devices * inner_devices
    sums = [one.total / total if op == "mean" else one.total for one in made]
    result = plan.restore(sums)
    kept_tree = None
    if state is not None:
        kept_tree = jax.tree.map(lambda kept: kept[None], plan.restore([one.kept for one in made], jnp.float32))
    if not return_metrics:
        return result, kept_tree
    squares = sum((one.squares for one in made), jnp.zeros(2))
    missing, whole = lax.psum(vary_over(squares, (*outer, *inner)), (*outer, *inner))
    counted = sum((one.non_finite for one in made), jnp.zeros((), jnp.int32))
    return result, kept_tree, Metrics(
        lax.psum(vary_over(counted, (*outer, *inner)), (*outer, *inner)),
        jnp.sqrt(missing / jnp.maximum(whole, jnp.finfo(jnp.float32).tiny)),
    )  # fmt: skip


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
    return x


@_constant.defjvp
def _no_derivative(*_: Any) -> Any:
    """Rounding's derivative is zero nearly everywhere: better none than one that is silently wrong."""
    raise rule_error(
        "A compressed all-reduce has no derivative: it is for gradients that are made already",
        "a call inside a function that is differentiated",
        "use all_reduce there, or call it on the result of jax.grad",
    )


def _reduce(x: jax.Array, way: _Way, key: Any) -> _Reduced:
    """One bucket, float32 [n]: its sum, and what this device did not send."""
    parts = way.devices * way.inner_devices
    count = x.size
    if not count:  # XLA scatters no empty array
        return _Reduced(jnp.zeros(0), jnp.zeros(0), jnp.zeros((), jnp.int32), jnp.zeros(2))
    x = vary_over(jnp.pad(x, (0, -count % _whole(count, parts, way.block))), (*way.outer, *way.inner))
    length = x.size
    if way.inner_devices > 1:
        x = lax.psum_scatter(x, way.inner, scatter_dimension=0, tiled=True)
    elif way.inner:
        x = lax.psum(x, way.inner)
    if way.devices > 1:
        total, kept, non_finite, squares = _exchange(x, way, key)
    else:
        total, kept, non_finite = lax.psum(x, way.outer), jnp.zeros_like(x), jnp.zeros((), jnp.int32)
        squares = jnp.stack([jnp.zeros(()), _square(x)])
    if way.inner_devices > 1:
        total = gather_known(total, way.inner)
        # What is kept belongs to this device's part: in the next sum over the inner axis it is there again, once.
        place = lax.axis_index(way.inner) * kept.size
        kept = lax.dynamic_update_slice(vary_over(jnp.zeros(length), (*way.outer, *way.inner)), kept, (place,))
    return _Reduced(total[:count], kept[:count], non_finite, squares)


def _whole(count: int, parts: int, block: int) -> int:
    """What a bucket is filled up to a multiple of: a block for each part, or whole registers where that is nothing."""
    in_registers = parts * math.lcm(block, REGISTER)
    return in_registers if block % LANES == 0 and count >= 100 * in_registers else parts * block


def _exchange(x: jax.Array, way: _Way, key: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Encode, exchange, add up, encode, gather; all over the outer axes."""
    first, second = (None, None) if key is None else jax.random.split(key)
    sent = encode_int8(x, block_size=way.block, key=first)
    got = Encoded(*(lax.all_to_all(_shares(part, way), way.outer, 0, 0, tiled=True).reshape(-1) for part in sent))
    mine = _shares(_decoded(got, way), way).sum(0).reshape(-1)
    summed = encode_int8(mine, block_size=way.block, key=second)
    gathered = (gather_known(part, way.outer) for part in summed)
    total = _decoded(Encoded(*gathered), way)

    lost = _shares(_lost(x, _decoded(sent, way)), way)
    lost_of_sum = _lost(mine, _decoded(summed, way))
    # The share that this device summed is its own to make good.
    kept = lost.at[lax.axis_index(way.outer)].add(lost_of_sum.reshape(lost.shape[1:])).reshape(-1)
    squares = jnp.stack([_square(kept), _square(x)])
    return total, kept, sent.non_finite + summed.non_finite, squares


def _shares(x: jax.Array, way: _Way) -> jax.Array:
    """A line of numbers, [devices, ...]: each device's share.

    In rows of 128 where it divides, for then nothing moves: a TPU keeps a line of numbers in that order, and a matrix
    of one row a device in another.
    """
    rows = (LANES,) if x.size % (way.devices * LANES) == 0 else ()
    return x.reshape(way.devices, -1, *rows)


def _decoded(encoded: Encoded, way: _Way) -> jax.Array:
    return decode_int8(*encoded, block_size=way.block)


def _lost(wanted: jax.Array, got: jax.Array) -> jax.Array:
    """The difference; nothing where it is not a number, or one NaN would stay in the state for ever."""
    lost = wanted - got
    return jnp.where(jnp.isfinite(lost), lost, 0.0)


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(jnp.where(jnp.isfinite(x), x, 0.0)).sum()
