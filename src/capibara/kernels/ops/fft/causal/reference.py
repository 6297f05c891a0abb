"""Long causal filters in plain JAX: the specification of the ops."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def reference(x: jax.Array, h: jax.Array, *, conjugate: bool = False) -> jax.Array:
    """y[b, c, t] = Σ over s of h[c, s] · x[b, c, t - s], and x[b, c, t + s] where `conjugate`; x is 0 beyond its ends.

    In x's type. An implementation may round what it multiplies to bfloat16.
    """
    time, length = x.shape[-1], x.shape[-1] + h.shape[-1] - 1
    there, filters = _spectra(x, length), _spectra(h, length)
    made = jnp.fft.irfft(there * (filters.conj() if conjugate else filters), length)[..., :time]
    return made.astype(x.dtype)


def reference_taps(flow: jax.Array, x: jax.Array, *, taps: int) -> jax.Array:
    """The gradient for the filters: dh[c, s] = Σ over b and t of flow[b, c, t] · x[b, c, t - s], for s below `taps`.

    In float32, whatever the operands' types.
    """
    length = 2 * x.shape[-1] - 1
    crossed = _spectra(flow, length) * _spectra(x, length).conj()
    return jnp.fft.irfft(crossed.sum(0), length)[..., :taps]


def _spectra(x: jax.Array, length: int) -> jax.Array:
    return jnp.fft.rfft(x.astype(jnp.promote_types(x.dtype, jnp.float32)), length)
