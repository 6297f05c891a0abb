"""The transforms by their definition, in plain JAX: the specification of the ops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.ops.fft.rules import scale_of
from capibara.kernels.ops.fft.twiddles import dft

# Up to here the definition itself, a matrix of n² roots; beyond, jnp.fft in the operands' precision.
LARGEST_MATRIX = 256


def _along_last(x: jax.Array, inverse: bool) -> jax.Array:
    n = x.shape[-1]
    if n > LARGEST_MATRIX:
        return jnp.fft.ifft(x, norm="forward") if inverse else jnp.fft.fft(x)
    real, imag = dft(n, inverse)
    return jnp.matmul(x, jnp.asarray(real + 1j * imag, x.dtype), precision=lax.Precision.HIGHEST)


def reference(
    re: jax.Array, im: jax.Array, *, inverse: bool = False, norm: str = "backward", precision: str = "float32",
    axes: int = 1, factors: tuple[int, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The DFT of re + i·im over the last axes, as two planes: sum of x[j]·exp(∓2πi jk/n), times the norm's scale.

    It is in the operands' own precision: "bfloat16" says how far an implementation may round, and factors how it may
    divide the work. Planes in bfloat16 are transformed in float32, and the result is rounded.
    """
    del precision, factors
    kind = re.dtype
    if kind == jnp.bfloat16:
        re, im = re.astype(jnp.float32), im.astype(jnp.float32)
    x = lax.complex(re, im)
    for axis in range(-1, -axes - 1, -1):
        x = jnp.moveaxis(_along_last(jnp.moveaxis(x, axis, -1), inverse), -1, axis)
    x = x * scale_of(re.shape[-axes:], norm, inverse)
    return x.real.astype(kind), x.imag.astype(kind)


def reference_rfft(
    x: jax.Array, *, norm: str = "backward", precision: str = "float32"
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The first n // 2 + 1 points of a real signal's DFT, as two planes; the others are their conjugates."""
    re, im = reference(x, jnp.zeros_like(x), norm=norm, precision=precision)
    points = x.shape[-1] // 2 + 1
    return re[..., :points], im[..., :points]


def reference_irfft(
    re: jax.Array, im: jax.Array, *, n: int, norm: str = "backward", precision: str = "float32"
) -> jax.Array:
    """The real signal of length n that has this half spectrum; the first point's imaginary part, and the middle's of
    an even length, do not enter."""
    del precision
    index = np.arange(re.shape[-1])
    own = (index == 0) | (2 * index == n)
    angle = 2 * np.pi / n * (np.outer(index, np.arange(n)) % n)
    weight = np.where(own, 1.0, 2.0)[:, None] * scale_of((n,), norm, True)
    cosine = jnp.asarray(np.cos(angle) * weight, re.dtype)
    sine = jnp.asarray(np.sin(angle) * weight * ~own[:, None], re.dtype)
    highest = lax.Precision.HIGHEST
    return jnp.matmul(re, cosine, precision=highest) - jnp.matmul(im, sine, precision=highest)
