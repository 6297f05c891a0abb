"""Long transforms in bfloat16 for Hopper, in Pallas (Mosaic GPU): 2^14 to 2^18 points in two passes over memory.

n = n1 · n2, each 64 times 2, 4 or 8. A pass transforms down the columns of a matrix [n1, n2], 16 columns at a time:
radix 64 by products on the tensor cores, then the small radix, between registers. The
first pass multiplies by the factors between the two and leaves the matrix transposed in bfloat16, so that the second,
again down the columns, leaves the result in order. Float32 planes are read once and written once, and half as many
bytes are written and read between.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.context import current_target
from capibara.kernels.fft.complex_view import as_numbers, call_viewed
from capibara.kernels.fft.pallas_gpu import refuses_form
from capibara.kernels.fft.pallas_gpu_long_body import BF16, ROWS, run
from capibara.kernels.fft.pallas_gpu_pairs import TURNS
from capibara.kernels.fft.rules import scale_of
from capibara.kernels.fft.twiddles import dft, twiddles
from capibara.kernels.hopper import ProgramsConfig, multiprocessors
from capibara.kernels.op import Call, Implementation
from capibara.kernels.transforms import out_struct

RADICES = {1 << 14: (2, 2), 1 << 15: (4, 2), 1 << 16: (4, 4), 1 << 17: (8, 4), 1 << 18: (8, 8)}
PAIRS_LENGTHS = (1 << 15, 1 << 16, 1 << 17, 1 << 18)  # whose second pass has radix 8; see `two_passes_of_pairs`


def refuses(call: Call, lengths: tuple[int, ...] = tuple(RADICES)) -> str | None:
    form = refuses_form(call)
    if form is not None:
        return form
    shape = call.need("re").shape
    if shape[-1] not in lengths:
        return f"it takes {', '.join(map(str, lengths))} points, not {shape[-1]}"
    return None


def _matrices(inverse: bool, rows: Any = slice(None)) -> jax.Array:
    """The DFT matrix of 64: cosines, sines, and the sines' negatives, which make a difference a sum."""
    cosine, sine = dft(ROWS, inverse)
    return jnp.asarray(np.stack([cosine, sine, -sine])[:, rows], BF16)


def _single(planes: Any) -> jax.Array:
    return jnp.asarray(planes, jnp.float32)


def _second_part(n: int, columns: int, inverse: bool) -> Any:
    """The factors of part 1, [plane, column]."""
    return twiddles(n, 2, columns, inverse, ROWS)[:, 1]


