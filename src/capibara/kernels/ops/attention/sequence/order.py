"""The order of a split sequence: contiguous, or zigzag, which gives every device an early and a late chunk.

Under a causal rule the work of a query grows with its position. Cut into 2n chunks, device i holds chunks i and
2n - 1 - i, and the sums are alike on all of the n devices.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error

A = TypeVar("A", jax.Array, np.ndarray)


def zigzag(x: A, devices: int, axis: int) -> A:
    """`x` with its chunks along `axis` in zigzag order for so many devices; numpy arrays stay numpy arrays.

    Split evenly, device i then holds chunks i and 2n - 1 - i. Positions (for rotary embeddings) are reordered alike:
    `zigzag(jnp.arange(length), n, 0)`.

    >>> zigzag(np.arange(8), 2, 0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    return _take_chunks(x, _chunk_order(devices), axis)


def unzigzag(x: A, devices: int, axis: int) -> A:
    """`x` back in the order it had before `zigzag`.

    >>> unzigzag(np.array([0, 1, 6, 7, 2, 3, 4, 5]), 2, 0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _take_chunks(x, np.argsort(_chunk_order(devices)), axis)


def _chunk_order(devices: int) -> np.ndarray:
    if isinstance(devices, bool) or not isinstance(devices, int | np.integer) or devices < 1:
        raise rule_error("zigzag is for 1 device or more", repr(devices), "pass the size of the mesh axis")
    early = np.arange(devices)
    return np.stack([early, 2 * devices - 1 - early], axis=1).reshape(-1)


def _take_chunks(x: A, order: np.ndarray, axis: int) -> A:
    if not -x.ndim <= axis < x.ndim:
        raise rule_error(f"The axis is one of the array's {x.ndim}", str(axis), "pass the axis of the length")
    axis %= x.ndim
    length, chunks = x.shape[axis], len(order)
    if length % chunks:
        raise rule_error(
            f"zigzag cuts the length into two chunks a device, here {chunks}",
            f"a length of {length}",
            f"pad to {-(-length // chunks) * chunks}",
        )
    cut = x.reshape(*x.shape[:axis], chunks, length // chunks, *x.shape[axis + 1 :])
    return cut.take(order, axis=axis).reshape(x.shape)


def to_zigzag(shards: Any, axis: str, devices: int) -> Any:
    """Contiguous shards to zigzag shards inside shard_map: each half travels once.

    Device d holds chunks 2d and 2d + 1. The even chunks go by one permutation of the devices, the odd ones by another.
    """
    even, odd = _routes(devices)
    early_is_even = jax.lax.axis_index(axis) % 2 == 0

    def exchange(x: jax.Array) -> jax.Array:
        dim = length_axis(x)
        first, second = jnp.split(x, 2, dim)
        first, second = jax.lax.ppermute(first, axis, even), jax.lax.ppermute(second, axis, odd)
        return jnp.where(early_is_even, jnp.concatenate([first, second], dim), jnp.concatenate([second, first], dim))

    return jax.tree.map(exchange, shards)


def from_zigzag(shards: Any, axis: str, devices: int) -> Any:
    """Zigzag shards to contiguous shards inside shard_map: what `to_zigzag` did, undone."""
    even, odd = ([(to, source) for source, to in route] for route in _routes(devices))
    early_is_even = jax.lax.axis_index(axis) % 2 == 0

    def exchange(x: jax.Array) -> jax.Array:
        dim = length_axis(x)
        early, late = jnp.split(x, 2, dim)
        first, second = jnp.where(early_is_even, early, late), jnp.where(early_is_even, late, early)
        return jnp.concatenate([jax.lax.ppermute(first, axis, even), jax.lax.ppermute(second, axis, odd)], dim)

    return jax.tree.map(exchange, shards)


def length_axis(x: jax.Array) -> int:
    """Of segments [batch, length], and of arrays [batch, heads, length, ...]."""
    return 1 if x.ndim == 2 else 2


def _routes(devices: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where each device sends its even chunk and its odd chunk."""

    def holder(chunk: int) -> int:
        return min(chunk, 2 * devices - 1 - chunk)

    return [(d, holder(2 * d)) for d in range(devices)], [(d, holder(2 * d + 1)) for d in range(devices)]
