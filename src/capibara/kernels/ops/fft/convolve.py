"""A causal convolution with long filters, by transforms.

In float32 each signal goes through real transforms of its own. In bfloat16, for which there are kernels, the work is
that of two ops; see `capibara.kernels.ops.fft.causal`. The backward pass transforms again and keeps no spectrum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.core.varying import vary_alike
from capibara.kernels.ops.fft.api import IRFFT, RFFT
from capibara.kernels.ops.fft.causal.api import CAUSAL_FILTER, CAUSAL_TAPS
from capibara.kernels.ops.fft.causal.rules import TYPES
from capibara.kernels.ops.fft.plan import smooth_length
from capibara.kernels.ops.fft.rules import PRECISIONS

Planes = tuple[jax.Array, jax.Array]


def fft_convolve(
    x: Float[Array, "B C T"], h: Float[Array, "C L"], *, precision: str = "float32"
) -> Float[Array, "B C T"]:
    """y[b, c, t] = sum over s of h[c, s] · x[b, c, t - s]: each channel with its own filter, causal, in x's type.

    The work is that of transforms of about T + L points, whatever L is.

    Args:
      x: [batch, channels, T].
      h: [channels, L]; taps beyond T reach no output.
      precision: of the transforms, "float32" or "bfloat16" (see `fft`); the products of spectra are float32. In
        bfloat16, elements b and b + ceil(batch / 2) of the batch may share a transform: each keeps its own relative
        error, whatever the other's size, but a NaN or an infinity in one spoils the other too.

    There is no forward-mode derivative; `long_conv` has one, by its "xla" and "reference" implementations.

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
    # Outside of the gradient's rule: inside shard_map the filter's gradient is then summed over the axes that split x.
    return _convolve(precision, *vary_alike((x, h[:, : x.shape[2]])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(precision: str, x: jax.Array, h: jax.Array) -> jax.Array:
    length = smooth_length(x.shape[2] + h.shape[1] - 1)
    if precision == "float32":
        return _back(_times(_half(x, length), _half(h, length)), length, x.shape[2]).astype(x.dtype)
    return run(CAUSAL_FILTER, _taken(x, h), {}).astype(x.dtype)


def _forward(precision: str, x: jax.Array, h: jax.Array) -> tuple[jax.Array, Any]:
    return _convolve(precision, x, h), (x, h)


def _backward(precision: str, kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same with the conjugate spectra: of the filter for x, and of the signals, summed over the batch, for h."""
    x, h = kept
    time, taps = x.shape[2], h.shape[1]
    length = smooth_length(time + taps - 1)
    if precision == "float32":
        flow = _half(cotangent, length)
        dx = _back(_times(flow, _conjugate(_half(h, length))), length, time)
        re, im = _times(flow, _conjugate(_half(x, length)))
        dh = _back((re.sum(0), im.sum(0)), length, taps)
    else:
        dx = run(CAUSAL_FILTER, _taken(cotangent, h), {"conjugate": True})
        dh = run(CAUSAL_TAPS, _taken(cotangent, x), {"taps": taps})
    return dx.astype(x.dtype), dh.astype(h.dtype)


_convolve.defvjp(_forward, _backward)


def _half(x: jax.Array, length: int) -> Planes:
    """Half the spectra of real signals, each by a transform of its own."""
    return run(RFFT, (_longer(x.astype(jnp.float32), length),), {})


def _back(spectra: Planes, length: int, kept: int) -> jax.Array:
    return run(IRFFT, spectra, {"n": length})[..., :kept]


def _times(left: Planes, right: Planes) -> Planes:
    """As complex numbers: where a transform makes such, taking them apart and putting them together cancels."""
    made = lax.complex(*left) * lax.complex(*right)
    return made.real, made.imag


def _conjugate(spectra: Planes) -> Planes:
    return spectra[0], -spectra[1]


def _taken(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """In types that the ops take: a float of another type may have numbers that bfloat16 has not."""
    return tuple(x if x.dtype in TYPES else x.astype(jnp.float32) for x in arrays)


def _longer(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])
