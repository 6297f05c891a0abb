"""The specification of conv2d: a sum over the taps of the filter, in plain JAX at full precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def pads_of(size: tuple[int, int], window: tuple[int, int], strides: Any, padding: Any, dilation: Any) -> Any:
    """Zeros before and after the rows and the columns: ((top, bottom), (left, right)).

    >>> pads_of((5, 5), (3, 3), (1, 1), "SAME", (1, 1))
    ((1, 1), (1, 1))
    """
    if not isinstance(padding, str):
        return padding
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    return tuple((int(low), int(high)) for low, high in lax.padtype_to_pads(size, spans, strides, padding))


def convolve(x: Any, w: Any, *, strides: Any, padding: Any, dilation: Any, groups: int, precision: Any) -> Any:
    """JAX's own convolution in this op's words."""
    return lax.conv_general_dilated(
        x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=DIMENSIONS, feature_group_count=groups,
        precision=precision,
    )  # fmt: skip


def reference(
    inputs: jax.Array,
    filters: jax.Array,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: Any = "SAME",
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    precision: str | None = None,
) -> jax.Array:
    """y[n, i, j, o] = Σ over r, s, c of x[n, i·stride + r·dilation - top, ..., c] · w[r, s, c, o]; columns as rows.

    Outside of the image x is 0. With groups, output channel o sees the channels of its own group. Sums are in float32
    or wider, rounded once to the inputs' type. `precision` has no effect here: the specification is always exact to
    its working type.
    """
    wide = jnp.promote_types(jnp.float32, inputs.dtype)
    made = convolve(
        inputs.astype(wide), filters.astype(wide), strides=strides, padding=padding, dilation=dilation, groups=groups,
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    return made.astype(inputs.dtype)
