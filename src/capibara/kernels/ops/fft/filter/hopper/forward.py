"""The filter in bfloat16 for Hopper, in Pallas (Mosaic GPU): two transforms of 4096 points and a product in one pass.

A length of q · 4096 has its radix q done by XLA on the way in and out, elementwise, and only on the numbers that are
there: what a longer length is padded with is never stored. Between them each residue of the frequencies by q is a
batch of 4096-point transforms, which stay in shared memory with the product of spectra. The transform back is the
transform of the conjugate, so both go by the same steps; see `capibara.kernels.ops.fft.hopper`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.fft.hopper.forward import LAYOUT, SIDE, TILE, complex_product
from capibara.kernels.ops.fft.twiddles import dft, twiddles
from capibara.kernels.pallas.hopper import ProgramsConfig, load, multiprocessors, named, refuses_chip, swizzled

LARGEST_RADIX = 16  # beyond, the elementwise work of XLA's radix would be more than the memory's
BF16 = jnp.bfloat16


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if call.params["precision"] != "bfloat16":
        return "its products are of bfloat16 numbers; precision='float32' was asked for"
    if 0 in call.need("re").shape:
        return "the operands are empty"
    n = call.need("h_re").shape[-1]
    if n % TILE or n // TILE > LARGEST_RADIX:
        return f"it takes multiples of {TILE} points up to {LARGEST_RADIX * TILE}, not {n}"
    return None


def _program(
    re_hbm: Any, im_hbm: Any, h_re_hbm: Any, h_im_hbm: Any, turn_hbm: Any, roots_hbm: Any, factors_hbm: Any,
    out_re_hbm: Any, out_im_hbm: Any, *, programs: int, conjugate: bool,
) -> None:  # fmt: skip
    tiles, channels = re_hbm.shape[0], h_re_hbm.shape[0]
    stride = 2 * programs
    planes = plgpu.SMEM((2, 2, SIDE, SIDE), BF16, transforms=swizzled(BF16))

    @functools.partial(
        pl.run_scoped,
        in_smem=planes,
        spectrum=planes,
        between_smem=planes,
        out_smem=planes,
        roots_smem=plgpu.SMEM((2, SIDE, SIDE), BF16, transforms=swizzled(BF16)),
        factors_smem=plgpu.SMEM((2, SIDE, SIDE), jnp.float32, transforms=swizzled(jnp.float32)),
        turn_smem=plgpu.SMEM((2, SIDE, SIDE), jnp.float32, transforms=swizzled(jnp.float32)),
        constants_arrived=plgpu.Barrier(num_arrivals=3),
        arrived=plgpu.Barrier(num_arrivals=2, num_barriers=2),  # a tile's two planes, for each warpgroup
        spectrum_arrived=plgpu.Barrier(num_arrivals=2, num_barriers=2),
        collective_axes="warpgroup",
    )
    def _scoped(
        in_smem: Any, spectrum: Any, between_smem: Any, out_smem: Any, roots_smem: Any, factors_smem: Any,
        turn_smem: Any, constants_arrived: Any, arrived: Any, spectrum_arrived: Any,
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("program") * 2 + warpgroup
        count = lax.div(tiles - first + stride - 1, stride)

        def fetch(step: Any) -> None:
            for plane, hbm in enumerate((re_hbm, im_hbm)):
                tile = hbm.at[first + step * stride]
                plgpu.copy_gmem_to_smem(tile, in_smem.at[warpgroup, plane], arrived.at[warpgroup])

        def fetch_spectrum(step: Any) -> None:
            for plane, hbm in enumerate((h_re_hbm, h_im_hbm)):
                tile = hbm.at[lax.rem(first + step * stride, channels)]
                plgpu.copy_gmem_to_smem(tile, spectrum.at[warpgroup, plane], spectrum_arrived.at[warpgroup])

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(roots_hbm, roots_smem, constants_arrived)
            plgpu.copy_gmem_to_smem(factors_hbm, factors_smem, constants_arrived)
            plgpu.copy_gmem_to_smem(turn_hbm, turn_smem, constants_arrived)

        @pl.when(count > 0)
        def _() -> None:
            fetch(0)
            fetch_spectrum(0)

        plgpu.barrier_wait(constants_arrived)

        def keep(where: Any, re: Any, im: Any) -> None:
            """Two planes to shared memory, rounded, where the next product or the copy engine reads them."""
            where[warpgroup, 0] = re.astype(BF16)
            where[warpgroup, 1] = im.astype(BF16)
            plgpu.commit_smem()

        def transform(source: Any, release: Any) -> tuple[Any, Any]:
            """The transform of a tile in shared memory; `release` is called when the tile has been read."""
            yr, yi = complex_product(roots_smem, 0, source.at[warpgroup, 0], source.at[warpgroup, 1])
            release()
            wr, wi = load(factors_smem.at[0], LAYOUT), load(factors_smem.at[1], LAYOUT)
            keep(between_smem, yr * wr - yi * wi, yr * wi + yi * wr)
            halves = (between_smem.at[warpgroup, plane].transpose((1, 0)) for plane in range(2))
            return complex_product(roots_smem, 0, *halves)

        @pl.loop(0, count)
        def _tile(step: Any) -> None:
            def next_after(ask: Any) -> None:
                plgpu.commit_smem()  # every thread is done with what the copy engine may now overwrite
                pl.when(step + 1 < count)(functools.partial(ask, step + 1))

            plgpu.barrier_wait(arrived.at[warpgroup])
            zr, zi = transform(in_smem, functools.partial(next_after, fetch))
            plgpu.barrier_wait(spectrum_arrived.at[warpgroup])
            hr, hi = (load(spectrum.at[warpgroup, plane], LAYOUT).astype(jnp.float32) for plane in range(2))
            if conjugate:
                hi = -hi
            # The conjugate, whose transform is the conjugate of the transform back.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
            keep(out_smem, zr * hr - zi * hi, -(zr * hi + zi * hr))
            next_after(fetch_spectrum)
            yr, yi = transform(out_smem, lambda: None)
            tr, ti = load(turn_smem.at[0], LAYOUT), load(turn_smem.at[1], LAYOUT)
            keep(out_smem, yr * tr + yi * ti, yr * ti - yi * tr)
            for plane, hbm in enumerate((out_re_hbm, out_im_hbm)):
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, plane], hbm.at[first + step * stride])

        plgpu.wait_smem_to_gmem(0)


# One program for every residue: it is traced and compiled once.
@functools.partial(jax.jit, static_argnames=("programs", "conjugate"))
def filter_tiles(
    re: jax.Array, im: jax.Array, h_re: jax.Array, h_im: jax.Array, turn: jax.Array, *, programs: int, conjugate: bool
) -> tuple[jax.Array, jax.Array]:
    """`turn` times the filter of planes [tiles, 64, 64] with the spectra [C, 64, 64], tile t with spectrum t mod C.

    The transform back is without its scale, which the planes of `turn`, [2, 64, 64], may have.
    """
    matrices = jnp.asarray(dft(SIDE, False), BF16)
    factors = jnp.asarray(twiddles(TILE, SIDE, SIDE, False), jnp.float32)
    kernel = plgpu.kernel(
        named("fft_filter", _program, programs=programs, conjugate=conjugate),
        out_type=[out_struct(re.shape, BF16, re)] * 2,
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
    )
    real, imag = kernel(re, im, h_re, h_im, turn, matrices, factors)
    return real, imag


def _pieces(plane: jax.Array) -> list[jax.Array]:
    """[P, C, T] cut along time into pieces of 4096, the last one padded."""
    short = -plane.shape[-1] % TILE
    plane = jnp.pad(plane, ((0, 0), (0, 0), (0, short))) if short else plane
    return [plane[..., at : at + TILE] for at in range(0, plane.shape[-1], TILE)]


def _rotated(re: Any, im: Any, cosine: Any, sine: Any) -> tuple[Any, Any]:
    return re * cosine - im * sine, re * sine + im * cosine


def fft_filter_hopper(
    re: jax.Array, im: jax.Array, h_re: jax.Array, h_im: jax.Array, *, config: ProgramsConfig, conjugate: bool,
    precision: str,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """ifft(fft(z) · H); see the module's text."""
    del precision  # refused unless bfloat16
    pairs, channels, time = re.shape
    n = h_re.shape[-1]
    q = n // TILE
    programs = config.programs * multiprocessors(current_target().device_kind)

    def whole(re: jax.Array, im: jax.Array, h_re: jax.Array, h_im: jax.Array) -> tuple[jax.Array, jax.Array]:
        xr, xi = _pieces(re), _pieces(im)
        cosine, sine = dft(q, False)
        turn = twiddles(n, q, TILE, False).astype("float32")
        filtered = []
        for k in range(q):  # frequencies k, k + q, ...
            parts = [_rotated(a, b, cosine[k, j], sine[k, j]) for j, (a, b) in enumerate(zip(xr, xi, strict=True))]
            summed = (sum(part[0] for part in parts), sum(part[1] for part in parts))
            tiles = [x.astype(BF16).reshape(-1, SIDE, SIDE) for x in _rotated(*summed, turn[0, k], turn[1, k])]
            own = [h.reshape(channels, TILE, q)[..., k].astype(BF16).reshape(-1, SIDE, SIDE) for h in (h_re, h_im)]
            back = (turn[:, k] / n * np.array([[1.0], [-1.0]], "float32")).reshape(2, SIDE, SIDE)
            planes = filter_tiles(*tiles, *own, jnp.asarray(back), programs=programs, conjugate=conjugate)
            filtered.append([x.reshape(pairs, channels, TILE).astype(jnp.float32) for x in planes])
        results = []
        for j in range(math.ceil(time / TILE)):
            parts = [_rotated(a, b, cosine[j, k], -sine[j, k]) for k, (a, b) in enumerate(filtered)]
            results.append((sum(part[0] for part in parts), sum(part[1] for part in parts)))
        real, imag = (jnp.concatenate(pieces, -1)[..., :time] for pieces in zip(*results, strict=True))
        return real, imag

    # As one program: partitioning over a mesh takes functions without constants of their own.
    return jax.jit(whole)(re, im, h_re, h_im)


IMPLEMENTATION = Implementation(
    "hopper",
    fft_filter_hopper,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=ProgramsConfig,
    candidates=lambda call: [ProgramsConfig()],
)
