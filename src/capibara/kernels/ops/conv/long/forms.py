"""Four ways to a long convolution: by XLA's transforms of real numbers, by complex ones of half as many points, by this
library's, and by matrix products for short filters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.conv.long.reference import by_transforms, wide_type
from capibara.kernels.ops.fft.convolve import fft_convolve
from capibara.kernels.ops.fft.halves import convolve
from capibara.kernels.ops.fft.plan import smooth_length

BLOCK = 128
MOST_TAPS = 1024


def xla(x: jax.Array, h: jax.Array, *, precision: str | None) -> jax.Array:
    """Real transforms by XLA (cuFFT on a GPU), of a length with small factors."""
    taps = h[: x.shape[1]]
    return by_transforms(x, taps, smooth_length(x.shape[1] + taps.shape[0] - 1)).astype(x.dtype)


def packed(x: jax.Array, h: jax.Array, *, precision: str | None) -> jax.Array:
    """Complex transforms forward, of half as many points, which no pass copies or scales. Reverse mode alone."""
    return convolve(x, h[: x.shape[1]], 0).astype(x.dtype)


def fft(x: jax.Array, h: jax.Array, *, precision: str | None) -> jax.Array:
    """This library's `fft_convolve`, whose transforms may be matrix products, channels before time."""
    made = fft_convolve(jnp.swapaxes(x, 1, 2), h.T, precision=precision or "float32")
    return jnp.swapaxes(made, 1, 2)


def direct(x: jax.Array, h: jax.Array, *, precision: str | None) -> jax.Array:
    """Blocks of time times Toeplitz matrices of the filters: y[i] = Σ over j of T[j] x[i - j].

    T[j][t, s] = h[j·BLOCK + t - s] takes what block i - j has to do with block i; there are as many as the filter
    reaches back, and each is a matrix product for every channel.
    """
    batch, time, channels = x.shape
    taps = min(h.shape[0], time)
    blocks, reach = -(-time // BLOCK), -(-(taps - 1) // BLOCK)
    wide = wide_type(x)
    held = jnp.bfloat16 if precision == "bfloat16" else jnp.result_type(x, h)
    padded = jnp.pad(x, ((0, 0), (reach * BLOCK, blocks * BLOCK - time), (0, 0))).astype(held)
    cut = padded.reshape(batch, reach + blocks, BLOCK, channels)
    # h[k] is at BLOCK - 1 + k, and zeros are wherever t - s reaches past the filter.
    filters = jnp.pad(h[:taps], ((BLOCK - 1, (reach + 1) * BLOCK - taps), (0, 0))).astype(held)
    lag = jnp.arange(BLOCK)[:, None] - jnp.arange(BLOCK)[None, :]
    total = jnp.zeros((), wide)
    for j in range(reach + 1):
        matrix = filters[lag + j * BLOCK + BLOCK - 1]  # [t, s, channels]
        seen = lax.slice_in_dim(cut, reach - j, reach - j + blocks, axis=1)
        total = total + jnp.einsum(
            "bnsc,tsc->bntc", seen, matrix, preferred_element_type=wide,
            precision=None if precision == "bfloat16" else "highest",
        )  # fmt: skip
    return total.reshape(batch, blocks * BLOCK, channels)[:, :time].astype(x.dtype)


def _empty(call: Call) -> str | None:
    return "x is empty" if 0 in call.need("x").shape else None


def _refuses_xla(call: Call) -> str | None:
    if call.params["precision"] == "bfloat16":
        return "XLA's transforms are float32; precision='bfloat16' is for matrix products"
    return _empty(call)


def _refuses_fft(call: Call) -> str | None:
    if "float64" in (call.need("x").dtype.name, call.need("h").dtype.name):
        return "its transforms take floats of at most 32 bits"
    return _empty(call)


def _refuses_packed(call: Call) -> str | None:
    return _refuses_xla(call) or _refuses_fft(call)


def _refuses_direct(call: Call) -> str | None:
    taps = call.need("h").shape[0]
    if taps > MOST_TAPS:
        return f"its matrices are for filters up to {MOST_TAPS} taps, and these have {taps}"
    return _empty(call)


def _ahead_of(call: Call) -> tuple[str, ...]:
    return ("xla",) if call.target.platform == "gpu" else ()


def _remark(call: Call) -> str | None:
    if call.target.platform != "gpu":
        return None
    return "1.02 to 1.7 times as fast as xla in 20 calls on an H200, float32: 2026-11-19-h200-long-conv.json"


IMPLEMENTATIONS = (
    Implementation("xla", xla, refuses=_refuses_xla),
    # Elsewhere XLA's transform back to real numbers is one pass.
    Implementation(
        "xla_packed", packed, platforms=("gpu", "cpu"), refuses=_refuses_packed, ahead_of=_ahead_of, remark=_remark
    ),
    # Where bfloat16 is asked for it has a kernel on Hopper; otherwise it is XLA's transforms, and two transposes.
    Implementation("xla_fft", fft, refuses=_refuses_fft),
    Implementation("xla_direct", direct, refuses=_refuses_direct),
)
