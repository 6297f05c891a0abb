"""Rows as kernels see them: groups, within which rows are counted evenly and share a seed.

A row's number is then where its group begins plus its place in the group times a stride, which a kernel works out from
four scalars a group.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.ops.layers.activation.masking import Strides, row_major


class Fold(NamedTuple):
    """Leading axes as groups of rows: the groups' own axes and strides, and a group's rows and their stride."""

    lead: tuple[int, ...]
    steps: Strides
    rows: int
    stride: int

    @property
    def groups(self) -> int:
        return math.prod(self.lead)

    def begins(self) -> jax.Array:
        """The first row of each group: drawn by iota, since a kernel's wrapper may hold no constant arrays."""
        first = jnp.zeros(self.lead, jnp.int32)
        for axis, step in enumerate(self.steps):
            first = first + lax.broadcasted_iota(jnp.int32, self.lead, axis) * word(step)
        return first.reshape(-1)


def word(number: int) -> np.int32:
    """A whole number modulo 2^32."""
    return np.uint32(number & 0xFFFFFFFF).view(np.int32)


def fold(lead: tuple[int, ...], strides: Strides | None, own_seeds: bool) -> Fold:
    """The fewest groups within which rows are counted evenly; `own_seeds` keeps the first axis apart.

    >>> fold((4, 3), None, False)
    Fold(lead=(), steps=(), rows=12, stride=1)
    >>> fold((2, 3), (0, 1), False)
    Fold(lead=(2,), steps=(0,), rows=3, stride=1)
    """
    strides = row_major(lead) if strides is None else strides
    inner, rows, stride = len(lead), 1, 1
    first = 1 if own_seeds else 0
    while inner > first and (inner == len(lead) or strides[inner - 1] == stride * rows):
        inner -= 1
        if inner == len(lead) - 1:
            stride = strides[inner]
        rows *= lead[inner]
    return Fold(lead[:inner], strides[:inner], rows, stride)


def fold_rows(lead: tuple[int, ...], seed: Any, strides: Strides | None) -> Fold:
    """`fold` for a seed, or its shape; without one nothing is counted, and all rows are one group."""
    return Fold((), (), math.prod(lead), 1) if seed is None else fold(lead, strides, len(seed.shape) == 2)


def group_scalars(found: Fold, seed: Any, offsets: Any) -> jax.Array:
    """Two words of the seed, the first row and the first column, for each group: i32[4 · groups]."""
    groups = found.groups
    words = jnp.zeros((groups, 2), jnp.int32)
    if seed is not None:
        own = lax.bitcast_convert_type(seed, jnp.int32)
        # Groups are counted row-major, so a seed's groups are neighbours.
        words = jnp.repeat(own.reshape(-1, 2), groups // max(own.size // 2, 1), axis=0)
    row, column = (jnp.int32(0), jnp.int32(0)) if offsets is None else (offsets[0], offsets[1])
    places = [(found.begins() + row)[:, None], jnp.broadcast_to(column, (groups, 1))]
    return jnp.concatenate([words, *places], 1).reshape(-1)
