"""Long causal filters in bfloat16 for Hopper, in Pallas (Mosaic GPU): each signal is read once and written once.

Signals of up to 16384 numbers are not padded to twice their length. Both signal and filter are multiplied by
exp(iπ t / 2N) first, which turns by a quarter over N numbers: what wraps around a cyclic convolution of N then comes
back imaginary, and the real part is the causal one. The turn costs nothing, since it is part of the constants.

N = 128 x 128, and a signal is a matrix X of that shape. With A[k, j] = exp(-2πi j (k - 1/4) / 128) and factors T:

    Z = ((A X) · T) Aᵀ        the spectrum, one row of Z a residue of the frequencies by 128
    W = ((Z · H) conj(A)) · conj(T)
    y = Re(A^H W) / N

Two warpgroups have 64 rows of Z each; they meet at X, which both read, and at W. H comes from memory to registers
while the product before it runs, and the next signal during the last one. All products are of bfloat16 numbers with
float32 sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.context import current_target
from capibara.kernels.fft.causal.pallas_gpu_body import BLOCKS, LONGEST, ROWS, SIDE, run
from capibara.kernels.fft.twiddles import roots
from capibara.kernels.hopper import ProgramsConfig, multiprocessors, refuses_chip
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct

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


def _blocks(planes: Any) -> jax.Array:
    """Two planes [128, 128] cut into blocks of 64 x 64."""
    cut = np.stack(planes).reshape(2, 2, ROWS, 2, ROWS).transpose(0, 1, 3, 2, 4)
    return jnp.asarray(cut.reshape(BLOCKS, ROWS, ROWS), BF16)


def _constants() -> tuple[jax.Array, jax.Array]:
    """A and T as blocks. A serves for the second radix too, whose matrix has no quarter: T takes it out again."""
    row, column = np.arange(SIDE, dtype=np.int64)[:, None], np.arange(SIDE, dtype=np.int64)[None, :]
    matrix = roots(4 * SIDE, column * (4 * row - 1), False)
    factors = roots(4 * LONGEST, column * (4 * row - 1 + SIDE), False)
    return _blocks(matrix), _blocks(factors)


def _matrices(x: jax.Array) -> jax.Array:
    """[..., T] as matrices [signals, 128, 128], with zeros after the signal."""
    x = x.reshape(-1, x.shape[-1])
    return jnp.pad(x, ((0, 0), (0, LONGEST - x.shape[-1]))).reshape(-1, SIDE, SIDE)


def spectra(x: jax.Array, *, programs: int) -> jax.Array:
    """The turned spectra of real signals [..., T], as blocks [signals, 8, 64, 64] in bfloat16."""
    given = _matrices(x)
    return run(
        given,
        None,
        _constants(),
        out_struct((given.shape[0], BLOCKS, ROWS, ROWS), BF16, x),
        programs=programs,
        batch=1,
        conjugate=False,
    )


def filtered(x: jax.Array, h: jax.Array, *, programs: int, conjugate: bool) -> jax.Array:
    """x [B, C, T] through the filters whose turned spectra are h, a channel's or, where there are B·C, a signal's."""
    given = _matrices(x)
    out = out_struct(given.shape, jnp.float32, x)
    made = run(given, h, _constants(), out, programs=programs, batch=x.shape[0], conjugate=conjugate)
    return made.reshape(*x.shape[:2], LONGEST)[..., : x.shape[2]]


def _programs(config: ProgramsConfig) -> int:
    return config.programs * multiprocessors(current_target().device_kind)


# Each as one program: partitioning over a mesh takes functions without constants of their own.
def mosaic_gpu(x: jax.Array, h: jax.Array, *, config: ProgramsConfig, conjugate: bool) -> jax.Array:
    """The filter or, where `conjugate`, its correlation; see the module's text."""
    programs = _programs(config)

    def whole(x: jax.Array, h: jax.Array) -> jax.Array:
        return filtered(x, spectra(h, programs=programs), programs=programs, conjugate=conjugate)

    return jax.jit(whole)(x, h)


def mosaic_gpu_taps(flow: jax.Array, x: jax.Array, *, config: ProgramsConfig, taps: int) -> jax.Array:
    """The gradient for the filters: each cotangent's correlation with its signal, summed over the batch."""
    programs = _programs(config)

    def whole(flow: jax.Array, x: jax.Array) -> jax.Array:
        own = spectra(x, programs=programs)
        return filtered(flow, own, programs=programs, conjugate=True)[..., :taps].sum(0)

    return jax.jit(whole)(flow, x)


def rank(call: Call) -> float:
    """On an H200 signals of 16384 numbers took 0.42 of the time of cuFFT's real transforms and a product. Shorter ones
    cost as much as those, so that from half the length on the shorter transforms go first."""
    return 20 if call.need("x").shape[-1] > LONGEST // 2 else 9


def _implementation(run: Any, rank: Any) -> Implementation:
    return Implementation(
        "mosaic_gpu",
        run,
        platforms=("gpu",),
        refuses=refuses,
        rank=rank,
        kernel=True,
        config_type=ProgramsConfig,
        default_config=lambda call: ProgramsConfig(),
        candidates=lambda call: [ProgramsConfig()],
    )


IMPLEMENTATION = _implementation(mosaic_gpu, rank)
TAPS = _implementation(mosaic_gpu_taps, lambda call: 9)  # below the transforms' until it has been timed
