"""conv2d by XLA (cuDNN on a GPU), and by the taps: a sum of shifted matrix products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.conv.conv2d.reference import convolve
from capibara.kernels.ops.conv.conv2d.rules import sizes


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


def _refuses_direct(call: Call) -> str | None:
    taps = call.need("filters").shape[:2]
    if taps[0] * taps[1] > MOST_TAPS:
        return f"it writes out a product for each tap, for up to {MOST_TAPS} of them, not {taps[0]}x{taps[1]}"
    return None


MOST_TAPS = 49
IMPLEMENTATION = Implementation("xla", xla)
DIRECT = Implementation("xla_direct", direct, refuses=_refuses_direct)
