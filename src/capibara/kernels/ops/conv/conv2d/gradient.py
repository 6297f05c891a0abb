"""How conv2d is differentiated, batched and split over a mesh.

The inputs' gradient of a convolution of stride 1 is a convolution again, of the cotangent with the filters turned
around; other strides, groups and the filters' gradient are JAX's own transposes (cuDNN's on a GPU).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Partition, Prefer
from capibara.kernels.ops.conv.conv2d.reference import convolve
from capibara.kernels.ops.conv.conv2d.rules import sizes

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    return run(op, arrays, params, prefer=prefer), arrays


def backward(op: Op, arrays: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    """The cotangents of (inputs, filters)."""
    x, w = arrays
    plain = {name: params[name] for name in ("strides", "padding", "dilation", "groups", "precision")}
    _, of_filters = jax.vjp(lambda w: convolve(x, w, **plain), w)
    (dw,) = of_filters(cotangent)
    n = sizes(x, w, strides=params["strides"], padding=params["padding"], dilation=params["dilation"])
    spans = [(k - 1) * d for k, d in zip(n.window, params["dilation"], strict=True)]
    around = tuple((span - low, span - high) for span, (low, high) in zip(spans, n.pads, strict=True))
    turns = params["strides"] == (1, 1) and params["groups"] == 1 and min(min(pair) for pair in around) >= 0
    if turns:
        turned = jnp.swapaxes(w[::-1, ::-1], 2, 3)
        return run(op, (cotangent, turned), params | {"padding": around}, prefer=prefer), dw
    _, of_inputs = jax.vjp(lambda x: convolve(x, w, **plain), x)
    return of_inputs(cotangent)[0], dw


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: with one set of filters it is more images, else one element after another."""
    x, w = arrays
    if batched[1]:
        return one_by_one(op, batched, arrays, params, prefer)
    made = run(op, (x.reshape(size * x.shape[1], *x.shape[2:]), w), params, prefer=prefer)
    return made.reshape(size, x.shape[1], *made.shape[1:])


# Images and output channels are split freely; rows, columns, taps and input channels are whole on every device.
PARTITION = Partition(
    lambda call: "n h w c, r s c o -> n i j o",
    replicated=lambda call: ("h", "w", "c", "r", "s", "i", "j"),
    logical={"n": "batch", "o": "mlp"},
)
