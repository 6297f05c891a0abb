"""Long causal filters in bfloat16 for Hopper, in Pallas (Mosaic GPU): each signal is read once and written once.

Signals of up to 16384 numbers are not padded to twice their length. Both signal and filter are multiplied by
exp(iπ t / 2N) first, which turns by a quarter over N numbers: what wraps around a cyclic convolution of N then comes
back imaginary, and the real part is the causal one. The turn costs nothing, since it is part of the constants.

N = 128 x 128, and a signal is a matrix X of that shape. With A[k, j] = exp(-2πi j (k - 1/4) / 128) and factors T:

    Z = ((A X) · T) Aᵀ        the spectrum, one row of Z a residue of the frequencies by 128
    W = ((Z · H) conj(A)) · conj(T)
    y = Re(A^H W) / N

Signals of up to 8192 numbers are 64 rows, and N is twice their length without a turn. Two of them, as X's real and
imaginary planes, come out apart, and cost what one of 16384 does: half the rows in, half the rows out. Each is brought
to a size near 1 first, as in `composed.py`.

Two warpgroups have 64 rows of Z each; they meet at X, which both read, and at W. H comes from memory to registers
while the product before it runs, and the next signal during the last one. All products are of bfloat16 numbers with
float32 sums. 1 / N is in T.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.fft.causal.composed import powers
from capibara.kernels.ops.fft.causal.hopper.kernel import BLOCKS, LONGEST, SIDE, places, run
from capibara.kernels.ops.fft.causal.hopper.products import ROWS
from capibara.kernels.ops.fft.hopper.forward import TILE
from capibara.kernels.ops.fft.plan import smooth_length
from capibara.kernels.ops.fft.twiddles import roots
from capibara.kernels.pallas.hopper import ProgramsConfig, multiprocessors, refuses_chip

BF16 = jnp.bfloat16


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    time = call.need("x").shape[-1]
    if 0 in call.need("x").shape:
        return "the operands are empty"
    if time > LONGEST:
        return f"it takes signals of up to {LONGEST} numbers, not {time}"
    return None


def _blocks(planes: Any) -> np.ndarray:
    """Planes [128, 128] cut into blocks of 64 x 64."""
    cut = np.stack(planes).reshape(-1, 2, ROWS, 2, ROWS).transpose(0, 1, 3, 2, 4)
    return cut.reshape(-1, ROWS, ROWS)


def _constants(scale: float, turned: bool, conjugate: bool = False) -> tuple[jax.Array, jax.Array]:
    """A, with -sin as a plane of its own, and T · scale in the order of registers, as blocks; see the module's text.

    A serves for the second radix too, whose matrix has no quarter: T takes it out again. With both conjugate the
    spectra of real signals come out conjugate, so that a correlation is a filter like any other.
    """
    row, column = np.arange(SIDE, dtype=np.int64)[:, None], np.arange(SIDE, dtype=np.int64)[None, :]
    quarter = 1 if turned else 0
    cosine, sine = roots(4 * SIDE, column * (4 * row - quarter), conjugate)
    factors = _blocks(roots(4 * LONGEST, column * (4 * row - quarter + quarter * SIDE), conjugate)) * scale
    ordered = factors.reshape(BLOCKS, -1)[:, places()].reshape(factors.shape)
    return jnp.asarray(_blocks((cosine, sine, -sine)), BF16), jnp.asarray(ordered, BF16)


def _matrices(x: jax.Array, rows: int = SIDE) -> jax.Array:
    """[..., T] as matrices [signals, rows, 128], with zeros after the signal."""
    x = x.reshape(-1, x.shape[-1])
    return jnp.pad(x, ((0, 0), (0, rows * SIDE - x.shape[-1]))).reshape(-1, rows, SIDE)


def spectra(x: jax.Array, *, programs: int, conjugate: bool, turned: bool = True) -> jax.Array:
    """The spectra, turned or not, of real signals [..., T], as blocks [signals, 8, 64, 64] in bfloat16."""
    return run(_matrices(x), None, _constants(1.0, turned, conjugate), programs=programs, batch=1)


def filtered(x: jax.Array, h: jax.Array, *, programs: int, dtype: Any) -> jax.Array:
    """x [B, C, T] through the filters whose turned spectra are h, a channel's or, where there are B·C, a signal's."""
    y = run(_matrices(x), h, _constants(1 / SIDE, True), programs=programs, batch=x.shape[0], dtype=np.dtype(dtype))
    return y.reshape(*x.shape[:2], LONGEST)[..., : x.shape[2]]


def filtered_pairs(x: jax.Array, h: jax.Array, *, programs: int) -> jax.Array:
    """x [B, C, T] of up to 8192 numbers, two signals at a time, through the filters whose plain spectra are h."""
    own, inverse = (size.reshape(-1) for size in powers(x.astype(jnp.float32)))
    y = run(
        _matrices(x, ROWS),
        h,
        _constants(1 / SIDE, False),
        programs=programs,
        batch=x.shape[0],
        dtype=np.dtype(x.dtype),
        sizes=(inverse, own),
    )
    return y.reshape(*x.shape[:2], LONGEST // 2)[..., : x.shape[2]]


def _programs(config: ProgramsConfig) -> int:
    return config.programs * multiprocessors(current_target().device_kind)


# Each as one program: partitioning over a mesh takes functions without constants of their own.
def causal_filter_hopper(x: jax.Array, h: jax.Array, *, config: ProgramsConfig, conjugate: bool) -> jax.Array:
    """The filter or, where `conjugate`, its correlation; see the module's text."""
    programs = _programs(config)

    def whole(x: jax.Array, h: jax.Array) -> jax.Array:
        if x.shape[2] <= LONGEST // 2:
            own = spectra(h, programs=programs, conjugate=conjugate, turned=False)
            return filtered_pairs(x, own, programs=programs)
        own = spectra(h, programs=programs, conjugate=conjugate)
        return filtered(x, own, programs=programs, dtype=x.dtype)

    return jax.jit(whole)(x, h)


