"""The transform for the TPU, in Pallas (Mosaic): a block of signals stays in VMEM through both of its radices.

A signal of n = r1 · r2 numbers is a matrix of r1 rows. The first product transforms its columns, from the left; the
factors are multiplied in while the result is in registers; the second transforms the rows and leaves the result
transposed, which is its order in memory. So the data crosses HBM once in and once out. A longer length has its first
radices by products in XLA, which round between them as the kernel does, and the last two in the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.fft.matmul import over_axes, stage, transform
from capibara.kernels.ops.fft.plan import Plan, plan
from capibara.kernels.ops.fft.twiddles import dft, twiddles
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

# Matrices of a signal that are alive at once in float32: two planes after each product, and what the products give.
LIVE = 8


@dataclasses.dataclass(frozen=True)
class SignalsConfig:
    """How many signals are in VMEM at a time."""

    block: int

    def __post_init__(self) -> None:
        if self.block < 1:
            raise rule_error("A block has one signal or more", self.block, "use block=8")


def _plan(call: Call) -> Plan:
    return plan(call.need("re").shape[-1], cast(tuple[int, ...] | None, call.params["factors"]))


def _last_two(call: Call) -> tuple[int, int, int]:
    """(signals that the kernel sees, r1, r2)."""
    shape = call.need("re").shape
    chosen = _plan(call)
    first, second = chosen.factors[-2:]
    length = chosen.padded or shape[-1]
    return math.prod(shape[:-1]) * length // (first * second), first, second


def _specs(first: int, second: int, block: int) -> dict[str, Any]:
    """What `pallas_call` moves, two planes of each: signals, the two matrices, the factors; the result."""

    def whole(rows: int, columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, columns), lambda i: (0, 0))

    there = pl.BlockSpec((block, first, second), lambda i: (i, 0, 0))
    back = pl.BlockSpec((block, second, first), lambda i: (i, 0, 0))
    constants = [whole(first, first), whole(second, second), whole(first, second)]
    return {"in_specs": [there, there, *(spec for spec in constants for _ in range(2))], "out_specs": [back, back]}


def candidates(call: Call) -> Sequence[SignalsConfig]:
    """Blocks that fit VMEM, the largest first; every number is counted as a float32, bfloat16 constants too."""
    signals, first, second = _last_two(call)
    shapes = (first, second), (second, first)
    live = max(vmem_bytes((), [pltpu.VMEM(shape, jnp.float32)] * LIVE) for shape in shapes)

    def fits(block: int) -> bool:
        specs = _specs(first, second, block)
        moved = ((spec, jnp.float32) for spec in (*specs["in_specs"], *specs["out_specs"]))
        return vmem_bytes(moved) + live <= vmem.limit(call)

    return [SignalsConfig(b) for b in (32, 16, 8, 4, 2, 1) if (b == 1 or b <= signals) and fits(b)]


def refuses(call: Call) -> str | None:
    if call.params["axes"] != 1:
        return "it transforms one axis a call"
    shape = call.need("re").shape
    if 0 in shape:
        return "the operands are empty"
    chosen = _plan(call)
    if len(chosen.factors) < 2:
        return f"a transform of {shape[-1]} points is one matrix product, which XLA does"
    if not candidates(call):
        return "no signal fits the core's VMEM"
    return None


def _body(
    re_ref: Any, im_ref: Any, fr_ref: Any, fi_ref: Any, gr_ref: Any, gi_ref: Any, wr_ref: Any, wi_ref: Any,
    out_re_ref: Any, out_im_ref: Any, *, precision: str,
) -> None:  # fmt: skip
    operand = jnp.bfloat16 if precision == "bfloat16" else jnp.float32
    product = functools.partial(
        lax.dot_general,
        precision=None if precision == "bfloat16" else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    from_left = functools.partial(product, dimension_numbers=(((1,), (0,)), ((), ())))
    transposing = functools.partial(product, dimension_numbers=(((1,), (1,)), ((), ())))
    fr, fi, gr, gi = fr_ref[...], fi_ref[...], gr_ref[...], gi_ref[...]
    wr, wi = wr_ref[...], wi_ref[...]

    def transform_signal(signal: Any, carry: None) -> None:
        re, im = re_ref[signal].astype(operand), im_ref[signal].astype(operand)
        yr = from_left(fr, re) - from_left(fi, im)
        yi = from_left(fr, im) + from_left(fi, re)
        zr, zi = (yr * wr - yi * wi).astype(operand), (yr * wi + yi * wr).astype(operand)
        out_re_ref[signal] = transposing(gr, zr) - transposing(gi, zi)
        out_im_ref[signal] = transposing(gr, zi) + transposing(gi, zr)
        return carry

    lax.fori_loop(0, re_ref.shape[0], transform_signal, None)


def two_radices(x: jax.Array, first: int, second: int, inverse: bool, precision: str, block: int) -> jax.Array:
    """The transform of planes [2, signals, first · second] by the kernel, without a scale."""
    _, signals, n = x.shape
    dtype = jnp.bfloat16 if precision == "bfloat16" else jnp.float32
    # Past the last signal a block reads and writes nothing that is kept.
    matrices = [jnp.asarray(plane, dtype) for radix in (first, second) for plane in dft(radix, inverse)]
    factors = [jnp.asarray(plane, jnp.float32) for plane in twiddles(n, first, second, inverse)]
    constants = [*matrices, *factors]

    re, im = pl.pallas_call(
        functools.partial(_body, precision=precision),
        out_shape=[out_struct((signals, second, first), jnp.float32, x)] * 2,
        grid=(math.ceil(signals / block),),
        **_specs(first, second, block),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=8 * signals * n * (first + second), bytes_accessed=16 * signals * n, transcendentals=0
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_fft",
    )(*(plane.reshape(signals, first, second) for plane in x), *constants)
    return jnp.stack([re, im]).reshape(x.shape)


def _smooth(x: jax.Array, factors: tuple[int, ...], inverse: bool, precision: str, *, block: int) -> jax.Array:
    """[2, batch, n]: the first radices by XLA's products, the last two by the kernel."""
    *outer, first, second = factors
    _, batch, n = x.shape
    y = x[..., None]
    for radix in outer:
        y = stage(y, radix, inverse, precision)
    done = n // (first * second)
    y = jnp.moveaxis(y, -1, -2).reshape(2, batch * done, first * second)
    y = two_radices(y, first, second, inverse, precision, block)
    return jnp.moveaxis(y.reshape(2, batch, done, first * second), -2, -1).reshape(x.shape)


def fft_tpu(
    re: jax.Array, im: jax.Array, *, config: SignalsConfig, inverse: bool, norm: str, precision: str, axes: int,
    factors: tuple[int, ...] | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The transform of the last axis; see the module's text."""
    smooth = functools.partial(_smooth, block=config.block)
    transform_axis = functools.partial(transform, inverse=inverse, precision=precision, factors=factors, smooth=smooth)
    # As one program: partitioning over a mesh takes functions without constants of their own.
    return jax.jit(lambda re, im: over_axes(re, im, axes, norm, inverse, transform_axis))(re, im)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    fft_tpu,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=SignalsConfig,
    candidates=candidates,
)
