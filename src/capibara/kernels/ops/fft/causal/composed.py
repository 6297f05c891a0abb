"""The filters by transforms in bfloat16, a product and a transform back: whatever dispatch chooses for each.

Two real signals go through a filter as one complex signal and come out apart: a filter is real, so nothing mixes them
but the roundings, and each is first brought to a size near 1, so that a large one does not round a small one away.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.fft.api import FFT
from capibara.kernels.ops.fft.filter.api import FFT_FILTER
from capibara.kernels.ops.fft.plan import smooth_length

Planes = tuple[jax.Array, jax.Array]


def composed(x: jax.Array, h: jax.Array, *, conjugate: bool) -> jax.Array:
    """Pairs of signals, each near 1 in size, through the filters in bfloat16, and back to their own size."""
    dtype, x, h = x.dtype, x.astype(jnp.float32), h.astype(jnp.float32)
    spectra = _whole((h, jnp.zeros_like(h)), smooth_length(x.shape[2] + h.shape[1] - 1))
    own, inverse = powers(x)
    params = {"precision": "bfloat16"} | ({"conjugate": True} if conjugate else {})
    made = run(FFT_FILTER, (*_paired(x * inverse), *spectra), params)
    return (jnp.concatenate(made)[: x.shape[0]] * own).astype(dtype)


def composed_taps(flow: jax.Array, x: jax.Array, *, taps: int) -> jax.Array:
    """The products of spectra, summed over the batch before the transform back.

    Of a pair's product the two signals with themselves are the real part in time; with each other, which may be far
    larger, the imaginary. What a signal of x is divided by its cotangent is multiplied by, so that each product is its
    own, and a pair's error that of its larger product.
    """
    flow, x = flow.astype(jnp.float32), x.astype(jnp.float32)
    length = smooth_length(x.shape[2] + taps - 1)
    own, inverse = powers(x)
    (a, b), (c, d) = (_whole(_paired(pairs), length) for pairs in (flow * own, x * inverse))
    crossed = ((a * c + b * d).sum(0), (b * c - a * d).sum(0))
    return run(FFT, crossed, {"precision": "bfloat16", "inverse": True})[0][:, :taps]


def powers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each signal the power of two at or below its largest magnitude, and its inverse: multiplying is exact.

    By the bits of the number, since an exponential may be rounded; both within the normal numbers.
    """
    peak = jnp.abs(x).max(-1, keepdims=True)
    exponent = jnp.clip(lax.bitcast_convert_type(peak, jnp.int32) >> 23, 1, 253)  # the bits after a sign of 0
    return _with_exponent(exponent), _with_exponent(254 - exponent)


def _with_exponent(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _paired(x: jax.Array) -> Planes:
    """The batch's first half as the real plane and its second as the imaginary one; an odd one out is alone."""
    x = jnp.pad(x, ((0, x.shape[0] % 2), (0, 0), (0, 0)))
    half = x.shape[0] // 2
    return x[:half], x[half:]


def _whole(planes: Planes, length: int) -> Planes:
    """The whole spectra of complex signals in bfloat16."""
    re, im = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])]) for x in planes)
    return run(FFT, (re, im), {"precision": "bfloat16"})


IMPLEMENTATION = Implementation("xla", composed)
TAPS = Implementation("xla", composed_taps)