def two_passes(
    re: jax.Array, im: jax.Array, *, programs: int, inverse: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The transform of planes [..., n], times `scale`; float32 planes out."""
    n = re.shape[-1]
    signals = math.prod(re.shape[:-1])
    radix1, radix2 = RADICES[n]
    n1, n2 = radix1 * ROWS, radix2 * ROWS
    matrices = _matrices(inverse)
    # k = k1 + n1 k2 of j = j1 n2 + j2, and k1 = row + 64 part: the factor of (k1, j2) is one of (row, j2) and one of
    # (part, j2), of which the kernel takes powers.
    between = (_single(twiddles(n, ROWS, n2, inverse)), _single(_second_part(n, n2, inverse)))
    how: dict[str, Any] = {"programs": programs, "inverse": inverse}
    middle = run(
        re.reshape(signals * ROWS, radix1 * n2), im.reshape(signals * ROWS, radix1 * n2),
        matrices, _single(twiddles(n1, radix1, ROWS, inverse)), *between,
        out=[out_struct((signals * n2, n1), BF16, re)] * 2, radix=radix1, scale=1.0, first_pass=True, **how,
    )  # fmt: skip
    made = run(
        *(plane.reshape(signals * ROWS, radix2 * n1) for plane in middle),
        matrices, _single(twiddles(n2, radix2, ROWS, inverse)),
        out=[out_struct((signals * n2, n1), jnp.float32, re)] * 2, radix=radix2, scale=scale, first_pass=False, **how,
    )  # fmt: skip
    return made[0].reshape(re.shape), made[1].reshape(re.shape)


def _in_turns(planes: Any) -> Any:
    """The last axis in the order that a kernel on pairs leaves eight of them in."""
    return planes.reshape(*planes.shape[:-1], -1, 8)[..., TURNS].reshape(planes.shape)


def two_passes_of_pairs(x: jax.Array, *, programs: int, inverse: bool, scale: float) -> jax.Array:
    """The transform of complex64 [..., n], n of PAIRS_LENGTHS, times `scale`, without planes: see `complex_view`."""
    n = x.shape[-1]
    signals = math.prod(x.shape[:-1])
    radix2 = len(TURNS)
    radix1 = n // (radix2 * ROWS * ROWS)
    n1, n2 = radix1 * ROWS, radix2 * ROWS
    # The columns of the first pass, and the rows that it makes, which are the second's columns.
    rows = _in_turns(np.arange(ROWS))
    lines = twiddles(n1, radix1, ROWS, inverse)[..., rows]
    base = _in_turns(twiddles(n, ROWS, n2, inverse)[:, rows])
    step = _in_turns(_second_part(n, n2, inverse))
    how: dict[str, Any] = {"programs": programs, "inverse": inverse, "pairs": True}
    between = [jax.ShapeDtypeStruct((signals * n2, n1), BF16)] * 2
    first = functools.partial(run, out=between, radix=radix1, scale=1.0, first_pass=True, **how)
    operands = [x.reshape(signals * ROWS, radix1 * n2), _matrices(inverse, rows), *map(_single, (lines, base, step))]
    middle = call_viewed(first, operands, between)
    made = jax.ShapeDtypeStruct((signals * n2, n1), jnp.complex64)
    second = functools.partial(run, out=[as_numbers(made)], radix=radix2, scale=scale, first_pass=False, **how)
    operands = [plane.reshape(signals * ROWS, radix2 * n1) for plane in middle]
    operands += [_matrices(inverse), _single(twiddles(n2, radix2, ROWS, inverse))]
    return call_viewed(second, operands, [made])[0].reshape(x.shape)


def mosaic_gpu_long(
    re: jax.Array, im: jax.Array, *, config: ProgramsConfig, inverse: bool, norm: str, precision: str, axes: int,
    factors: None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The transform of the last axis; see the module's text."""
    del precision, axes, factors  # refused unless bfloat16, 1 and None
    scale = scale_of(re.shape[-1:], norm, inverse)
    programs = config.programs * multiprocessors(current_target().device_kind)

    def whole(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
        return two_passes(re, im, programs=programs, inverse=inverse, scale=scale)

    # As one program: partitioning over a mesh takes functions without constants of their own.
    return jax.jit(whole)(re, im)


def mosaic_gpu_pairs(
    re: jax.Array, im: jax.Array, *, config: ProgramsConfig, inverse: bool, norm: str, precision: str, axes: int,
    factors: None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The same for planes that are those of a complex array: XLA cancels the taking apart with the putting together."""
    del precision, axes, factors
    scale = scale_of(re.shape[-1:], norm, inverse)
    programs = config.programs * multiprocessors(current_target().device_kind)

    def whole(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = two_passes_of_pairs(lax.complex(re, im), programs=programs, inverse=inverse, scale=scale)
        return made.real, made.imag

    return jax.jit(whole)(re, im)


def _implementation(name: str, run: Any, lengths: tuple[int, ...], rank: float) -> Implementation:
    return Implementation(
        name,
        run,
        platforms=("gpu",),
        refuses=functools.partial(refuses, lengths=lengths),
        rank=lambda call: rank,
        kernel=True,
        config_type=ProgramsConfig,
        default_config=lambda call: ProgramsConfig(),
        candidates=lambda call: [ProgramsConfig()],
    )


# Below the vendor's: on an H200 an earlier form of both took 0.22 ms at 64 x 2^18, cuFFT 0.17 on complex64 and 0.35
# where planes come in and go out. This form has not been timed.
IMPLEMENTATION = _implementation("mosaic_gpu_long", mosaic_gpu_long, tuple(RADICES), 21)
PAIRS = _implementation("mosaic_gpu_pairs", mosaic_gpu_pairs, PAIRS_LENGTHS, 20.5)
