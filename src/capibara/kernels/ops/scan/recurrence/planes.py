"""Complex numbers as pairs of real ones, for kernels: their chips have no others.

A kernel is written once, for numbers that are added and multiplied. Where the operands are complex a number is a
`Pair`, a pytree of its two planes; where they are real it is the array itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Number = Any
"""An array, or a `Pair` of them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """A complex number's real and imaginary parts."""

    real: Any
    imag: Any

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.real + other.real, self.imag + other.imag)

    def __mul__(self, other: Pair) -> Pair:
        real = self.real * other.real - self.imag * other.imag
        return Pair(real, self.real * other.imag + self.imag * other.real)


def split(x: jax.Array | None) -> Number:
    """An array as kernels take it; None stays None."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return Pair(jnp.real(x), jnp.imag(x))


def join(x: Number) -> jax.Array:
    return lax.complex(x.real, x.imag) if isinstance(x, Pair) else x


def filled(like: Number, value: float) -> Number:
    """A real value as a number of the kind of `like`, to be broadcast."""
    return Pair(value, 0.0) if isinstance(like, Pair) else value


def choose(mask: Any, x: Number, other: Number) -> Number:
    return jax.tree.map(lambda one, another: jnp.where(mask, one, another), x, other)


def store(refs: Number, index: Any, x: Number) -> None:
    """Write a number where it belongs, each plane rounded to its reference's type."""

    def write(ref: Any, plane: Any) -> None:
        ref[index] = plane.astype(ref.dtype)

    jax.tree.map(write, refs, x)
