"""The program of a Hopper multiprocessor for one of the two passes of a long transform; see `pallas_gpu_long`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.fft.pallas_gpu_pairs import TURNS, join_planes, split_pairs
from capibara.kernels.hopper import load, store_to_memory, swizzled

ROWS = 64
COLUMNS = 16  # that one warpgroup transforms together: 64 bytes of float32, and what its registers hold
SECOND_STAGES = 3  # tiles on their way to a warpgroup in the second pass, whose numbers are half as wide
LAYOUT = plgpu.Layout.WGMMA
BF16 = jnp.bfloat16
# Pallas would let the whole warpgroup meet around every store. The program says itself where threads must; so it ran
# on an H200, with the same bits twice and a fifth faster.
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


def _times(z: Planes, w: Planes) -> Planes:
    (a, b), (c, d) = z, w
    return a * c - b * d, a * d + b * c


def keep_transposed(ref: Any, value: Any) -> None:
    """A value [64, 16] to shared memory [16, 64]."""
    turned = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.transpose_ref(ref, (1, 0))[...] = turned


def _program(
    *refs: Any, programs: int, radix: int, inverse: bool, scale: float, first_pass: bool, pairs: bool,
) -> None:  # fmt: skip
    """Transforms of 64 · radix points down the columns of [signals · 64, radix · width] planes.

    The first pass takes float32 and multiplies by the factors between the passes; what it makes, in bfloat16, is
    transposed. The second takes that, and makes float32. With `pairs` the float32 numbers are real and imaginary by
    turns, and the columns and rows between the passes are in the order of TURNS.
    """
    single = pairs and first_pass
    given_hbm, (matrices_hbm, lines_hbm, *rest) = refs[: 2 - single], refs[2 - single :]
    base_hbm: Any
    step_hbm: Any
    base_hbm, step_hbm = rest[:2] if first_pass else (None, None)
    out_hbm = rest[2:] if first_pass else rest
    kind = given_hbm[0].dtype
    each = 2 if single else 1  # numbers of a column
    columns_read = each * COLUMNS
    width = given_hbm[0].shape[1] // radix // each
    blocks = width // COLUMNS
    tiles = given_hbm[0].shape[0] // ROWS * blocks
    stride = 2 * programs
    slots = len(given_hbm) * radix
    stages = 1 if first_pass else SECOND_STAGES
    swizzle = columns_read * jnp.dtype(kind).itemsize

    @functools.partial(
        pl.run_scoped,
        given=plgpu.SMEM((2 * stages, slots, ROWS, columns_read), kind, transforms=swizzled(kind, swizzle)),
        # The parts below each other, so that one product is over them all.
        turned=plgpu.SMEM((4, radix * COLUMNS, ROWS), BF16, transforms=swizzled(BF16)) if first_pass else None,
        # Both operands of a product are swizzled alike.
        matrices=plgpu.SMEM((3, ROWS, ROWS), BF16, transforms=swizzled(BF16, 128 if first_pass else swizzle)),
        lines=plgpu.SMEM((2, radix, ROWS), jnp.float32),
        constants_arrived=plgpu.Barrier(num_arrivals=2),
        arrived=plgpu.Barrier(num_arrivals=slots, num_barriers=2 * stages),  # for each warpgroup
        collective_axes="warpgroup",
    )
    def _scoped(given: Any, turned: Any, matrices: Any, lines: Any, constants_arrived: Any, arrived: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("program") * 2 + warpgroup
        count = lax.div(tiles - first + stride - 1, stride)

        def stage(step: Any) -> Any:
            return warpgroup * stages + lax.rem(step, stages) if stages > 1 else warpgroup

        def place(step: Any) -> tuple[Any, Any]:
            tile = first + step * stride
            return lax.div(tile, blocks), lax.rem(tile, blocks)

        def fetch(step: Any) -> None:
            signal, block = place(step)
            slot = stage(step)
            for plane, hbm in enumerate(given_hbm):
                for part in range(radix):
                    lies = TURNS.index(part) if pairs and not first_pass else part
                    columns = pl.ds((lies * blocks + block) * columns_read, columns_read)
                    own = hbm.at[pl.ds(signal * ROWS, ROWS), columns]
                    plgpu.copy_gmem_to_smem(own, given.at[slot, plane * radix + part], arrived.at[slot])

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(matrices_hbm, matrices, constants_arrived)
            plgpu.copy_gmem_to_smem(lines_hbm, lines, constants_arrived)

        for early in range(stages):
            pl.when(count > early)(functools.partial(fetch, early))
        plgpu.barrier_wait(constants_arrived)

        def own_part(plane: int, part: int) -> Any:
            return turned.at[2 * warpgroup + plane, pl.ds(part * COLUMNS, COLUMNS)]

        def round_given(mine: Any) -> None:
            """The float32 numbers as bfloat16 planes, transposed, where the products read them."""
            for part in range(radix):
                if pairs:
                    planes = split_pairs(load(mine.at[part], LAYOUT))
                else:
                    planes = tuple(load(mine.at[plane * radix + part], LAYOUT) for plane in range(2))
                for plane, value in enumerate(planes):
                    keep_transposed(own_part(plane, part), value.astype(BF16))
            plgpu.commit_smem()

        def add_products(real: Any, imag: Any, re: Any, im: Any) -> None:
            cosine, sine, minus = (matrices.at[plane] for plane in range(3))
            plgpu.wgmma(real, cosine, re)
            plgpu.wgmma(real, minus, im)
            plgpu.wgmma(imag, cosine, im)
            plgpu.wgmma(imag, sine, re)

        def products(mine: Any, *sums: Any) -> list[Planes]:
            """The matrix times every part, as they lie in the second pass."""
            for part in range(radix):
                real, imag = sums[2 * part : 2 * part + 2]
                add_products(real, imag, mine.at[part], mine.at[radix + part])
            plgpu.wgmma_wait(0)
            return [(sums[2 * part][...], sums[2 * part + 1][...]) for part in range(radix)]

        def products_at_once(real: Any, imag: Any) -> list[Planes]:
            planes = [plgpu.transpose_ref(turned.at[2 * warpgroup + plane], (1, 0)) for plane in range(2)]
            add_products(real, imag, planes[0], planes[1])
            plgpu.wgmma_wait(0)
            re, im = real[...], imag[...]
            columns = [slice(part * COLUMNS, (part + 1) * COLUMNS) for part in range(radix)]
            return [(re[:, own], im[:, own]) for own in columns]

        def multiplied(mine: Any) -> list[Planes]:
            count, columns = (2, radix * COLUMNS) if first_pass else (2 * radix, COLUMNS)
            sums = (plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32) for _ in range(count))
            return pl.run_scoped(products_at_once if first_pass else functools.partial(products, mine), *sums)

        def line(part: int) -> Planes:
            """The factors after the product, one for each row."""
            re, im = (load(lines.at[plane, part], LAYOUT.reduce(1), optimized=False) for plane in range(2))
            return lax.broadcast_in_dim(re, (ROWS, COLUMNS), [0]), lax.broadcast_in_dim(im, (ROWS, COLUMNS), [0])

        def factors_between(column: Any) -> tuple[Planes, Planes]:
            """Those of the rows and those of the second part, asked for before they are needed."""
            columns = pl.ds(column, COLUMNS)
            base = [load(base_hbm.at[plane, :, columns], LAYOUT, optimized=False) for plane in range(2)]
            step = [load(step_hbm.at[plane, columns], LAYOUT.reduce(0), optimized=False) for plane in range(2)]
            return (base[0], base[1]), (step[0], step[1])

        def between_passes(parts: list[Planes], base: Planes, step: Planes) -> list[Planes]:
            """A part's factors are powers of the second part's."""
            powers = [step]
            while len(powers) < radix - 1:
                power = len(powers) + 1
                powers.append(_times(powers[power // 2 - 1], powers[power - power // 2 - 1]))
            made = [_times(parts[0], base)]
            for z, (re, im) in zip(parts[1:], powers[: radix - 1], strict=True):
                wide = [lax.broadcast_in_dim(number, (ROWS, COLUMNS), [1]) for number in (re, im)]
                made.append(_times(z, _times(base, (wide[0], wide[1]))))
            return made

        @pl.loop(0, count)
        def _tile(step: Any) -> None:
            signal, block = place(step)
            column = block * COLUMNS
            plgpu.barrier_wait(arrived.at[stage(step)])
            between: tuple[Any, ...] = ()
            if first_pass:
                between = factors_between(column)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
                round_given(given.at[stage(step)])
                pl.when(step + 1 < count)(functools.partial(fetch, step + 1))
            parts = multiplied(given.at[stage(step)])
            plgpu.commit_smem()  # every warp's part of the products is done with the tile
            if not first_pass:
                pl.when(step + stages < count)(functools.partial(fetch, step + stages))
            parts = [z if part == 0 else _times(z, line(part)) for part, z in enumerate(parts)]
            parts = small_transform(parts, inverse)
            if first_pass:
                for part, z in enumerate(between_passes(parts, *between)):
                    for plane in range(2):
                        keep_transposed(own_part(plane, part), z[plane].astype(BF16))
                plgpu.commit_smem()
                for plane, hbm in enumerate(out_hbm):
                    for part in range(radix):
                        to = hbm.at[pl.ds(signal * width + column, COLUMNS), pl.ds(part * ROWS, ROWS)]
                        plgpu.copy_smem_to_gmem(own_part(plane, part), to)
            else:
                for part, z in enumerate(parts):
                    rows = pl.ds((signal * radix + part) * ROWS, ROWS)
                    scaled = tuple(plane * scale for plane in z)
                    if pairs:
                        store_to_memory(
                            out_hbm[0].at[rows, pl.ds(block * 2 * COLUMNS, 2 * COLUMNS)], join_planes(*scaled)
                        )
                    else:
                        for hbm, value in zip(out_hbm, scaled, strict=True):
                            store_to_memory(hbm.at[rows, pl.ds(column, COLUMNS)], value)

        plgpu.wait_smem_to_gmem(0)


def run(
    *operands: jax.Array, out: Sequence[Any], programs: int, radix: int, inverse: bool, scale: float, first_pass: bool,
    pairs: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """One pass over planes [signals · 64, radix · width]; the operands are they and the pass's constants."""
    program = functools.partial(
        _program, programs=programs, radix=radix, inverse=inverse, scale=scale, first_pass=first_pass, pairs=pairs
    )
    kernel = plgpu.kernel(
        program,
        out_type=list(out),
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    return tuple(kernel(*operands))
