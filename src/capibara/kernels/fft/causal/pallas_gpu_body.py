"""The program of a Hopper multiprocessor for long causal filters; `pallas_gpu` beside this says what it computes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.hopper import load, store_to_memory, swizzled

ROWS = 64  # of one wgmma, and of a block
SIDE = 2 * ROWS
LONGEST = SIDE * SIDE
BLOCKS = 8  # of 64 x 64 in two planes of 128 x 128; see `block`
HALVES = (0, 1)
LAYOUT = plgpu.Layout.WGMMA
BF16 = jnp.bfloat16
# Pallas lets the whole warpgroup meet around every store. The program says itself where threads must; without those
# barriers it ran right on an H200 and no faster (1.57 ms against 1.53), so they stay.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=False)


def block(plane: int, row: Any, column: Any) -> Any:
    """The place of a block among the eight: of a plane, a half of its rows and a half of its columns."""
    return 4 * plane + 2 * row + column


def _sums(products: Any, count: int) -> Any:
    """What `products` makes of `count` accumulators [64, 64]."""
    return pl.run_scoped(products, *(plgpu.WGMMAAccumulatorRef((ROWS, ROWS), jnp.float32) for _ in range(count)))


def _transposed(ref: Any) -> Any:
    return plgpu.transpose_ref(ref, (1, 0))


def _first(matrix: Any, x: Any, half: Any, column: int) -> Any:
    """A X for 64 rows and 64 columns: two planes."""

    def products(real: Any, imag: Any) -> Any:
        for inner in HALVES:
            plgpu.wgmma(real, matrix.at[block(0, half, inner)], x.at[inner, column])
            plgpu.wgmma(imag, matrix.at[block(1, half, inner)], x.at[inner, column])
        plgpu.wgmma_wait(0)
        return real[...], imag[...]

    return _sums(products, 2)


def _second(matrix: Any, rows: Any, half: Any, column: int) -> Any:
    """U Aᵀ for 64 rows of U and 64 columns."""

    def products(real: Any, minus: Any, imag: Any) -> Any:
        for inner in HALVES:
            re, im = (rows.at[block(plane, half, inner)] for plane in range(2))
            cosine, sine = (_transposed(matrix.at[block(plane, column, inner)]) for plane in range(2))
            plgpu.wgmma(real, re, cosine)
            plgpu.wgmma(minus, im, sine)
            plgpu.wgmma(imag, re, sine)
            plgpu.wgmma(imag, im, cosine)
        plgpu.wgmma_wait(0)
        return real[...] - minus[...], imag[...]

    return _sums(products, 3)


def _third(matrix: Any, rows: Any, half: Any, column: int) -> Any:
    """V conj(A) for 64 rows of V and 64 columns."""

    def products(real: Any, minus: Any, imag: Any) -> Any:
        for inner in HALVES:
            re, im = (rows.at[block(plane, half, inner)] for plane in range(2))
            cosine, sine = (matrix.at[block(plane, inner, column)] for plane in range(2))
            plgpu.wgmma(real, re, cosine)
            plgpu.wgmma(real, im, sine)
            plgpu.wgmma(minus, re, sine)
            plgpu.wgmma(imag, im, cosine)
        plgpu.wgmma_wait(0)
        return real[...], imag[...] - minus[...]

    return _sums(products, 3)


def _last(matrix: Any, w: Any, half: Any, column: int) -> Any:
    """The real part of A^H W for 64 rows and 64 columns."""

    def products(real: Any) -> Any:
        for inner in HALVES:
            for plane in range(2):
                plgpu.wgmma(real, _transposed(matrix.at[block(plane, inner, half)]), w.at[block(plane, inner, column)])
        plgpu.wgmma_wait(0)
        return real[...]

    return _sums(products, 1)


def _wide(ref: Any) -> Any:
    return load(ref, LAYOUT).astype(jnp.float32)


def _rounded(re: Any, im: Any) -> tuple[Any, Any]:
    return re.astype(BF16), im.astype(BF16)


def _program(x_hbm: Any, *rest: Any, programs: int, batch: int, conjugate: bool, filters: bool) -> None:
    """Signals by the filters' spectra, or, where `filters` is False, the spectra of the signals.

    Turn t of all turns is signal (t mod batch, t // batch) of [batch, channels]: those of one channel run side by
    side, and its spectrum is read from memory once.
    """
    h_hbm: Any = rest[0] if filters else None
    matrix_hbm, factors_hbm, out_hbm = rest[-3:]
    signals = x_hbm.shape[0]
    channels = signals // batch
    blocks = plgpu.SMEM((BLOCKS, ROWS, ROWS), BF16, transforms=swizzled(BF16))

    @functools.partial(
        pl.run_scoped,
        x=plgpu.SMEM((2, 2, ROWS, ROWS), BF16, transforms=swizzled(BF16)),
        held=blocks,  # (A X) · T, then Z · H, then W, each warpgroup its rows
        matrix=blocks,
        factors=blocks,
        constants_arrived=plgpu.Barrier(num_arrivals=2),
        # By both warpgroups:
        x_made=plgpu.Barrier(num_arrivals=2),
        x_read=plgpu.Barrier(num_arrivals=2),
        w_made=plgpu.Barrier(num_arrivals=2),
        w_read=plgpu.Barrier(num_arrivals=2),
        collective_axes="warpgroup",
    )
    def _scoped(
        x: Any, held: Any, matrix: Any, factors: Any, constants_arrived: Any, x_made: Any, x_read: Any, w_made: Any,
        w_read: Any,
    ) -> None:  # fmt: skip
        half = lax.axis_index("warpgroup")
        first = lax.axis_index("program")
        count = lax.div(signals - first + programs - 1, programs)

        def signal(step: Any) -> Any:
            turn = first + step * programs
            return lax.rem(turn, batch) * channels + lax.div(turn, batch)

        def part(step: Any, column: int) -> tuple[Any, ...]:
            return signal(step), pl.ds(half * ROWS, ROWS), pl.ds(column * ROWS, ROWS)

        def fetched(step: Any) -> list[Any]:
            """This warpgroup's rows of a signal, in registers."""
            return [load(x_hbm.at[part(step, column)], LAYOUT, optimized=False) for column in HALVES]

        def keep_signal(columns: list[Any]) -> None:
            for column, value in enumerate(columns):
                x[half, column] = value.astype(BF16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(x_made)

        @pl.when(jnp.logical_and(half == 0, count > 0))
        def _() -> None:
            plgpu.copy_gmem_to_smem(matrix_hbm, matrix, constants_arrived)
            plgpu.copy_gmem_to_smem(factors_hbm, factors, constants_arrived)

        @pl.when(count > 0)
        def _() -> None:
            keep_signal(fetched(0))
            plgpu.barrier_wait(constants_arrived)

        def turned(planes: tuple[Any, Any], column: int) -> tuple[Any, Any]:
            re, im = planes
            tr, ti = (_wide(factors.at[block(plane, half, column)]) for plane in range(2))
            return _rounded(re * tr - im * ti, re * ti + im * tr)

        def turned_back(planes: tuple[Any, Any], column: int) -> tuple[Any, Any]:
            re, im = planes
            tr, ti = (_wide(factors.at[block(plane, half, column)]) for plane in range(2))
            return _rounded(re * tr + im * ti, im * tr - re * ti)

        def keep(columns: list[tuple[Any, Any]]) -> None:
            """Planes of this warpgroup's rows to shared memory, for the next product or the copy engine."""
            plgpu.commit_smem()  # every warp's part of the product before is done with them
            for column, planes in enumerate(columns):
                for plane, value in enumerate(planes):
                    held[block(plane, half, column)] = value
            plgpu.commit_smem()

        def filtered(step: Any, column: int) -> tuple[Any, Any]:
            """(U Aᵀ) · H; what is read from memory is asked for before the product."""
            own = h_hbm.at[lax.rem(signal(step), h_hbm.shape[0])]
            spectrum = [load(own.at[block(plane, half, column)], LAYOUT, optimized=False) for plane in range(2)]
            zr, zi = _second(matrix, held, half, column)
            hr, hi = (plane.astype(jnp.float32) for plane in spectrum)
            if conjugate:
                hi = -hi
            return _rounded(zr * hr - zi * hi, zr * hi + zi * hr)

        @pl.loop(0, count)
        def _signal(step: Any) -> None:
            plgpu.barrier_wait(x_made)
            rows = [turned(_first(matrix, x, half, column), column) for column in HALVES]
            plgpu.commit_smem()  # every warp's part of the product is done
            plgpu.barrier_arrive(x_read)
            following = lax.min(step + 1, count - 1)
            if not filters:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the spectrum before has left
                keep(rows)
                coming = fetched(following)
                keep([_rounded(*_second(matrix, held, half, column)) for column in HALVES])
                for plane in range(2):
                    for column in HALVES:
                        to = out_hbm.at[signal(step), block(plane, half, column)]
                        plgpu.copy_smem_to_gmem(held.at[block(plane, half, column)], to)
            else:
                pl.when(step > 0)(lambda: plgpu.barrier_wait(w_read))
                keep(rows)
                keep([filtered(step, column) for column in HALVES])
                keep([turned_back(_third(matrix, held, half, column), column) for column in HALVES])
                plgpu.barrier_arrive(w_made)
                plgpu.barrier_wait(w_made)
                coming = fetched(following)  # on its way during the last product
                made = [_last(matrix, held, half, column) for column in HALVES]
                plgpu.commit_smem()  # as above
                plgpu.barrier_arrive(w_read)
                for column, y in enumerate(made):
                    store_to_memory(out_hbm.at[part(step, column)], y * (1 / LONGEST))
            plgpu.barrier_wait(x_read)
            pl.when(step + 1 < count)(lambda: keep_signal(coming))

        if not filters:
            plgpu.wait_smem_to_gmem(0)


def run(
    x: jax.Array, h: jax.Array | None, constants: tuple[jax.Array, jax.Array], out: Any, *, programs: int, batch: int,
    conjugate: bool,
) -> jax.Array:  # fmt: skip
    """Matrices x [signals, 128, 128] by the spectra h, [filters, 8, 64, 64], or, without h, their spectra."""
    kernel = plgpu.kernel(
        functools.partial(_program, programs=programs, batch=batch, conjugate=conjugate, filters=h is not None),
        out_type=[out],
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    return kernel(x, *([] if h is None else [h]), *constants)[0]
