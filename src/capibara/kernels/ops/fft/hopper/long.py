"""Long transforms in bfloat16 for Hopper, in Pallas (Mosaic GPU): 2^14 to 2^18 points in two passes over memory.

n = n1 · n2, each 64 times 2, 4 or 8. A pass transforms down the columns of a matrix [n1, n2], 16 columns at a time:
radix 64 by products on the tensor cores, then the small radix, between registers. The first pass multiplies by the
factors between the two and leaves bfloat16 numbers in the order in which the second's tiles lie in memory, and its
products read them, so that a tile comes by one copy a plane. The second leaves the result in order.

Planes in and out are float32 or bfloat16, or the numbers of a complex64 array. They are read once and written once;
between the passes a number has four bytes. On an H200 64 x 2^18 points take 0.092 ms in bfloat16 planes, 0.128 in
float32 planes and 0.119 in complex64, at 2.9, 3.2 and 3.4 TB/s; cuFFT takes 0.170 on complex64.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.fft.complex_view import as_numbers, call_viewed
from capibara.kernels.ops.fft.hopper.forward import refuses_form
from capibara.kernels.ops.fft.hopper.long_passes import BF16, ROWS, WIDE, first_pass, second_pass
from capibara.kernels.ops.fft.hopper.moves import QUADS, TURNS
from capibara.kernels.ops.fft.rules import scale_of
from capibara.kernels.ops.fft.twiddles import dft, twiddles
from capibara.kernels.pallas.hopper import ProgramsConfig, multiprocessors

RADICES = {1 << 14: (2, 2), 1 << 15: (4, 2), 1 << 16: (4, 4), 1 << 17: (8, 4), 1 << 18: (8, 8)}
# Where the kernels are chosen. Timed on an H200 with 2^24 numbers: complex64 1.35, 1.31, 1.22, 1.03 and 0.82 times as
# fast as cuFFT from 2^18 points down to 2^14; bfloat16 planes 1.63, 1.64, 1.59, 1.30 and 0.91 times as fast as cuFFT on
# complex64, to which it would have to be taken; float32 planes 2.4 times at 2^18 and 1.23 at 2^14. With 2^21 numbers
# complex64 took 1.1 to 1.2 times as long as cuFFT; what lies between was not timed.
LENGTHS_FASTER = {
    "complex64": (1 << 16, 1 << 17, 1 << 18),
    "bfloat16": (1 << 15, 1 << 16, 1 << 17, 1 << 18),
    "float32": tuple(RADICES),
}
LEAST = 1 << 23  # numbers


def refuses(call: Call) -> str | None:
    form = refuses_form(call)
    if form is not None:
        return form
    shape = call.need("re").shape
    if shape[-1] not in RADICES:
        return f"it takes {', '.join(map(str, RADICES))} points, not {shape[-1]}"
    return None


def refuses_pairs(call: Call) -> str | None:
    if call.need("re").dtype == BF16:
        return "it takes complex64 arrays, whose planes are float32; these are bfloat16"
    return refuses(call)


def _matrices(inverse: bool, rows: Any = slice(None)) -> jax.Array:
    """The DFT matrix of 64: cosines, sines, and the sines' negatives, which make a difference a sum."""
    cosine, sine = dft(ROWS, inverse)
    return jnp.asarray(np.stack([cosine, sine, -sine])[:, rows], BF16)


def _single(planes: Any) -> jax.Array:
    return jnp.asarray(planes, jnp.float32)


def _constants(n: int, inverse: bool, scale: float, rows: Any, columns: Any) -> tuple[jax.Array, ...]:
    """The first pass's: its matrix, the factors after the product, and those between the passes, with the scale.

    k = k1 + n1 k2 of j = j1 n2 + j2, and k1 = row + 64 part: the factor of (k1, j2) is one of (row, j2) and one of
    (part, j2), of which the kernel takes powers. `rows` and `columns` are the orders that the kernel has them in.
    """
    radix1, radix2 = RADICES[n]
    n1, n2 = radix1 * ROWS, radix2 * ROWS
    lines = twiddles(n1, radix1, ROWS, inverse)[..., rows]
    base = twiddles(n, ROWS, n2, inverse)[:, rows][..., columns] * scale
    step = twiddles(n, 2, n2, inverse, ROWS)[:, 1, columns]
    return _matrices(inverse, rows), _single(lines), _single(base), _single(step)


def _in_groups(size: int, order: tuple[int, ...]) -> Any:
    """0 to size - 1, each len(order) of them in that order."""
    return np.arange(size).reshape(-1, len(order))[:, order].ravel()


def _between(n: int, signals: int) -> tuple[int, ...]:
    """The shape of the planes between the passes; see `first_pass`."""
    return signals * ROWS, math.prod(RADICES[n]) * ROWS // WIDE, WIDE


