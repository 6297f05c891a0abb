"""conv2d by XLA (cuDNN on a GPU), by the taps, a sum of shifted matrix products, and by patches, one product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.conv.conv2d.reference import convolve
from capibara.kernels.ops.conv.conv2d.rules import sizes, sizes_of


def xla(
    inputs: jax.Array, filters: jax.Array, *, strides: Any, padding: Any, dilation: Any, groups: int,
    precision: str | None,
) -> jax.Array:  # fmt: skip
    """One convolution. 16-bit operands are added up in float32 by every backend and rounded once.

    No wider result is asked for: JAX could not transpose such a convolution.
    """
    return convolve(
        inputs, filters, strides=strides, padding=padding, dilation=dilation, groups=groups, precision=precision
    )


def direct(
    inputs: jax.Array, filters: jax.Array, *, strides: Any, padding: Any, dilation: Any, groups: int,
    precision: str | None,
) -> jax.Array:  # fmt: skip
    """For each tap the image, shifted, times that tap's matrix; the products are added in float32."""
    n = sizes(inputs, filters, strides=strides, padding=padding, dilation=dilation)
    padded = jnp.pad(inputs, ((0, 0), *n.pads, (0, 0)))
    wide = jnp.promote_types(jnp.float32, inputs.dtype)
    total = jnp.zeros((), wide)
    for r in range(n.window[0]):
        for s in range(n.window[1]):
            top, left = r * dilation[0], s * dilation[1]
            seen = padded[
                :,
                top : top + (n.out_rows - 1) * strides[0] + 1 : strides[0],
                left : left + (n.out_columns - 1) * strides[1] + 1 : strides[1],
            ]
            tap = filters[r, s]
            if groups == 1:
                made = lax.dot_general(
                    seen, tap, (((3,), (0,)), ((), ())), precision=precision, preferred_element_type=wide
                )
            else:
                made = jnp.einsum(
                    "nijgc,cgo->nijgo",
                    seen.reshape(*seen.shape[:3], groups, -1),
                    tap.reshape(tap.shape[0], groups, -1),
                    precision=precision,
                    preferred_element_type=wide,
                ).reshape(*seen.shape[:3], n.cout)
            total = total + made
    return total.astype(inputs.dtype)


def patches(
    inputs: jax.Array, filters: jax.Array, *, strides: Any, padding: Any, dilation: Any, groups: int,
    precision: str | None,
) -> jax.Array:  # fmt: skip
    """Windows that lie side by side, as the rows of one matrix product: each number of the image is in one of them."""
    n = sizes(inputs, filters, strides=strides, padding=padding, dilation=dilation)
    (high, wide), outputs = n.window, (n.out_rows, n.out_columns)
    # Zeros around the image; what no window reaches at its end is cut off.
    ends = [
        (low, count * size - length - low, 0)
        for (low, _), count, size, length in zip(n.pads, outputs, n.window, (n.rows, n.columns), strict=True)
    ]
    image = lax.pad(inputs, jnp.zeros((), inputs.dtype), ((0, 0, 0), *ends, (0, 0, 0)))
    cut = image.reshape(n.images, n.out_rows, high, n.out_columns, wide, n.cin).transpose(0, 1, 3, 2, 4, 5)
    depth = high * wide * n.cin
    beyond = -depth % ALIGNED  # cuBLAS's kernels for tensor cores read rows of whole 16 bytes
    rows = jnp.pad(cut.reshape(-1, depth), ((0, 0), (0, beyond)))
    weights = jnp.pad(filters.reshape(depth, n.cout), ((0, beyond), (0, 0)))
    made = lax.dot_general(rows, weights, (((1,), (0,)), ((), ())), precision=precision)
    return made.reshape(n.images, *outputs, n.cout)


def _refuses_patches(call: Call) -> str | None:
    window, p = call.need("filters").shape[:2], call.params
    if p["strides"] != tuple(window):
        return f"windows of {window[0]}x{window[1]} lie side by side at strides of as many, not {p['strides']}"
    if p["dilation"] != (1, 1) or p["groups"] != 1:
        return f"it is for no dilation and one group, not dilation={p['dilation']} and groups={p['groups']}"
    return None


def _patches_ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200 2 to 9 times cuDNN's speed with 3 and 16 channels, and with gradients 2 to 370 times; with 96 channels
    0.88, with gradients 1.35."""
    n = sizes_of(call)
    return ("xla",) if call.target.platform == "gpu" and n.window != (1, 1) and n.cin <= FEW_CHANNELS else ()


def _refuses_direct(call: Call) -> str | None:
    taps = call.need("filters").shape[:2]
    if taps[0] * taps[1] > MOST_TAPS:
        return f"it writes out a product for each tap, for up to {MOST_TAPS} of them, not {taps[0]}x{taps[1]}"
    return None


MOST_TAPS = 49
ALIGNED = 8
FEW_CHANNELS = 32
IMPLEMENTATION = Implementation("xla", xla)
PATCHES = Implementation("xla_patches", patches, refuses=_refuses_patches, ahead_of=_patches_ahead_of)
DIRECT = Implementation("xla_direct", direct, refuses=_refuses_direct)
