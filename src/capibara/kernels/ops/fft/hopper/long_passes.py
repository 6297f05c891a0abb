"""The two passes of a long transform on Hopper; `long` says what they compute.

Each is a persistent program of two warpgroups with tiles of their own: 64 rows by 16 columns for each part of the small
radix. Tiles arrive by the copy engine while the one before is multiplied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.fft.hopper.moves import (
    LAYOUT,
    keep_exchanged,
    keep_operand,
    keep_result,
    split_pairs,
    store_pairs,
    store_quads,
)
from capibara.kernels.pallas.hopper import LANE, load, named, swizzled

ROWS = 64
COLUMNS = 16  # that one warpgroup transforms together: what its registers hold
HALF = COLUMNS // 2
WIDE = 256  # numbers of the longest line that one copy moves
BF16 = jnp.bfloat16
# Pallas would let the whole warpgroup meet around every store. The programs say themselves where threads must; so they
# ran on an H200, with the same bits twice and a fifth faster.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE)
Planes = tuple[Any, Any]


def first_pass(
    *operands: jax.Array, out: Sequence[Any], programs: int, radix: int, next_radix: int, inverse: bool,
    pairs: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Planes [signals · 64, radix · width], or pairs of numbers, and the pass's constants, to the second pass's planes.

    Those are [signals · 64, 64 · radix · next_radix], by WIDE: row by row, for each 16 rows of a transform here two
    halves of 8, in each the parts there.
    """
    program = functools.partial(_first_program, radix=radix, next_radix=next_radix, inverse=inverse, pairs=pairs)
    return _launch(program, operands, out, programs)