def _second_operands(middle: Any, n: int, inverse: bool) -> list[jax.Array]:
    radix2 = RADICES[n][1]
    planes = [plane.reshape(plane.shape[0], -1) for plane in middle]
    return [*planes, _matrices(inverse), _single(twiddles(radix2 * ROWS, radix2, ROWS, inverse))]


def two_passes(
    re: jax.Array, im: jax.Array, *, programs: int, inverse: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The transform of planes [..., n], float32 or bfloat16, times `scale`; planes of the same type out."""
    n = re.shape[-1]
    signals = math.prod(re.shape[:-1])
    radix1, radix2 = RADICES[n]
    n1, n2 = radix1 * ROWS, radix2 * ROWS
    how: dict[str, Any] = {"programs": programs, "inverse": inverse}
    # The rows of the first pass are the second's columns; float32 numbers leave that four side by side.
    rows = np.arange(ROWS) if re.dtype == BF16 else _in_groups(ROWS, QUADS)
    planes = [plane.reshape(signals * ROWS, radix1 * n2) for plane in (re, im)]
    constants = _constants(n, inverse, scale, rows, slice(None))
    between = [out_struct(_between(n, signals), BF16, re)] * 2
    middle = first_pass(*planes, *constants, out=between, radix=radix1, next_radix=radix2, **how)
    out = [out_struct((signals * n2, n1), re.dtype, re)] * 2
    real, imag = second_pass(*_second_operands(middle, n, inverse), out=out, radix=radix2, **how)
    return real.reshape(re.shape), imag.reshape(re.shape)


def two_passes_of_pairs(x: jax.Array, *, programs: int, inverse: bool, scale: float) -> jax.Array:
    """The transform of complex64 [..., n], times `scale`, without planes: see `complex_view`."""
    n = x.shape[-1]
    signals = math.prod(x.shape[:-1])
    radix1, radix2 = RADICES[n]
    n1, n2 = radix1 * ROWS, radix2 * ROWS
    how: dict[str, Any] = {"programs": programs, "inverse": inverse}
    constants = _constants(n, inverse, scale, np.arange(ROWS), _in_groups(n2, TURNS))
    between = [jax.ShapeDtypeStruct(_between(n, signals), BF16)] * 2
    first = functools.partial(first_pass, out=between, radix=radix1, next_radix=radix2, pairs=True, **how)
    middle = call_viewed(first, [x.reshape(signals * ROWS, radix1 * n2), *constants], between)
    out = jax.ShapeDtypeStruct((signals * n2, n1), jnp.complex64)
    second = functools.partial(second_pass, out=[as_numbers(out)], radix=radix2, **how)
    return call_viewed(second, _second_operands(middle, n, inverse), [out])[0].reshape(x.shape)


def fft_hopper_long(
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


def fft_hopper_pairs(
    re: jax.Array, im: jax.Array, *, config: ProgramsConfig, inverse: bool, norm: str, precision: str, axes: int,
    factors: None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The same for planes that are those of a complex array: XLA cancels the taking apart with the putting together."""
    del precision, axes, factors
    scale = scale_of(re.shape[-1:], norm, inverse)
    programs = config.programs * multiprocessors(current_target().device_kind)

    def whole(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = two_passes_of_pairs(lax.complex(re, im), programs=programs, inverse=inverse, scale=scale)
        return z.real, z.imag

    return jax.jit(whole)(re, im)


def faster(shape: tuple[int, ...], form: str) -> bool:
    """Whether the kernels were faster than cuFFT at such a length with so many numbers; `form` as in LENGTHS_FASTER."""
    return bool(shape) and shape[-1] in LENGTHS_FASTER[form] and math.prod(shape) >= LEAST


def _ahead_of(call: Call) -> tuple[str, ...]:
    """Before cuFFT for bfloat16 planes. Where float32 planes come in and go out `fft_planes` asks for it by name: a
    call does not tell them from those of a complex array, which the other kernel reads as they are."""
    plane = call.need("re")
    return ("xla",) if plane.dtype == BF16 and faster(plane.shape, "bfloat16") else ("xla_matmul",)


def _ahead_of_pairs(call: Call) -> tuple[str, ...]:
    return ("xla",) if faster(call.need("re").shape, "complex64") else ("xla_matmul",)


def _remark(call: Call) -> str:
    return f"on an H200 faster than cuFFT with {LEAST} numbers or more, by length and type"


def _implementation(name: str, run: Any, refuses: Any, ahead_of: Any) -> Implementation:
    return Implementation(
        name,
        run,
        platforms=("gpu",),
        refuses=refuses,
        ahead_of=ahead_of,
        remark=_remark,
        kernel=True,
        config_type=ProgramsConfig,
        candidates=lambda call: [ProgramsConfig()],
    )


LONG_IMPLEMENTATION = _implementation("hopper_long", fft_hopper_long, refuses, _ahead_of)
PAIRS_IMPLEMENTATION = _implementation("hopper_pairs", fft_hopper_pairs, refuses_pairs, _ahead_of_pairs)
