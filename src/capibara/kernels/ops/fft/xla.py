"""The vendor's transforms by XLA: cuFFT on a GPU, ducc on a CPU, and what the TPU compiler makes.

XLA's partitioner would gather a sharded signal before it transforms it, so the ops' own rules for a mesh stand in,
as for a kernel. Taking a complex array apart and putting it together costs nothing: XLA cancels the one with the other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.fft.rules import scale_of


def xla(
    re: jax.Array, im: jax.Array, *, inverse: bool, norm: str, precision: str, axes: int, factors: None
) -> tuple[jax.Array, jax.Array]:
    """XLA's transform over the last axes."""
    del precision, factors  # float32, which is more than bfloat16 asks for; refused unless None
    if re.size == 0:
        return re, im
    lengths = re.shape[-axes:]
    x = lax.complex(re.astype(jnp.float32), im.astype(jnp.float32))
    y = _scaled(lax.fft(x, "ifft" if inverse else "fft", lengths), lengths, norm, inverse)
    return y.real.astype(re.dtype), y.imag.astype(im.dtype)


def _scaled(y: jax.Array, lengths: tuple[int, ...], norm: str, inverse: bool) -> jax.Array:
    """XLA's transforms have numpy's "backward" scale."""
    if norm == "backward":
        return y
    return y * (scale_of(lengths, norm, inverse) / scale_of(lengths, "backward", inverse))


def xla_rfft(x: jax.Array, *, norm: str, precision: str) -> tuple[jax.Array, jax.Array]:
    """XLA's transform of a real signal."""
    del precision
    if x.size == 0:
        empty = jnp.zeros((*x.shape[:-1], x.shape[-1] // 2 + 1), x.dtype)
        return empty, empty
    lengths = x.shape[-1:]
    y = _scaled(lax.fft(x, "rfft", lengths), lengths, norm, False)
    return y.real, y.imag


def xla_irfft(re: jax.Array, im: jax.Array, *, n: int, norm: str, precision: str) -> jax.Array:
    """XLA's transform to a real signal. Some vendors add in imaginary parts that numpy leaves out; they are cleared."""
    del precision
    if re.size == 0:
        return jnp.zeros((*re.shape[:-1], n), re.dtype)
    index = lax.iota("int32", re.shape[-1])
    own = (index == 0) | (2 * index == n)
    return _scaled(lax.fft(lax.complex(re, jnp.where(own, 0.0, im)), "irfft", (n,)), (n,), norm, True)


def refuses(call: Call) -> str | None:
    if call.params["precision"] != "float32" and call.target.platform != "gpu":
        return f"the vendor's transform is float32; precision={call.params['precision']!r} was asked for"
    if call.params.get("factors") is not None:
        return "the vendor's transform chooses its own radices"
    return None


IMPLEMENTATION = Implementation("xla", xla, refuses=refuses, kernel=True)
RFFT = Implementation("xla", xla_rfft, refuses=refuses, kernel=True)
IRFFT = Implementation("xla", xla_irfft, refuses=refuses, kernel=True)
