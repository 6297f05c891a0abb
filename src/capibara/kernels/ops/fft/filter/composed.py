"""The filter as a transform, a product and a transform back: whatever dispatch chooses for each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.fft.api import FFT


def composed(
    re: jax.Array, im: jax.Array, h_re: jax.Array, h_im: jax.Array, *, conjugate: bool, precision: str
) -> tuple[jax.Array, jax.Array]:
    """ifft(fft(z) · H) by the transform's op."""
    time, n = re.shape[-1], h_re.shape[-1]
    padded = tuple(jnp.pad(plane, ((0, 0), (0, 0), (0, n - time))) for plane in (re, im))
    a, b = run(FFT, padded, {"precision": precision})
    c, d = h_re, -h_im if conjugate else h_im
    there = (a * c - b * d, a * d + b * c)
    made = run(FFT, there, {"precision": precision, "inverse": True})
    return made[0][..., :time], made[1][..., :time]


IMPLEMENTATION = Implementation("xla", composed)
