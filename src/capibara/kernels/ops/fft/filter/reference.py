"""The filter by spectra, in plain JAX: the specification of the op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def reference(
    re: jax.Array, im: jax.Array, h_re: jax.Array, h_im: jax.Array, *, conjugate: bool = False,
    precision: str = "float32",
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The first T numbers of ifft(fft(z, n) · H) as planes; z = re + i·im is [P, C, T] and H = h_re + i·h_im is [C, n].

    H is conjugated where asked. `precision` says how far an implementation may round.
    """
    del precision
    n, time = h_re.shape[-1], re.shape[-1]
    spectrum = lax.complex(h_re, -h_im if conjugate else h_im)
    made = jnp.fft.ifft(jnp.fft.fft(lax.complex(re, im), n) * spectrum)[..., :time]
    return made.real, made.imag
