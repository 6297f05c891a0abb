"""Images in square tiles: [b, h, w, c] as [b, h/block, w/block, block, block, c] and back.

A tile is contiguous in the tiled form, so that a kernel that walks over tiles reads each in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from capibara.errors import rule_error
from capibara.kernels.core.operands import as_array

BLOCK = 128
"""Rows and columns of a TPU's matrix unit."""


def tile_layout(x: Shaped[Array, "b h w c"], block: int = BLOCK) -> Shaped[Array, "b I J block block c"]:
    """Cut the two middle axes into tiles; what does not divide is filled up with zeros.

    >>> tile_layout(jnp.ones((2, 200, 128, 3))).shape
    (2, 2, 1, 128, 128, 3)
    """
    x = as_array("tile_layout", "x", x)
    _check_block(block)
    if x.ndim != 4:
        raise rule_error("tile_layout takes [batch, height, width, channels]", f"{x.ndim} axes {x.shape}", "reshape it")
    batch, height, width, channels = x.shape
    rows, columns = -(-height // block), -(-width // block)
    padded = jnp.pad(x, ((0, 0), (0, rows * block - height), (0, columns * block - width), (0, 0)))
    split = padded.reshape(batch, rows, block, columns, block, channels)
    return split.transpose(0, 1, 3, 2, 4, 5)


def untile_layout(tiled: Shaped[Array, "b I J block block c"], shape: Sequence[int]) -> Shaped[Array, "b h w c"]:
    """The array of this shape that `tile_layout` made the tiles of; what was filled up is cut off.

    >>> x = jnp.arange(24.0).reshape(1, 3, 4, 2)
    >>> bool((untile_layout(tile_layout(x, block=2), x.shape) == x).all())
    True
    """
    tiled = jnp.asarray(tiled)
    shape = tuple(shape)
    if tiled.ndim != 6 or tiled.shape[3] != tiled.shape[4]:
        raise rule_error(
            "untile_layout takes [batch, rows, columns, block, block, channels]",
            tiled.shape,
            "pass tile_layout's result",
        )
    if len(shape) != 4:
        raise rule_error("The shape is (batch, height, width, channels)", shape, "pass the shape before tiling")
    batch, rows, columns, block, _, channels = tiled.shape
    _check_block(block)
    expected = (shape[0], -(-shape[1] // block), -(-shape[2] // block), block, block, shape[3])
    if tiled.shape != expected:
        raise rule_error(
            f"An array of shape {shape} has tiles of shape {expected} at block {block}",
            tiled.shape,
            "pass the shape that the array had before tiling",
        )
    whole = tiled.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * block, columns * block, channels)
    return jax.lax.slice(whole, (0, 0, 0, 0), shape)


def _check_block(block: object) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise rule_error("block is a positive whole number", repr(block), f"use {BLOCK}")
