"""The transform in bfloat16 for Hopper's tensor cores, in Pallas (Mosaic GPU): up to 4096 points in one pass.

A tile of 64 x 64 numbers, as they lie in memory, is one signal of 4096 points, or several shorter ones of 64 r. The
first product, with the DFT matrix of length r (one on the diagonal for each signal), goes down the columns; the
factors are multiplied in registers; the second, with that of length 64, goes along the rows and leaves the result
transposed, which is its order in memory. A persistent program on each multiprocessor has two warpgroups that each take
tiles of their own: while one multiplies, the other's tile arrives or leaves.

Planes are read as float32, or as bfloat16: a caller's own, or what XLA's products leave that have done the first
radices of a longer length. They are written as either.
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
from capibara.kernels.ops.fft.matmul import stage
from capibara.kernels.ops.fft.plan import plan
from capibara.kernels.ops.fft.rules import scale_of
from capibara.kernels.ops.fft.twiddles import dft, twiddles
from capibara.kernels.pallas.hopper import ProgramsConfig, load, multiprocessors, named, refuses_chip, swizzled

SIDE = 64  # of a tile: the rows of one wgmma
TILE = SIDE * SIDE
LENGTHS = (4096, 2048, 1024, 512)  # r = 64, 32, 16, 8: 32 bytes or more of a signal's row leave at a time
LAYOUT = plgpu.Layout.WGMMA


def inner_length(n: int) -> int | None:
    """The points that the kernel does: the most that leave a smooth rest."""
    return next((m for m in LENGTHS if n % m == 0 and plan(n // m).padded is None), None)


def refuses_form(call: Call) -> str | None:
    """Why none of this family's Hopper kernels takes the call, whatever its length."""
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if call.params["precision"] != "bfloat16":
        return "its products are of bfloat16 numbers; precision='float32' was asked for"
    if call.params["axes"] != 1:
        return "it transforms one axis a call"
    if call.params["factors"] is not None:
        return "it chooses its own radices"
    return "the operands are empty" if 0 in call.need("re").shape else None


def refuses(call: Call) -> str | None:
    form = refuses_form(call)
    if form is not None:
        return form
    shape = call.need("re").shape
    inner = inner_length(shape[-1])
    if inner is None:
        return f"it takes multiples of {LENGTHS[-1]} points, not {shape[-1]}"
    if math.prod(shape) % TILE:
        return f"it takes whole tiles of {TILE} numbers; {math.prod(shape)} is not a multiple"
    return None


def _constants(radix: int, inverse: bool, scale: float) -> tuple[jax.Array, jax.Array]:
    """The two DFT matrices as planes [4, 64, 64] in bfloat16, and the factors with the scale as planes in float32."""
    signals = SIDE // radix
    small = [np.kron(np.eye(signals), plane) for plane in dft(radix, inverse)]
    factors = np.tile(twiddles(radix * SIDE, radix, SIDE, inverse), (1, signals, 1)) * scale
    return jnp.asarray(np.stack([*small, *dft(SIDE, inverse)]), jnp.bfloat16), jnp.asarray(factors, jnp.float32)


def complex_product(matrices: Any, which: int, re: Any, im: Any) -> tuple[Any, Any]:
    """matrix @ (re + i·im), of operands in shared memory, as two planes in registers."""
    left_re, left_im = matrices.at[which], matrices.at[which + 1]

    def products(real: Any, minus: Any, imag: Any) -> tuple[Any, Any]:
        plgpu.wgmma(real, left_re, re)
        plgpu.wgmma(minus, left_im, im)
        plgpu.wgmma(imag, left_re, im)
        plgpu.wgmma(imag, left_im, re)
        plgpu.wgmma_wait(0)
        return real[...] - minus[...], imag[...]

    return pl.run_scoped(products, *(plgpu.WGMMAAccumulatorRef((SIDE, SIDE), jnp.float32) for _ in range(3)))


