"""The transform as matrix products in plain JAX: mixed radix, each stage one product, nothing reordered at the end.

The signal is [plane, batch, left to do, done]. A stage takes a radix r off what is left, multiplies by the DFT matrix
of length r on both planes at once (the real form of a complex product), and puts the new digit in front of those
done, so that the last stage leaves the result in order (Stockham). XLA fuses the factors between the stages and the
rounding to bfloat16 into what the products write.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.fft.plan import plan
from capibara.kernels.ops.fft.rules import scale_of
from capibara.kernels.ops.fft.twiddles import chirp, stacked_dft, twiddles

# A table of factors above this many roots is made of two small ones: a constant lies in the program.
LARGEST_TABLE = 1 << 19


def times(x: jax.Array, factor: Any) -> jax.Array:
    """A complex product of planes [2, ...]."""
    (a, b), (c, d) = x, factor
    return jnp.stack([a * c - b * d, a * d + b * c])


def rounding(precision: str) -> dict[str, Any]:
    """How a stage's product is taken: bfloat16 operands and float32 sums, or float32 throughout."""
    if precision == "bfloat16":
        return {"preferred_element_type": jnp.float32}
    return {"precision": lax.Precision.HIGHEST}


def table(n: int, left: int, radix: int, inverse: bool) -> Any:
    """The factors between two stages, [2, left, radix], in float32."""
    if left * radix <= LARGEST_TABLE:
        return twiddles(n, left, radix, inverse).astype("float32")
    fine = math.gcd(left, 1 << (math.isqrt(left).bit_length()))
    coarse = twiddles(n, left // fine, radix, inverse, fine).astype("float32")[:, :, None, :]
    small = twiddles(n, fine, radix, inverse).astype("float32")[:, None, :, :]
    return times(jnp.asarray(coarse), jnp.asarray(small)).reshape(2, left, radix)


def stage(x: jax.Array, radix: int, inverse: bool, precision: str) -> jax.Array:
    """One radix: [2, batch, left, done] -> [2, batch, left / radix, radix · done]."""
    _, batch, whole, done = x.shape
    left = whole // radix
    matrix = stacked_dft(radix, inverse).astype("float32")
    x = x.reshape(2, batch, radix, left, done)
    if precision == "bfloat16":
        x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    y = jnp.einsum("pkcj,cbjld->pblkd", matrix, x, **rounding(precision))
    if left > 1:
        y = times(y, table(whole, left, radix, inverse)[:, None, :, :, None])
    return y.reshape(2, batch, left, radix * done)


def mixed_radix(x: jax.Array, factors: tuple[int, ...], inverse: bool, precision: str) -> jax.Array:
    """The transform of planes [2, batch, n], without a scale."""
    y = x[..., None]
    for radix in factors:
        if radix > 1:
            y = stage(y, radix, inverse, precision)
    return y.reshape(x.shape)


def transform(
    x: jax.Array, inverse: bool, precision: str, factors: tuple[int, ...] | None, smooth: Any = mixed_radix
) -> jax.Array:
    """The transform of planes [2, batch, n], any n; `smooth` does the lengths that have radices."""
    n = x.shape[-1]
    chosen = plan(n, factors)
    if chosen.padded is None:
        return smooth(x, chosen.factors, inverse, precision)
    wave, spectrum = (made.astype("float32")[:, None, :] for made in chirp(n, chosen.padded, inverse))
    long = jnp.pad(times(x, wave), ((0, 0), (0, 0), (0, chosen.padded - n)))
    there = times(smooth(long, chosen.factors, False, precision), spectrum)
    back = smooth(there, chosen.factors, True, precision)[..., :n]
    return times(back, wave)


def over_axes(
    re: jax.Array, im: jax.Array, axes: int, norm: str, inverse: bool, one: Any
) -> tuple[jax.Array, jax.Array]:
    """`one(planes [2, batch, n])` along each of the last `axes` axes in turn, and the scale of them all."""
    kind = re.dtype
    x = jnp.stack([re, im]).astype(jnp.float32)
    if x.size == 0:
        return re, im
    scale = scale_of(re.shape[-axes:], norm, inverse)
    for axis in range(-1, -axes - 1, -1):
        moved = jnp.moveaxis(x, axis, -1)
        x = jnp.moveaxis(one(moved.reshape(2, -1, moved.shape[-1])).reshape(moved.shape), -1, axis)
    if scale != 1:
        x = x * scale
    return x[0].astype(kind), x[1].astype(kind)


def matmul(
    re: jax.Array, im: jax.Array, *, inverse: bool, norm: str, precision: str, axes: int,
    factors: tuple[int, ...] | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Mixed radix by matrix products; see the module's text."""
    one = functools.partial(transform, inverse=inverse, precision=precision, factors=factors)
    # As one program: partitioning over a mesh takes functions without constants of their own.
    return jax.jit(lambda re, im: over_axes(re, im, axes, norm, inverse, one))(re, im)


def ahead_of(call: Call) -> tuple[str, ...]:
    """First on a TPU, whose compiler takes a minute over its own transform of 4096 x 4096. On an H200 cuFFT in float32
    took a third of the time of transforms in bfloat16 that a complex array is taken apart for: it runs for them too."""
    return ("xla",) if call.target.platform == "tpu" else ()


# The op's rules stand in, as for a kernel: JAX would transpose the rounding to bfloat16 too, where the gradient is just
# another transform, and XLA would gather some of the axes that are folded into one batch.
IMPLEMENTATION = Implementation("xla_matmul", matmul, ahead_of=ahead_of, kernel=True)
