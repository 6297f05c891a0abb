"""A causal convolution with long filters, by transforms.

A filter is real, so two real signals go through it as one complex signal and come out apart: the transform, the
product and the transform back each carry two signals. The backward pass transforms again and keeps no spectrum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from capibara.errors import rule_error, unknown_name
from capibara.kernels.dispatch import run
from capibara.kernels.fft.api import FFT
from capibara.kernels.fft.filter.api import FFT_FILTER
from capibara.kernels.fft.plan import smooth_length
from capibara.kernels.fft.rules import PRECISIONS
from capibara.kernels.op import describe
from capibara.kernels.operands import as_array

Planes = tuple[jax.Array, jax.Array]


def fft_convolve(
    x: Float[Array, "B C T"], h: Float[Array, "C L"], *, precision: str = "float32"
) -> Float[Array, "B C T"]:
    """y[b, c, t] = sum over s of h[c, s] · x[b, c, t - s]: each channel with its own filter, causal, in x's type.

    The work is that of transforms of about T + L points, whatever L is.

    Args:
      x: [batch, channels, T].
      h: [channels, L]; taps beyond T reach no output.
      precision: of the transforms, "float32" or "bfloat16" (see `fft`); the products of spectra are float32.

    >>> jnp.rint(fft_convolve(jnp.array([[[1.0, 2.0, 3.0]]]), jnp.array([[1.0, 10.0]]))).tolist()
    [[[1.0, 12.0, 23.0]]]
    """
    x, h = as_array("fft_convolve", "x", x), as_array("fft_convolve", "h", h)
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    floats = all(jnp.issubdtype(a.dtype, jnp.floating) and a.dtype != jnp.dtype("float64") for a in (x, h))
    if x.ndim != 3 or h.ndim != 2 or h.shape[0] != x.shape[1] or h.shape[1] == 0 or not floats:
        raise rule_error(
            "fft_convolve takes x [batch, channels, T] and h [channels, L], floats of at most 32 bits",
            f"x={describe(x)}, h={describe(h)}", "give each channel one filter of one tap or more",
        )  # fmt: skip
    if x.size == 0:
        return x
    return _convolve(precision, x, h[:, : x.shape[2]])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(precision: str, x: jax.Array, h: jax.Array) -> jax.Array:
    batch, _, time = x.shape
    length = smooth_length(time + h.shape[1] - 1)
    made = run(FFT_FILTER, (*_paired(x), *_spectrum(_alone(h, length), precision)), {"precision": precision})
    return _apart(made, batch).astype(x.dtype)


def _forward(precision: str, x: jax.Array, h: jax.Array) -> tuple[jax.Array, Any]:
    return _convolve(precision, x, h), (x, h)


def _backward(precision: str, kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same with the conjugate spectra: of the filter for x, and of the signals, summed over the batch, for h."""
    x, h = kept
    batch, _, time = x.shape
    length = smooth_length(time + h.shape[1] - 1)
    spectra = _spectrum(_alone(h, length), precision)
    dx = run(FFT_FILTER, (*_paired(cotangent), *spectra), {"precision": precision, "conjugate": True})
    # Of a pair's product the two signals with themselves are the real part in time; with each other, the imaginary.
    (a, b), (c, d) = (_spectrum(_longer(_paired(signals), length), precision) for signals in (cotangent, x))
    crossed = ((a * c + b * d).sum(0), (b * c - a * d).sum(0))
    dh, _ = run(FFT, crossed, {"precision": precision, "inverse": True})
    return _apart(dx, batch).astype(x.dtype), dh[:, : h.shape[1]].astype(h.dtype)


_convolve.defvjp(_forward, _backward)


def _paired(x: jax.Array) -> Planes:
    """The batch's first half as the real plane and its second as the imaginary one; an odd one out is alone."""
    x = jnp.pad(x.astype(jnp.float32), ((0, x.shape[0] % 2), (0, 0), (0, 0)))
    half = x.shape[0] // 2
    return x[:half], x[half:]


def _apart(planes: Planes, batch: int) -> jax.Array:
    return jnp.concatenate(planes)[:batch]


def _longer(planes: Planes, length: int) -> Planes:
    real, imag = (jnp.pad(plane, ((0, 0), (0, 0), (0, length - plane.shape[2]))) for plane in planes)
    return real, imag


def _alone(h: jax.Array, length: int) -> Planes:
    wide = jnp.pad(h.astype(jnp.float32), ((0, 0), (0, length - h.shape[1])))
    return wide, jnp.zeros_like(wide)


def _spectrum(planes: Planes, precision: str) -> Planes:
    return run(FFT, planes, {"precision": precision})
