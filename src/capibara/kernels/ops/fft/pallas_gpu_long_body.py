"""What the two passes of a long transform on Hopper share; see `pallas_gpu_long`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.pallas.hopper import load

ROWS = 64
COLUMNS = 16  # that one warpgroup transforms together: what its registers hold
LAYOUT = plgpu.Layout.WGMMA
BF16 = jnp.bfloat16
# Pallas would let the whole warpgroup meet around every store. The programs say themselves where threads must; so they
# ran on an H200, with the same bits twice and a fifth faster.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
Planes = tuple[Any, Any]


def _times_root(z: Planes, k: int, n: int, inverse: bool) -> Planes:
    """z · exp(∓2πi k / n) for k < n / 2; the eighth turns are written out."""
    re, im = z
    if k == 0:
        return z
    if 4 * k == n:
        return (-im, re) if inverse else (im, -re)
    half = math.sqrt(0.5)
    if 8 * k == n:
        return ((re - im) * half, (re + im) * half) if inverse else ((re + im) * half, (im - re) * half)
    assert 8 * k == 3 * n
    return ((-re - im) * half, (re - im) * half) if inverse else ((im - re) * half, (-re - im) * half)


def small_transform(parts: list[Planes], inverse: bool) -> list[Planes]:
    """The transform over a list of 1, 2, 4 or 8 arrays."""
    n = len(parts)
    if n == 1:
        return parts
    even, odd = small_transform(parts[0::2], inverse), small_transform(parts[1::2], inverse)
    turned = [_times_root(z, k, n, inverse) for k, z in enumerate(odd)]
    sums = [(a + c, b + d) for (a, b), (c, d) in zip(even, turned, strict=True)]
    return sums + [(a - c, b - d) for (a, b), (c, d) in zip(even, turned, strict=True)]


def times(z: Planes, w: Planes) -> Planes:
    (a, b), (c, d) = z, w
    return a * c - b * d, a * d + b * c


def spread(planes: Planes, axis: int, shape: tuple[int, int]) -> Planes:
    """Lines of numbers along an axis as matrices of equal rows or columns."""
    re, im = (lax.broadcast_in_dim(plane, shape, [axis]) for plane in planes)
    return re, im


def after_product(parts: list[Planes], lines: Any, inverse: bool) -> list[Planes]:
    """The factors after the product, one for each row of a part, and the small transform over the parts."""
    turned = parts[:1]
    for part, z in enumerate(parts[1:], 1):
        re, im = (load(lines.at[plane, part], LAYOUT.reduce(1), optimized=False) for plane in range(2))
        turned.append(times(z, spread((re, im), 0, z[0].shape)))
    return small_transform(turned, inverse)


def add_products(real: Any, imag: Any, matrices: Sequence[Any], re: Any, im: Any) -> None:
    """Start the matrix times (re + i·im), of operands in shared memory; `matrices` in registers."""
    cosine, sine, minus = matrices
    plgpu.wgmma(real, cosine, re)
    plgpu.wgmma(real, minus, im)
    plgpu.wgmma(imag, cosine, im)
    plgpu.wgmma(imag, sine, re)


def load_matrices(matrices_hbm: Any) -> list[Any]:
    """The matrix in registers for the whole program: from shared memory each narrow product would read it again."""
    return [load(matrices_hbm.at[plane], LAYOUT, optimized=False) for plane in range(3)]


def start(program: Callable[..., None], operands: Sequence[jax.Array], out: Sequence[Any], programs: int) -> Any:
    kernel = plgpu.kernel(
        functools.partial(program, programs=programs),
        out_type=list(out),
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    return tuple(kernel(*operands))