def _program(
    re_hbm: Any, im_hbm: Any, roots_hbm: Any, factors_hbm: Any, out_re_hbm: Any, out_im_hbm: Any, *, programs: int
) -> None:
    tiles, signals, _, radix = out_re_hbm.shape
    dtype, out_dtype = re_hbm.dtype, out_re_hbm.dtype
    stride = 2 * programs
    planes = (2, 2, SIDE, SIDE)  # two for each warpgroup

    @functools.partial(
        pl.run_scoped,
        in_smem=plgpu.SMEM(planes, dtype, transforms=swizzled(dtype)),
        between_smem=plgpu.SMEM(planes, jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
        out_smem=plgpu.SMEM(
            (2, 2, signals, SIDE, radix),
            out_dtype,
            transforms=swizzled(out_dtype, min(jnp.dtype(out_dtype).itemsize * radix, 128)),
        ),
        roots_smem=plgpu.SMEM((4, SIDE, SIDE), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
        factors_smem=plgpu.SMEM((2, SIDE, SIDE), jnp.float32, transforms=swizzled(jnp.float32)),
        constants_arrived=plgpu.Barrier(num_arrivals=2),
        arrived=plgpu.Barrier(num_arrivals=2, num_barriers=2),  # a tile's two planes, for each warpgroup
        collective_axes="warpgroup",
    )
    def _scoped(
        in_smem: Any, between_smem: Any, out_smem: Any, roots_smem: Any, factors_smem: Any, constants_arrived: Any,
        arrived: Any,
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("program") * 2 + warpgroup
        count = lax.div(tiles - first + stride - 1, stride)
        own_smem = in_smem.at[warpgroup]
        ready = arrived.at[warpgroup]

        def fetch(turn: Any) -> None:
            for plane, hbm in enumerate((re_hbm, im_hbm)):
                plgpu.copy_gmem_to_smem(hbm.at[first + turn * stride], own_smem.at[plane], ready)

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(roots_hbm, roots_smem, constants_arrived)
            plgpu.copy_gmem_to_smem(factors_hbm, factors_smem, constants_arrived)

        pl.when(count > 0)(functools.partial(fetch, 0))
        plgpu.barrier_wait(constants_arrived)

        def keep(re: Any, im: Any) -> None:
            """Two planes to shared memory, rounded, where the next product reads them."""
            between_smem[warpgroup, 0] = re.astype(jnp.bfloat16)
            between_smem[warpgroup, 1] = im.astype(jnp.bfloat16)
            plgpu.commit_smem()

        @pl.loop(0, count)
        def _tile(turn: Any) -> None:
            plgpu.barrier_wait(ready)

            def ask_for_next() -> None:
                pl.when(turn + 1 < count)(functools.partial(fetch, turn + 1))

            if dtype == jnp.bfloat16:
                yr, yi = complex_product(roots_smem, 0, own_smem.at[0], own_smem.at[1])
                plgpu.commit_smem()  # every warp's part of the product is done with the tile
                ask_for_next()
            else:
                keep(load(own_smem.at[0], LAYOUT), load(own_smem.at[1], LAYOUT))
                ask_for_next()
                yr, yi = complex_product(roots_smem, 0, between_smem.at[warpgroup, 0], between_smem.at[warpgroup, 1])
                plgpu.commit_smem()  # as above, before the planes are overwritten
            wr, wi = load(factors_smem.at[0], LAYOUT), load(factors_smem.at[1], LAYOUT)
            keep(yr * wr - yi * wi, yr * wi + yi * wr)
            transposed = (between_smem.at[warpgroup, plane].transpose((1, 0)) for plane in range(2))
            result = complex_product(roots_smem, 2, *transposed)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
            for plane, z in enumerate(result):
                for signal in range(signals):
                    out_smem[warpgroup, plane, signal] = z[:, signal * radix : (signal + 1) * radix].astype(out_dtype)
            plgpu.commit_smem()
            for plane, hbm in enumerate((out_re_hbm, out_im_hbm)):
                for signal in range(signals):
                    to = hbm.at[first + turn * stride, signal]
                    plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, plane, signal], to)

        plgpu.wait_smem_to_gmem(0)


def one_pass(
    re: jax.Array, im: jax.Array, *, programs: int, inverse: bool, scale: float, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The transform of planes [..., 64 r] by the kernel, times `scale`; planes of type `dtype` out."""
    n = re.shape[-1]
    radix = n // SIDE
    # The least that leaves at a time is 32 bytes.
    out_dtype = dtype if radix * jnp.dtype(dtype).itemsize >= 32 else jnp.float32
    tiles = math.prod(re.shape) // TILE
    constants = _constants(radix, inverse, scale)
    kernel = plgpu.kernel(
        named("fft", _program, programs=programs),
        out_type=[out_struct((tiles, SIDE // radix, SIDE, radix), out_dtype, re)] * 2,
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
    )
    real, imag = kernel(*(plane.reshape(tiles, SIDE, SIDE) for plane in (re, im)), *constants)
    return real.reshape(re.shape).astype(dtype), imag.reshape(re.shape).astype(dtype)


def fft_hopper(
    re: jax.Array, im: jax.Array, *, config: ProgramsConfig, inverse: bool, norm: str, precision: str, axes: int,
    factors: None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The transform of the last axis; see the module's text."""
    del axes, factors  # refused unless 1 and None
    n = re.shape[-1]
    inner = inner_length(n)
    assert inner is not None  # it refuses what it cannot divide
    scale = scale_of((n,), norm, inverse)
    programs = config.programs * multiprocessors(current_target().device_kind)
    run = functools.partial(one_pass, programs=programs, inverse=inverse, scale=scale, dtype=re.dtype)

    def whole(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
        if inner == n:
            return run(re, im)
        y = jnp.stack([re, im]).reshape(2, -1, n, 1)
        for radix in plan(n // inner).factors:
            y = stage(y, radix, inverse, precision)
        # What is done is the fast axis of the result, and a batch to the kernel.
        rows = jnp.moveaxis(y, -1, -2).astype(jnp.bfloat16)
        real, imag = (jnp.moveaxis(plane, -2, -1).reshape(re.shape) for plane in run(rows[0], rows[1]))
        return real, imag

    # As one program: partitioning over a mesh takes functions without constants of their own.
    return jax.jit(whole)(re, im)


IMPLEMENTATION = Implementation(
    "hopper",
    fft_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=("xla_matmul",),  # on an H200 1.5 to 2.2 times as fast as the products in XLA, and behind cuFFT
    kernel=True,
    config_type=ProgramsConfig,
    candidates=lambda call: [ProgramsConfig()],
)
