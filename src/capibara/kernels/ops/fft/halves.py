"""Convolutions of real signals by complex transforms forward, of half as many points.

XLA's transform back to real numbers takes three passes on a GPU: cuFFT overwrites what it transforms, which XLA copies
before, and scales the result after. A complex transform forward needs neither. So the even and the odd points of a
signal are the real and the imaginary parts of one of half its length; a product of two such spectra is made of them and
of their mirror images, in one pass, and comes back by a transform forward of its conjugate.

With E and O the spectra of the even and the odd points, both of real numbers, and w[k] = exp(-2πi k / points), the
convolution of two signals has the even points E E' + w O O' and the odd points E O' + O E'. Signals do not mix: what is
packed into one complex number is of one of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.varying import vary_alike
from capibara.kernels.ops.fft.api import FFT
from capibara.kernels.ops.fft.plan import smooth_length
from capibara.kernels.ops.fft.twiddles import roots


def convolve(x: jax.Array, h: jax.Array, axis: int) -> jax.Array:
    """Each signal of x [batch, ...] with its filter, h [...], along h's axis: y[t] = Σ over s of h[s] · x[t - s], of
    x's length. In float32, whatever the types are. The backward pass keeps both spectra."""
    # Outside of the gradient's rule: inside shard_map the filter's gradient is then summed over the axes that split x,
    # and on a mesh each gradient goes back to where its operand lies.
    return _convolve(axis, *_placed_alike(*vary_alike((x.astype(jnp.float32), h.astype(jnp.float32)))))


def _placed_alike(x: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """On a mesh whose axes are of type Explicit, both in one place along the axes that they have alike: a product's
    gradients are of its type, and have to be of the operands'."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return x, h
    batch, *signals = jax.typeof(x).sharding.spec
    taken = {name for names in (batch, *signals) for name in _names(names)}
    filters = [None if taken.intersection(_names(names)) else names for names in jax.typeof(h).sharding.spec]
    shared = [own or filters[n] for n, own in enumerate(signals)]
    return jax.sharding.reshard(x, P(batch, *shared)), jax.sharding.reshard(h, P(*shared))


def _names(names: Any) -> tuple[str, ...]:
    """Of the mesh axes that an array's axis is split over."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(axis: int, x: jax.Array, h: jax.Array) -> jax.Array:
    return _forward(axis, x, h)[0]


def _forward(axis: int, x: jax.Array, h: jax.Array) -> tuple[jax.Array, Any]:
    points = smooth_length(-(-(x.shape[axis + 1] + h.shape[axis] - 1) // 2))
    signals, filters = spectra(x, points, axis + 1), spectra(h, points, axis)
    y = points_of(product(signals, filters), x.shape[axis + 1], axis + 1)
    return y, (signals, filters, np.zeros((h.shape[axis], 0)))


def _backward(axis: int, kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """By the filters backwards for x, and for h by the signals backwards, summed over the batch."""
    signals, filters, taps = kept
    flow = spectra(cotangent, signals.shape[-1], axis + 1)
    dx = points_of(product(flow, filters, backwards=True), cotangent.shape[axis + 1], axis + 1)
    return dx, points_of(product(flow, signals, backwards=True).sum(0), taps.shape[0], axis)


_convolve.defvjp(_forward, _backward)


def spectra(x: jax.Array, points: int, axis: int) -> jax.Array:
    """[..., points], complex: of real signals along `axis`, 2 * points of them or less, each with its odd points as
    imaginary parts."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    room = [(0, 0)] * x.ndim
    room[axis] = (0, 2 * points - x.shape[axis])
    pairs = jnp.pad(x, room).reshape(*before, points, 2, *after)
    # The last axis before they are put together: one pass then pads, turns and packs.
    even, odd = (jnp.moveaxis(lax.index_in_dim(pairs, n, axis + 1, keepdims=False), axis, -1) for n in (0, 1))
    return lax.complex(*run(FFT, (even, odd), {}))


def points_of(spectrum: jax.Array, time: int, axis: int) -> jax.Array:
    """The first `time` points of the signals whose packed spectra these are, along `axis`."""
    points = spectrum.shape[-1]
    # Back by a transform forward: of the conjugate, which comes out conjugate.
    even, odd = run(FFT, (spectrum.real * (1 / points), spectrum.imag * (-1 / points)), {})
    pairs = jnp.stack([even, -odd], -1)[..., : -(-time // 2), :]
    pairs = jnp.moveaxis(pairs, (-2, -1), (axis, axis + 1))
    y = pairs.reshape(*pairs.shape[:axis], -1, *pairs.shape[axis + 2 :])
    return lax.slice_in_dim(y, 0, time, axis=axis)


def product(signals: jax.Array, filters: jax.Array, *, backwards: bool = False) -> jax.Array:
    """The packed spectrum of signals convolved with filters, or with filters whose time goes backwards."""
    points = signals.shape[-1]
    turn = _turn(points)
    mirrored, filters_mirrored = _mirror(signals), _mirror(filters)
    even, odd = 0.5 * (filters + filters_mirrored), -0.5j * (filters - filters_mirrored)
    if backwards:
        # Tap -s in place of s: conjugate spectra, and an odd tap comes a pair earlier.
        even, odd, turn = jnp.conj(even), jnp.conj(odd), np.conj(turn)
        return signals * even + 0.5j * ((turn - 1) * signals + (turn + 1) * mirrored) * odd
    return signals * even + 0.5j * ((1 - turn) * signals + (1 + turn) * mirrored) * odd


def _mirror(spectrum: jax.Array) -> jax.Array:
    """The conjugate at -k: of the spectrum of a packed signal, the spectrum of its conjugate."""
    # Not by a roll: XLA makes the parts that it puts together a pass of their own, where this is read in the product's.
    shift = [(0, 0, 0)] * (spectrum.ndim - 1) + [(1, -1, 0)]
    rest = lax.pad(spectrum[..., ::-1], jnp.zeros((), spectrum.dtype), shift)
    return jnp.conj(jnp.where(lax.iota("int32", spectrum.shape[-1]) == 0, spectrum[..., :1], rest))


@functools.lru_cache(maxsize=16)
def _turn(points: int) -> np.ndarray[Any, Any]:
    real, imag = roots(points, np.arange(points), False)
    return (real + 1j * imag).astype(np.complex64)