def _first_program(*refs: Any, programs: int, radix: int, next_radix: int, inverse: bool, pairs: bool) -> None:
    """Transforms of 64 · radix points down the columns of [signals · 64, radix · width] planes.

    A warpgroup keeps to the same 16 columns of all its signals, so that it fetches their factors once. Bfloat16
    numbers arrive as the products take them. Float32 ones are rounded first; with `pairs` they are real and imaginary
    by turns, and the columns of each eight are in the order of TURNS from there on.
    """
    x_hbm, (matrices_hbm, lines_hbm, base_hbm, step_hbm), out_hbm = refs[:-6], refs[-6:-2], refs[-2:]
    dtype = x_hbm[0].dtype
    rounded = dtype == BF16
    each = 2 if pairs else 1  # numbers of a column
    columns_read = each * COLUMNS
    signals = x_hbm[0].shape[0] // ROWS
    blocks = x_hbm[0].shape[1] // radix // columns_read
    signals_at_once = 2 * programs // blocks
    assert signals_at_once, f"{blocks} warpgroups or more, not {2 * programs}"
    slots = len(x_hbm) * radix
    stages = 2 if rounded else 1  # tiles on their way to a warpgroup: what shared memory holds
    rows_out = COLUMNS // next_radix
    out_spec = plgpu.SMEM((2, 2, rows_out, *out_hbm[0].shape[1:]), BF16)
    operand_spec = plgpu.SMEM((2, 2, radix * COLUMNS, ROWS), BF16, transforms=swizzled(BF16))

    @functools.partial(
        pl.run_scoped,
        in_smem=plgpu.SMEM(
            (2 * stages, slots, ROWS, columns_read),
            dtype,
            transforms=swizzled(dtype, columns_read * jnp.dtype(dtype).itemsize),
        ),
        # A tile that has been rounded is gone when its result is there.
        shared=out_spec if rounded else plgpu.RefUnion(out_spec, operand_spec),
        lines=plgpu.SMEM((2, 2, radix, ROWS), jnp.float32),
        base=plgpu.SMEM((2, 2, ROWS, COLUMNS), jnp.float32, transforms=swizzled(jnp.float32, 4 * COLUMNS)),
        step=plgpu.SMEM((2, 2, COLUMNS), jnp.float32),
        constants_arrived=plgpu.Barrier(num_arrivals=3, num_barriers=2),
        arrived=plgpu.Barrier(num_arrivals=slots, num_barriers=2 * stages),  # for each warpgroup
        collective_axes="warpgroup",
    )
    def _scoped(
        in_smem: Any, shared: Any, lines: Any, base: Any, step: Any, constants_arrived: Any, arrived: Any
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("program") * 2 + warpgroup
        first, block = lax.div(worker, blocks), lax.rem(worker, blocks)
        count = jnp.where(first < signals_at_once, lax.div(signals - first + signals_at_once - 1, signals_at_once), 0)
        out_smem: Any
        operand: Any
        out_smem, operand = (shared, None) if rounded else shared

        def stage(turn: Any) -> Any:
            return warpgroup * stages + lax.rem(turn, stages) if stages > 1 else warpgroup

        def fetch(turn: Any) -> None:
            rows = pl.ds((first + turn * signals_at_once) * ROWS, ROWS)
            slot = stage(turn)
            for plane, hbm in enumerate(x_hbm):
                for part in range(radix):
                    own = hbm.at[rows, pl.ds((part * blocks + block) * columns_read, columns_read)]
                    plgpu.copy_gmem_to_smem(own, in_smem.at[slot, plane * radix + part], arrived.at[slot])

        for early in range(stages):
            pl.when(count > early)(functools.partial(fetch, early))
        ready = constants_arrived.at[warpgroup]
        columns = pl.ds(block * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(lines_hbm, lines.at[warpgroup], ready)
        plgpu.copy_gmem_to_smem(base_hbm.at[:, :, columns], base.at[warpgroup], ready)
        plgpu.copy_gmem_to_smem(step_hbm.at[:, columns], step.at[warpgroup], ready)
        matrices = _load_matrices(matrices_hbm)
        plgpu.barrier_wait(ready)

        def round_tile(tile: Any) -> None:
            """The float32 numbers as bfloat16 planes, transposed, where the products read them."""
            for part in range(radix):
                if pairs:
                    planes = split_pairs(load(tile.at[part], LAYOUT))
                else:
                    planes = tuple(load(tile.at[plane * radix + part], LAYOUT) for plane in range(2))
                for plane, value in enumerate(planes):
                    own = operand.at[warpgroup, plane, pl.ds(part * COLUMNS, COLUMNS)]
                    keep_operand(own, value.astype(BF16))
            plgpu.commit_smem()

        def products(tile: Any, *accs: Any) -> list[Planes]:
            for part in range(radix):
                real, imag = accs[2 * part : 2 * part + 2]
                _add_products(real, imag, matrices, tile.at[part], tile.at[radix + part])
            plgpu.wgmma_wait(0)
            return [(accs[2 * part][...], accs[2 * part + 1][...]) for part in range(radix)]

        def products_at_once(real: Any, imag: Any) -> list[Planes]:
            re, im = (operand.at[warpgroup, plane].transpose((1, 0)) for plane in range(2))
            _add_products(real, imag, matrices, re, im)
            plgpu.wgmma_wait(0)
            re, im = real[...], imag[...]
            columns = [slice(part * COLUMNS, (part + 1) * COLUMNS) for part in range(radix)]
            return [(re[:, own], im[:, own]) for own in columns]

        def multiplied(tile: Any) -> list[Planes]:
            count, columns = (2 * radix, COLUMNS) if rounded else (2, radix * COLUMNS)
            accs = (plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32) for _ in range(count))
            return pl.run_scoped(functools.partial(products, tile) if rounded else products_at_once, *accs)

        def with_factors(parts: list[Planes]) -> list[Planes]:
            """Times the factors between the passes. A part's are those of the first and powers of the second's."""
            own = [load(base.at[warpgroup, plane], LAYOUT) for plane in range(2)]
            of_rows = (own[0], own[1])
            line = [load(step.at[warpgroup, plane], LAYOUT.reduce(0), optimized=False) for plane in range(2)]
            powers: list[Planes] = [(line[0], line[1])]
            while len(powers) < radix - 1:
                power = len(powers) + 1
                powers.append(_times(powers[power // 2 - 1], powers[power - power // 2 - 1]))
            done = [_times(parts[0], of_rows)]
            for z, own_power in zip(parts[1:], powers[: radix - 1], strict=True):
                done.append(_times(z, _times(of_rows, _spread(own_power, 1, (ROWS, COLUMNS)))))
            return done

        @pl.loop(0, count)
        def _tile(turn: Any) -> None:
            tile = in_smem.at[stage(turn)]
            plgpu.barrier_wait(arrived.at[stage(turn)])

            def ask_for_next() -> None:
                pl.when(turn + stages < count)(functools.partial(fetch, turn + stages))

            def wait_for_last() -> None:
                """What was made of the tile before has left."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            if not rounded:
                wait_for_last()
                round_tile(tile)
                ask_for_next()
            parts = multiplied(tile)
            plgpu.commit_smem()  # every warp's part of the products is done with the tile
            if rounded:
                ask_for_next()
            parts = with_factors(_after_product(parts, lines.at[warpgroup], inverse))
            if rounded:
                wait_for_last()
            for part, z in enumerate(parts):
                for plane in range(2):
                    value = z[plane].astype(BF16)
                    keep_exchanged(out_smem.at[warpgroup, plane], value, part, next_radix, in_turns=pairs)
            plgpu.commit_smem()
            row = (first + turn * signals_at_once) * ROWS + block * rows_out
            for plane, hbm in enumerate(out_hbm):
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, plane], hbm.at[pl.ds(row, rows_out)])

        plgpu.wait_smem_to_gmem(0)


def second_pass(
    *operands: jax.Array, out: Sequence[Any], programs: int, radix: int, inverse: bool
) -> tuple[jax.Array, ...]:
    """The first pass's planes and this one's constants, to `out` [signals · 64 · radix, width]: planes, or pairs."""
    return _launch(functools.partial(_second_program, radix=radix, inverse=inverse), operands, out, programs)


def _second_program(*refs: Any, programs: int, radix: int, inverse: bool) -> None:
    """Transforms of 64 · radix points of what the first pass made; one product is over all parts of a tile.

    Bfloat16 planes leave by way of shared memory. Float32 ones leave straight from registers, and so do complex
    numbers, which are one array of twice the columns.
    """
    x_hbm, (matrices_hbm, lines_hbm), out_hbm = refs[:2], refs[2:4], refs[4:]
    pairs = len(out_hbm) == 1
    by_copy = out_hbm[0].dtype == BF16
    width = radix * COLUMNS
    signals, blocks = x_hbm[0].shape[0] // ROWS, x_hbm[0].shape[1] // width
    tiles = signals * blocks
    stride = 2 * programs
    stages = 2 if by_copy else 3  # tiles on their way to a warpgroup: what shared memory holds

    @functools.partial(
        pl.run_scoped,
        in_smem=plgpu.SMEM((2 * stages, 2, ROWS, width), BF16, transforms=swizzled(BF16, min(2 * width, 128))),
        out_smem=plgpu.SMEM((2, 2, radix * ROWS, COLUMNS), BF16, transforms=swizzled(BF16, 2 * COLUMNS))
        if by_copy
        else None,
        lines=plgpu.SMEM((2, radix, ROWS), jnp.float32),
        constants_arrived=plgpu.Barrier(num_arrivals=1),
        arrived=plgpu.Barrier(num_arrivals=2, num_barriers=2 * stages),  # a tile's planes, for each warpgroup
        collective_axes="warpgroup",
    )
    def _scoped(in_smem: Any, out_smem: Any, lines: Any, constants_arrived: Any, arrived: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("program") * 2 + warpgroup
        count = lax.div(tiles - first + stride - 1, stride)

        def stage(turn: Any) -> Any:
            return warpgroup * stages + lax.rem(turn, stages)

        def place(turn: Any) -> tuple[Any, Any]:
            tile = first + turn * stride
            return lax.div(tile, blocks), lax.rem(tile, blocks)

        def fetch(turn: Any) -> None:
            signal, block = place(turn)
            for plane, hbm in enumerate(x_hbm):
                own = hbm.at[pl.ds(signal * ROWS, ROWS), pl.ds(block * width, width)]
                plgpu.copy_gmem_to_smem(own, in_smem.at[stage(turn), plane], arrived.at[stage(turn)])

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(lines_hbm, lines, constants_arrived)

        for early in range(stages):
            pl.when(count > early)(functools.partial(fetch, early))
        matrices = _load_matrices(matrices_hbm)
        plgpu.barrier_wait(constants_arrived)

        def products(tile: Any, real: Any, imag: Any) -> Planes:
            _add_products(real, imag, matrices, tile.at[0], tile.at[1])
            plgpu.wgmma_wait(0)
            return real[...], imag[...]

        def half(z: Planes, which: int) -> list[Planes]:
            """The parts of 8 of the 16 columns."""
            own = [slice((which * radix + part) * HALF, (which * radix + part + 1) * HALF) for part in range(radix)]
            return [(z[0][:, columns], z[1][:, columns]) for columns in own]

        def send(left: list[Planes], right: list[Planes], rows: Any, block: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
            for part in range(radix):
                for plane in range(2):
                    own = out_smem.at[warpgroup, plane, pl.ds(part * ROWS, ROWS)]
                    keep_result(own, *(z[part][plane].astype(BF16) for z in (left, right)))
            plgpu.commit_smem()
            for plane, hbm in enumerate(out_hbm):
                to = hbm.at[pl.ds(rows, radix * ROWS), pl.ds(block * COLUMNS, COLUMNS)]
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, plane], to)

        def store(left: list[Planes], right: list[Planes], rows: Any, block: Any) -> None:
            for part in range(radix):
                own = pl.ds(rows + part * ROWS, ROWS)
                if pairs:
                    for side, z in enumerate((left, right)):
                        columns = pl.ds((2 * block + side) * COLUMNS, COLUMNS)
                        store_pairs(out_hbm[0].at[own, columns], *z[part])
                else:
                    for plane, hbm in enumerate(out_hbm):
                        to = hbm.at[own, pl.ds(block * COLUMNS, COLUMNS)]
                        store_quads(to, left[part][plane], right[part][plane])

        @pl.loop(0, count)
        def _tile(turn: Any) -> None:
            signal, block = place(turn)
            plgpu.barrier_wait(arrived.at[stage(turn)])
            accs = (plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32) for _ in range(2))
            z = pl.run_scoped(functools.partial(products, in_smem.at[stage(turn)]), *accs)
            plgpu.commit_smem()  # every warp's part of the products is done with the tile
            pl.when(turn + stages < count)(functools.partial(fetch, turn + stages))
            left, right = (_after_product(half(z, which), lines, inverse) for which in range(2))
            (send if by_copy else store)(left, right, signal * radix * ROWS, block)

        plgpu.wait_smem_to_gmem(0)


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


def _small_transform(parts: list[Planes], inverse: bool) -> list[Planes]:
    """The transform over a list of 1, 2, 4 or 8 arrays."""
    n = len(parts)
    if n == 1:
        return parts
    even, odd = _small_transform(parts[0::2], inverse), _small_transform(parts[1::2], inverse)
    turned = [_times_root(z, k, n, inverse) for k, z in enumerate(odd)]
    sums = [(a + c, b + d) for (a, b), (c, d) in zip(even, turned, strict=True)]
    return sums + [(a - c, b - d) for (a, b), (c, d) in zip(even, turned, strict=True)]


def _times(z: Planes, w: Planes) -> Planes:
    (a, b), (c, d) = z, w
    return a * c - b * d, a * d + b * c


def _spread(planes: Planes, axis: int, shape: tuple[int, int]) -> Planes:
    """Lines of numbers along an axis as matrices of equal rows or columns."""
    re, im = (lax.broadcast_in_dim(plane, shape, [axis]) for plane in planes)
    return re, im


def _after_product(parts: list[Planes], lines: Any, inverse: bool) -> list[Planes]:
    """The factors after the product, one for each row of a part, and the small transform over the parts."""
    turned = parts[:1]
    for part, z in enumerate(parts[1:], 1):
        re, im = (load(lines.at[plane, part], LAYOUT.reduce(1), optimized=False) for plane in range(2))
        turned.append(_times(z, _spread((re, im), 0, z[0].shape)))
    return _small_transform(turned, inverse)


def _add_products(real: Any, imag: Any, matrices: Sequence[Any], re: Any, im: Any) -> None:
    """Start the matrix times (re + i·im), of operands in shared memory; `matrices` in registers."""
    cosine, sine, minus = matrices
    plgpu.wgmma(real, cosine, re)
    plgpu.wgmma(real, minus, im)
    plgpu.wgmma(imag, cosine, im)
    plgpu.wgmma(imag, sine, re)


def _load_matrices(matrices_hbm: Any) -> list[Any]:
    """The matrix in registers for the whole program: from shared memory each narrow product would read it again."""
    return [load(matrices_hbm.at[plane], LAYOUT, optimized=False) for plane in range(3)]


def _launch(program: Callable[..., None], operands: Sequence[jax.Array], out: Sequence[Any], programs: int) -> Any:
    kernel = plgpu.kernel(
        named("fft_long", program, programs=programs),
        out_type=list(out),
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    return tuple(kernel(*operands))