def causal_taps_hopper(flow: jax.Array, x: jax.Array, *, config: ProgramsConfig, taps: int) -> jax.Array:
    """The gradient for the filters: each cotangent's correlation with its signal, summed over the batch."""
    programs = _programs(config)

    def whole(flow: jax.Array, x: jax.Array) -> jax.Array:
        own = spectra(x, programs=programs, conjugate=True)
        return filtered(flow, own, programs=programs, dtype=jnp.float32)[..., :taps].sum(0)

    return jax.jit(whole)(flow, x)


def ahead_of(call: Call) -> tuple[str, ...]:
    """By what was measured on an H200, 8 x 768 signals: up to 8192 numbers it takes 0.47 to 0.62 ms, from there on 0.71
    to 1.1, more where they are padded. Transforms by kernels, which take multiples of 4096 points, take 0.60 ms at
    12288 points and 0.93 at 16384; others are cuFFT's, 2.06 ms at 16640."""
    time, taps = call.need("x").shape[-1], call.need("h").shape[-1]
    points = smooth_length(time + taps - 1)
    shorter = points % TILE == 0 and points <= (12288 if time <= LONGEST // 2 else 16384)
    return () if shorter or time <= LONGEST // 4 else ("xla",)


def taps_ahead_of(call: Call) -> tuple[str, ...]:
    """1.40 ms at 8192 numbers and 1.16 at 16384, which need no padding; the transforms 1.66 and 3.17."""
    return ("xla",) if call.need("x").shape[-1] >= LONGEST // 2 else ()


def _implementation(run: Any, ahead_of: Any) -> Implementation:
    return Implementation(
        "hopper",
        run,
        platforms=("gpu",),
        refuses=refuses,
        ahead_of=ahead_of,
        kernel=True,
        config_type=ProgramsConfig,
        candidates=lambda call: [ProgramsConfig()],
    )


IMPLEMENTATION = _implementation(causal_filter_hopper, ahead_of)
TAPS_IMPLEMENTATION = _implementation(causal_taps_hopper, taps_ahead_of)
