"""Real transforms of even length by a complex one of half the length, and of odd length by a complex one of the same.

The even points are the real plane and the odd points the imaginary one; sums and differences of the spectrum with its
mirror image tell the two apart.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.fft.matmul import ahead_of, times
from capibara.kernels.ops.fft.rules import scale_of
from capibara.kernels.ops.fft.twiddles import roots


def _mirror(x: jax.Array) -> jax.Array:
    """x[-k]: the first point stays, the others are reversed."""
    return jnp.concatenate([x[..., :1], x[..., 1:][..., ::-1]], -1)


def _half_turn(n: int, inverse: bool) -> np.ndarray[Any, Any]:
    """exp(∓2πi k/n) for the n // 2 + 1 points of half a spectrum, as planes."""
    return np.stack(roots(n, np.arange(n // 2 + 1), inverse)).astype("float32")


def rfft(op: Op, x: jax.Array, *, norm: str, precision: str) -> tuple[jax.Array, jax.Array]:
    """Half the spectrum of a real signal."""
    n = x.shape[-1]
    scale = scale_of((n,), norm, False)
    if n % 2:
        re, im = run(op, (x, jnp.zeros_like(x)), {"precision": precision})
        points = n // 2 + 1
        return re[..., :points] * scale, im[..., :points] * scale
    pairs = x.reshape(*x.shape[:-1], n // 2, 2)
    re, im = run(op, (pairs[..., 0], pairs[..., 1]), {"precision": precision})
    there = jnp.stack([re, im])
    whole = jnp.concatenate([there, there[..., :1]], -1)
    conjugate = jnp.concatenate([_mirror(there), there[..., :1]], -1) * _sign(whole.ndim)
    even, odd = 0.5 * (whole + conjugate), 0.5 * (whole - conjugate)
    odd = jnp.stack([odd[1], -odd[0]])  # divided by i
    made = (even + times(odd, _wide(_half_turn(n, False), whole.ndim))) * scale
    # Of a real signal these are real, whatever the roundings above.
    own = (np.arange(n // 2 + 1) * 2) % n == 0
    return made[0], jnp.where(own, 0.0, made[1])


def irfft(op: Op, re: jax.Array, im: jax.Array, *, n: int, norm: str, precision: str) -> jax.Array:
    """A real signal from half its spectrum."""
    points = n // 2 + 1
    own = (np.arange(points) * 2) % n == 0
    half = jnp.stack([re, jnp.where(own, 0.0, im)])
    scale = scale_of((n,), norm, True)
    params = {"inverse": True, "norm": "forward", "precision": precision}
    if n % 2:
        tail = half[..., 1:][..., ::-1] * _sign(half.ndim)
        full = jnp.concatenate([half, tail], -1)
        return run(op, (full[0], full[1]), params)[0] * scale
    conjugate = half[..., ::-1] * _sign(half.ndim)
    even = half + conjugate
    odd = times(half - conjugate, _wide(_half_turn(n, True), half.ndim))
    packed = (even + jnp.stack([-odd[1], odd[0]]))[..., : n // 2]
    made = run(op, (packed[0], packed[1]), params)
    return (jnp.stack(made, -1) * scale).reshape(*re.shape[:-1], n)


def _sign(ndim: int) -> np.ndarray[Any, Any]:
    """What conjugates planes."""
    return np.array([1.0, -1.0], "float32").reshape(2, *(1,) * (ndim - 1))


def _wide(planes: np.ndarray[Any, Any], ndim: int) -> np.ndarray[Any, Any]:
    return planes.reshape(2, *(1,) * (ndim - 2), planes.shape[-1])


def implementations(fft: Op) -> tuple[Implementation, Implementation]:
    """(rfft's, irfft's) on the complex transform `fft`, whatever dispatch chooses for it."""

    def by(fn: Any) -> Implementation:
        return Implementation("xla_packed", functools.partial(fn, fft), ahead_of=ahead_of, own_gradient=True)

    return by(rfft), by(irfft)
