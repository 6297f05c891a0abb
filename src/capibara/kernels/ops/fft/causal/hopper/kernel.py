"""The program of a Hopper multiprocessor for long causal filters; `forward` beside this says what it computes.

Rows stay with their warpgroup: a product's result is rounded and multiplied in registers, and from there is the left
operand of the next, so that only X and W, which both warpgroups read, go through shared memory. While the matrix units
make one half of the columns, the threads work on the other.

In WGMMA's layout a thread has pairs of neighbouring numbers; read one by one from a matrix they are 4 bytes each. What
only this kernel reads, spectra and factors, lies in memory as the registers have it: 16 bytes a thread, and a warp's in
a row.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.fft.causal.hopper.products import LAYOUT, ROWS, added, ready
from capibara.kernels.pallas.hopper import LANE, SWIZZLE, hidden_zero, load, named, store_to_memory, swizzled

SIDE = 2 * ROWS
LONGEST = SIDE * SIDE
BLOCKS = 8  # of 64 x 64 in two planes of 128 x 128; see `_block`
BF16 = jnp.bfloat16
# Pallas lets the whole warpgroup meet around every store. The program says itself where threads must; without those
# barriers it ran right on an H200 and hardly faster (0.654 ms against 0.665), so they stay.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=False, lowering_semantics=LANE)
# A signal's numbers as they come from memory: a warp has two rows of 64, a thread four neighbours.
_LINES_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, ROWS), (2, ROWS), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_THREADS = 128
_VECTOR = 8  # bfloat16 numbers in 16 bytes
_PAIRS = _VECTOR // 2
_IN_ORDER_LAYOUT = plgpu.Layout.WG_STRIDED((ROWS, ROWS), vec_size=_VECTOR)
HALVES = (0, 1)
COSINE, SINE, MINUS_SINE = range(3)  # the planes of the matrix
NOTHING = None, None  # sums of nothing yet
PRODUCTS = 4  # that each function of products here starts, and does not wait for


# A jitted function of its own: passes of one shape, forward and backward, are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("programs", "batch", "dtype"))
def run(
    x: jax.Array, h: jax.Array | None, constants: tuple[jax.Array, jax.Array], *, programs: int, batch: int,
    dtype: Any = BF16, sizes: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """Matrices x [signals, 128, 128] by the spectra h, [filters, 8, 64, 64], as `dtype`, or, without h, their spectra.

    With `sizes`, what each signal is multiplied by and its result: x [signals, 64, 128], two signals at a time.
    """
    filters = h is not None
    kernel = plgpu.kernel(
        named("fft_causal", _program, programs=programs, batch=batch, filters=filters, pairs=sizes is not None),
        out_type=[out_struct(x.shape if filters else (x.shape[0], BLOCKS, ROWS, ROWS), dtype, x)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    return kernel(x, *([] if h is None else [h]), *(sizes or ()), *constants)[0]


def _program(x_hbm: Any, *rest: Any, programs: int, batch: int, filters: bool, pairs: bool) -> None:
    """Signals by the filters' spectra, or, where `filters` is False, the spectra of the signals.

    Turn t of all turns is signal (t mod batch, t // batch) of [batch, channels]: those of one channel run side by
    side, and its spectrum is read from memory once. Where `pairs`, it is two signals of a channel, half a batch apart,
    a warpgroup each, as the planes of one of 64 rows; of an odd batch the last is also read in the place of the one
    that is not there.
    """
    h_hbm: Any = rest[0] if filters else None
    inverses_hbm, sizes_hbm = rest[1:3] if pairs else (None, None)
    matrix_hbm, factors_hbm, out_hbm = rest[-3:]
    channels = x_hbm.shape[0] // batch
    turns = (batch + 1) // 2 if pairs else batch  # of a channel

    @functools.partial(
        pl.run_scoped,
        shared=plgpu.SMEM((BLOCKS, ROWS, ROWS), BF16, transforms=swizzled(BF16)),  # X in its first half, then W
        matrix=plgpu.SMEM((3 * BLOCKS // 2, ROWS, ROWS), BF16, transforms=swizzled(BF16)),
        factors=plgpu.SMEM((BLOCKS, ROWS, ROWS), BF16),
        constants_arrived=plgpu.Barrier(num_arrivals=2),
        # By both warpgroups:
        x_kept=plgpu.Barrier(num_arrivals=2),
        x_read=plgpu.Barrier(num_arrivals=2),
        w_kept=plgpu.Barrier(num_arrivals=2),
        w_read=plgpu.Barrier(num_arrivals=2),
        collective_axes="warpgroup",
    )
    def _scoped(
        shared: Any, matrix: Any, factors: Any, constants_arrived: Any, x_kept: Any, x_read: Any, w_kept: Any,
        w_read: Any,
    ) -> None:  # fmt: skip
        half = lax.axis_index("warpgroup")
        first = lax.axis_index("program")
        count = lax.div(turns * channels - first + programs - 1, programs)

        def element(step: Any) -> Any:
            """The turn's element of the batch; beyond it where there is none for this warpgroup."""
            own = lax.rem(first + step * programs, turns)
            return own + half * turns if pairs else own

        def signal(step: Any) -> Any:
            return lax.min(element(step), batch - 1) * channels + lax.div(first + step * programs, turns)

        def part(step: Any, column: int) -> tuple[Any, ...]:
            return signal(step), pl.ds(0 if pairs else half * ROWS, ROWS), pl.ds(column * ROWS, ROWS)

        def fetched(step: Any) -> list[Any]:
            """This warpgroup's rows of a signal, in registers."""
            rows = [load(x_hbm.at[part(step, column)], _LINES_LAYOUT, optimized=False) for column in HALVES]
            if not pairs:
                return rows
            inverse = inverses_hbm[signal(step)]
            return [value.astype(jnp.float32) * inverse for value in rows]

        def keep_signal(columns: list[Any]) -> None:
            for column, value in enumerate(columns):
                keep_block(shared.at[_block(0, half, column)], value.astype(BF16), _LINES_LAYOUT)
            plgpu.commit_smem()
            plgpu.barrier_arrive(x_kept)

        def factor(column: int) -> tuple[Any, Any]:
            re, im = (_wide(factors.at[_block(plane, half, column)]) for plane in range(2))
            return re, im

        def spectrum(step: Any, column: int) -> list[Any]:
            if not filters:
                return []
            own = h_hbm.at[lax.rem(signal(step), h_hbm.shape[0])]
            return [load_in_order(own.at[_block(plane, half, column)]) for plane in range(2)]

        def filtered(z: Any, h: list[Any]) -> tuple[Any, Any]:
            re, im = (plane.astype(jnp.float32) for plane in h)
            return _times(z, re, im)

        @pl.when(jnp.logical_and(half == 0, count > 0))
        def _() -> None:
            plgpu.copy_gmem_to_smem(matrix_hbm, matrix, constants_arrived)
            plgpu.copy_gmem_to_smem(factors_hbm, factors, constants_arrived)

        @pl.when(count > 0)
        def _() -> None:
            keep_signal(fetched(0))
            plgpu.barrier_wait(constants_arrived)

        def blocks(step: Any, stage: int) -> tuple[_Blocks, _Blocks]:
            zero = hidden_zero(step, stage)
            return _Blocks(matrix, zero), _Blocks(shared, zero)

        def forward(step: Any) -> Any:
            """The two halves of Z's columns, or, with filters, V's first, the filter for the other, and Z's other."""
            product = _first_of_pair if pairs else _first
            left, right = [product(*blocks(step, column), half, column) for column in HALVES]
            u_left = _times(ready(left, PRODUCTS), *factor(0))
            a, _ = blocks(step, 2)
            z_left = _second(NOTHING, a, u_left, 0, 0)
            u_right = _times(ready(right, PRODUCTS), *factor(1))
            plgpu.barrier_arrive(x_read)
            h = spectrum(step, 0)
            z_left = _second(z_left, a, u_right, 1, 0)
            a, _ = blocks(step, 3)
            z_right = _second(NOTHING, a, u_left, 0, 1)
            z_right = _second(z_right, a, u_right, 1, 1)
            whole = ready(z_left, 2 * PRODUCTS)
            if not filters:
                return whole, ready(z_right, 0)
            return filtered(whole, h), spectrum(step, 1), ready(z_right, 0)

        def keep_spectrum(step: Any, column: int, z: tuple[Any, Any]) -> None:
            for plane, value in enumerate(_rounded(*z)):
                store_in_order(out_hbm.at[signal(step), _block(plane, half, column)], value)

        def keep_w(column: int, y: Any) -> None:
            for plane, value in enumerate(_times_conjugate(y, *factor(column))):
                keep_block(shared.at[_block(plane, half, column)], value, LAYOUT)

        def back(step: Any, v_left: Any, h: list[Any], z_right: Any, following: Any) -> list[Any]:
            """W to shared memory, and the next signal's numbers, asked for meanwhile."""
            a, _ = blocks(step, 4)
            y_left = _third(NOTHING, a, v_left, 0, 0)
            v_right = filtered(z_right, h)
            y_left = _third(y_left, a, v_right, 1, 0)
            a, _ = blocks(step, 5)
            y_right = _third(NOTHING, a, v_left, 0, 1)
            y_right = _third(y_right, a, v_right, 1, 1)
            plgpu.barrier_wait(x_read)
            keep_w(0, ready(y_left, 2 * PRODUCTS))
            coming = fetched(following)
            keep_w(1, ready(y_right, 0))
            return coming

        def last(step: Any, coming: list[Any]) -> Any:
            product = _last_of_pair if pairs else _last
            y = [product(*blocks(step, 6 + column), half, column) for column in HALVES]
            narrow = [value.astype(BF16) for value in coming]
            columns = ready(y, 0)
            plgpu.barrier_arrive(w_read)
            return narrow, columns

        def keep_result(step: Any, columns: Any) -> None:
            for column, y in enumerate(columns):
                store_to_memory(out_hbm.at[part(step, column)], y.astype(out_hbm.dtype))

        @pl.loop(0, count)
        def _signal(step: Any) -> None:
            following = lax.min(step + 1, count - 1)
            plgpu.barrier_wait(x_kept)
            if not filters:
                halves = forward(step)
                coming = fetched(following)
                for column, z in enumerate(halves):
                    keep_spectrum(step, column, z)
                plgpu.barrier_wait(x_read)
                pl.when(step + 1 < count)(lambda: keep_signal(coming))
                return
            v_left, h, z_right = forward(step)
            coming = back(step, v_left, h, z_right, following)
            plgpu.commit_smem()
            plgpu.barrier_arrive(w_kept)
            plgpu.barrier_wait(w_kept)
            narrow, y = last(step, coming)
            plgpu.barrier_wait(w_read)
            pl.when(step + 1 < count)(lambda: keep_signal(narrow))
            if not pairs:
                keep_result(step, y)
                return
            size = sizes_hbm[signal(step)]
            pl.when(element(step) < batch)(lambda: keep_result(step, [columns * size for columns in y]))


def _wide(ref: Any) -> Any:
    return load_in_order(ref).astype(jnp.float32)


def _rounded(re: Any, im: Any) -> tuple[Any, Any]:
    return re.astype(BF16), im.astype(BF16)


def _times(z: Any, re: Any, im: Any) -> tuple[Any, Any]:
    return _rounded(z[0] * re - z[1] * im, z[0] * im + z[1] * re)


def _times_conjugate(z: Any, re: Any, im: Any) -> tuple[Any, Any]:
    return _rounded(z[0] * re + z[1] * im, z[1] * re - z[0] * im)


def _block(plane: Any, row: Any, column: Any) -> Any:
    """The place of a block among those of its matrix: of a plane, a half of its rows and a half of its columns."""
    return 4 * plane + 2 * row + column


class _Blocks:
    """Blocks in shared memory at places counted from a zero."""

    def __init__(self, ref: Any, zero: Any) -> None:
        self.ref, self.zero = ref, zero

    def __call__(self, plane: Any, row: Any, column: Any) -> Any:
        return self.ref.at[self.zero + _block(plane, row, column)]


def _first(matrix: Any, x: Any, half: Any, column: int) -> list[Any]:
    """A X for 64 rows and 64 columns: two planes."""
    sums: list[Any] = [None, None]
    for inner in HALVES:
        for plane in (COSINE, SINE):
            sums[plane] = added(sums[plane], matrix(plane, half, inner), x(0, inner, column))
    return sums


def _first_of_pair(matrix: Any, x: Any, half: Any, column: int) -> list[Any]:
    """The same where X has 64 rows, and the places of the other 64 have its imaginary plane."""
    re, im = (x(0, plane, column) for plane in range(2))
    real, imag = added(None, matrix(COSINE, half, 0), re), added(None, matrix(SINE, half, 0), re)
    return [added(real, matrix(MINUS_SINE, half, 0), im), added(imag, matrix(COSINE, half, 0), im)]


def _second(sums: Any, matrix: Any, planes: Any, inner: int, column: int) -> list[Any]:
    """What 64 columns of U give of U Aᵀ, for 64 of its columns, added to `sums`."""
    cosine, sine, minus = (matrix(plane, column, inner) for plane in range(3))
    re, im = planes
    add = functools.partial(added, turned=(False, True))
    real, imag = add(sums[0], re, cosine), add(sums[1], re, sine)
    return [add(real, im, minus), add(imag, im, cosine)]


def _third(sums: Any, matrix: Any, planes: Any, inner: int, column: int) -> list[Any]:
    """What 64 columns of V give of V conj(A), for 64 of its columns, added to `sums`."""
    cosine, sine, minus = (matrix(plane, inner, column) for plane in range(3))
    re, im = planes
    real, imag = added(sums[0], re, cosine), added(sums[1], re, minus)
    return [added(real, im, sine), added(imag, im, cosine)]


def _last(matrix: Any, w: Any, half: Any, column: int) -> Any:
    """The real part of A^H W for 64 rows and 64 columns."""
    total = None
    for inner in HALVES:
        for plane in (COSINE, SINE):
            total = added(total, matrix(plane, inner, half), w(plane, inner, column), turned=(True, False))
    return total


def _last_of_pair(matrix: Any, w: Any, half: Any, column: int) -> Any:
    """Of the first 64 rows of A^H W, the real part by one warpgroup, the imaginary one by the other."""
    total = None
    for inner in HALVES:
        total = added(total, matrix(COSINE, inner, 0), w(half, inner, column), turned=(True, False))
        total = added(total, matrix(SINE + half, inner, 0), w(1 - half, inner, column), turned=(True, False))
    return total


def places() -> np.ndarray:
    """For each number of a block in memory its place in the matrix, row · 64 + column: [64 · 64]."""
    part, thread, pair, number = np.indices((ROWS * ROWS // (_THREADS * _VECTOR), _THREADS, _PAIRS, 2))
    tile, lower = np.divmod(part * _PAIRS + pair, 2)  # WGMMA's registers: 8 columns, their rows 0 to 7 then 8 to 15
    warp, lane = np.divmod(thread, 32)
    row = 16 * warp + 8 * lower + lane // 4
    column = 8 * tile + 2 * (lane % 4) + number
    return (row * ROWS + column).reshape(-1)


def load_in_order(ref: Any) -> Any:
    """A block [64, 64] of bfloat16 numbers in the registers' order, in WGMMA's layout."""

    @plgpu.inline_mgpu(
        arg_types=(_IN_ORDER_LAYOUT,), return_type=plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, layout=LAYOUT)
    )
    def emit(_: Any, block: Any) -> Any:
        from jax.experimental.mosaic.gpu import utils

        pairs = [utils.vector_slice(v, slice(2 * i, 2 * i + 2)) for v in block.registers.flat for i in range(_PAIRS)]
        return _fragments(pairs, LAYOUT.to_mgpu())

    return emit(load(ref, _IN_ORDER_LAYOUT))


def store_in_order(ref: Any, value: Any) -> None:
    """The other way around, to global memory."""

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT,), return_type=plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, layout=_IN_ORDER_LAYOUT)
    )
    def emit(_: Any, block: Any) -> Any:
        from jax.experimental.mosaic.gpu import utils

        pairs = list(block.registers.flat)
        whole = [utils.vector_concat(pairs[i : i + _PAIRS]) for i in range(0, len(pairs), _PAIRS)]
        return _fragments(whole, _IN_ORDER_LAYOUT.to_mgpu())

    store_to_memory(ref, emit(value))


def keep_block(ref: Any, value: Any, layout: Any) -> None:
    """A block to shared memory. Stores by `ref[...] = x` also read what was there, which nothing takes out again."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(BF16)), layout))
    def emit(_: Any, to: Any, block: Any) -> None:
        from jax.experimental.mosaic.gpu import warpgroup_barrier

        warpgroup_barrier()
        block.store_tiled(to, swizzle=SWIZZLE)
        warpgroup_barrier()

    emit(ref, value)


def _fragments(registers: list[Any], layout: Any) -> Any:
    from jax.experimental.mosaic.gpu import FragmentedArray

    placed = np.empty(len(registers), object)
    placed[:] = registers
    shape = layout.registers_shape((ROWS, ROWS))
    return FragmentedArray(_registers=placed.reshape(shape), _layout=layout, _is_signed=None)
