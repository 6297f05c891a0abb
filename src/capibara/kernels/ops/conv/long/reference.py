"""A long causal convolution by Fourier transforms, in plain JAX: the specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide_type(x: Any) -> Any:
    """What is computed in: float32, or wider where x is."""
    return jnp.promote_types(jnp.float32, x.dtype)


def by_transforms(x: jax.Array, h: jax.Array, length: int) -> jax.Array:
    """x [batch, time, channels] with h [taps, channels] by transforms of `length` points, in the wide type."""
    wide = wide_type(x)
    spectrum = jnp.fft.rfft(x.astype(wide), length, axis=1) * jnp.fft.rfft(h.astype(wide), length, axis=0)
    return jnp.fft.irfft(spectrum, length, axis=1)[:, : x.shape[1]]


def reference(x: jax.Array, h: jax.Array, *, precision: str | None = None) -> jax.Array:
    """y[b, t, c] = Σ over s of h[s, c] · x[b, t - s, c], rounded to x's type; before its first input x is 0.

    The sum is the product of spectra of time + taps - 1 points, where nothing wraps around. `precision` has no effect
    here: the specification is always exact to its working type.
    """
    taps = h[: x.shape[1]]
    if 0 in (*x.shape, *h.shape):
        return jnp.zeros_like(x)
    return by_transforms(x, taps, x.shape[1] + taps.shape[0] - 1).astype(x.dtype)
