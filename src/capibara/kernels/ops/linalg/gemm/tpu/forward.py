"""gemm for the TPU's matrix units, in Pallas (Mosaic).

One program computes one output tile: the grid's last axis walks the contraction and adds into a float32 scratch,
the axes before it are parallel and so are split over both cores of a v4 chip. Sizes that are no multiple of a tile
are handled by masking the last step of the contraction; rows and columns past the edge are never written back.
Transposed operands are read as they lie in memory and contracted along their other axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret, matmul_precision
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.linalg.gemm.reference import epilogue
from capibara.kernels.ops.linalg.gemm.rules import out_dtype_of, sizes
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES = 128  # columns of a vector register; tiles of the last axis are multiples of it
# Fixed cost of one grid step (DMA issue, semaphores), used only to order candidate tiles before any measurement.
STEP_SECONDS = 0.35e-6


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Rows, columns and contraction length of one program's tile."""

    block_m: int
    block_n: int
    block_k: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value <= 0 or value % LANES:
                raise rule_error(f"{field.name} is a positive multiple of {LANES}", value, "use 256, 512 or 1024")


def fit(tile: TileConfig, m: int, n: int, k: int) -> tuple[int, int, int]:
    """The tile cut to the operands: a dimension shorter than the tile is taken whole."""
    return min(tile.block_m, m), min(tile.block_n, n), min(tile.block_k, k)


def _specs(
    a: Any, b: Any, bias: Any, residual: Any, tile: tuple[int, int, int], *, transpose_a: bool, transpose_b: bool
) -> dict[str, Any]:
    """What `pallas_call` moves: a block of every operand that is there, and of the result."""
    bm, bn, bk = tile
    batched = a.ndim == 3 or b.ndim == 3

    def spec(ndim: int, block: tuple[int, int], pick: Any) -> pl.BlockSpec:
        """A block of a matrix, or of each batch's matrix; `pick` chooses its grid coordinates."""
        if ndim == 3:
            return pl.BlockSpec((None, *block), lambda g, i, j, s: (g, *pick(i, j, s)))
        if batched:
            return pl.BlockSpec(block, lambda g, i, j, s: pick(i, j, s))
        return pl.BlockSpec(block, pick)

    in_specs = [
        spec(a.ndim, (bk, bm), lambda i, j, s: (s, i))
        if transpose_a
        else spec(a.ndim, (bm, bk), lambda i, j, s: (i, s)),
        spec(b.ndim, (bn, bk), lambda i, j, s: (j, s))
        if transpose_b
        else spec(b.ndim, (bk, bn), lambda i, j, s: (s, j)),
    ]
    if bias is not None:
        in_specs.append(spec(2, (1, bn), lambda i, j, s: (0, j)))
    if residual is not None:
        in_specs.append(spec(residual.ndim, (bm, bn), lambda i, j, s: (i, j)))
    return {"in_specs": in_specs, "out_specs": spec(3 if batched else 2, (bm, bn), lambda i, j, s: (i, j))}


def _accumulator(tile: tuple[int, int, int]) -> Any:
    return pltpu.VMEM(tile[:2], jnp.float32)


def tile_bytes(call: Call, tile: TileConfig) -> int:
    """VMEM the kernel asks for: every operand's tile twice (the next is fetched meanwhile) and the accumulator, which
    in a single step is a value as large."""
    _, m, n, k = sizes(call)
    block = fit(tile, m, n, k)
    transpose_a, transpose_b = bool(call.params["transpose_a"]), bool(call.params["transpose_b"])
    a, b, bias, residual = call.args
    specs = _specs(a, b, bias, residual, block, transpose_a=transpose_a, transpose_b=transpose_b)
    dtypes = [*(x.dtype for x in call.args if x is not None), out_dtype_of(call)]
    moved = zip([*specs["in_specs"], specs["out_specs"]], dtypes, strict=True)
    return vmem_bytes(moved, [_accumulator(block)])


def candidates(call: Call) -> Sequence[TileConfig]:
    """Every tile that fits VMEM, best predicted first."""
    _, m, n, k = sizes(call)
    limit = vmem.limit(call)
    tiles = [
        TileConfig(bm, bn, bk)
        for bm in (128, 256, 512, 1024)
        for bn in (128, 256, 512, 1024, 2048)
        for bk in (128, 256, 512, 1024, 2048)
    ]
    distinct = {fit(t, m, n, k): t for t in tiles if tile_bytes(call, t) <= limit}
    return sorted(distinct.values(), key=functools.partial(_predicted_seconds, call))


def _predicted_seconds(call: Call, tile: TileConfig) -> float:
    """An ordering, not a measurement: matrix work on padded tiles against bytes through HBM, and a fee a step."""
    count, m, n, k = sizes(call)
    chip = vmem.chip_of(call)
    bm, bn, bk = fit(tile, m, n, k)
    steps_m, steps_n, steps_k = math.ceil(m / bm), math.ceil(n / bn), math.ceil(k / bk)
    whole = lambda block: math.ceil(block / LANES) * LANES  # noqa: E731
    matrix = 2.0 * count * steps_m * whole(bm) * steps_n * whole(bn) * steps_k * whole(bk)
    # Reading and writing the accumulator once a step hides behind the matrix work in the ratio 128 : bk.
    matrix *= 1 + LANES / (2 * whole(bk))
    item = call.need("a").dtype.itemsize
    moved = count * item * (steps_n * m * k + steps_m * k * n + m * n)
    steps = count * steps_m * steps_n * steps_k
    peak = chip.peak_flops("bfloat16") or math.inf
    return max(matrix / peak, moved / chip.hbm_bandwidth) + steps * STEP_SECONDS / (chip.cores_per_chip or 1)


def matrix_precision(call_dtype: Any, precision: str | None) -> jax.lax.Precision | None:
    """What the matrix units are told: float32 operands take one bfloat16 pass, or six for the full precision."""
    if jnp.dtype(call_dtype) != jnp.float32:
        return None
    asked = precision or matmul_precision() or "default"
    return jax.lax.Precision.HIGHEST if asked in ("highest", "float32") else jax.lax.Precision.DEFAULT


def refuses(call: Call) -> str | None:
    a, b, bias, _ = call.args
    assert a is not None
    assert b is not None
    if a.dtype != b.dtype:
        return f"its operands have one type; these are {a.dtype} and {b.dtype}"
    if np.dtype(a.dtype).name not in ("bfloat16", "float32"):
        return f"the v4 matrix units take bfloat16 and float32, not {a.dtype}"
    if 0 in a.shape or 0 in b.shape:
        return "an operand is empty"
    if bias is not None and len(bias.shape) == 2:
        return "the bias differs from one batch element to the next"
    asked = call.params["precision"] or matmul_precision()
    if a.dtype == jnp.float32 and asked in ("high", "tensorfloat32", "bfloat16_3x"):
        return f"Mosaic has no {asked!r} precision between one pass and the full six"
    if not candidates(call):
        return "no tile of it fits the core's VMEM"
    return None


def _body(
    *refs: Any, steps: int, tail: int, a_axis: int, b_axis: int, activation: str | None,
    precision: jax.lax.Precision | None, has_bias: bool, has_residual: bool, step_axis: int,
) -> None:  # fmt: skip
    a_ref, b_ref, *rest = refs
    bias_ref = rest.pop(0) if has_bias else None
    residual_ref = rest.pop(0) if has_residual else None
    out_ref = rest.pop(0)
    step = pl.program_id(step_axis)

    def product(masked: bool) -> jax.Array:
        a, b = a_ref[...], b_ref[...]
        if masked:
            # Past the edge lies whatever memory held, NaN too, and NaN times zero is NaN: both sides are cleared.
            a = jnp.where(jax.lax.broadcasted_iota(jnp.int32, a.shape, a_axis) < tail, a, jnp.zeros_like(a))
            b = jnp.where(jax.lax.broadcasted_iota(jnp.int32, b.shape, b_axis) < tail, b, jnp.zeros_like(b))
        return jax.lax.dot_general(
            a, b, (((a_axis,), (b_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def finish(z: jax.Array) -> None:
        bias = None if bias_ref is None else bias_ref[...].astype(jnp.float32)
        residual = None if residual_ref is None else residual_ref[...]
        out_ref[...] = epilogue(z, bias, residual, activation).astype(out_ref.dtype)

    if steps == 1:
        finish(product(masked=bool(tail)))
        return
    (acc_ref,) = rest
    last = steps - 1

    @pl.when(step == 0)
    def _clear() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    if not tail:  # one copy of the product's code serves every step
        acc_ref[...] += product(masked=False)
    else:

        @pl.when(step < last)
        def _inside() -> None:
            acc_ref[...] += product(masked=False)

        @pl.when(step == last)
        def _edge() -> None:
            acc_ref[...] += product(masked=True)

    @pl.when(step == last)
    def _finish() -> None:
        finish(acc_ref[...])


def gemm_tpu(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    config: TileConfig,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    """gemm as one Pallas call; see the module's text."""
    m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    batched = a.ndim == 3 or b.ndim == 3
    count = (a.shape[0] if a.ndim == 3 else b.shape[0]) if batched else 1
    bm, bn, bk = fit(config, m, n, k)
    steps = math.ceil(k / bk)

    operands = [a, b]
    if bias is not None:
        operands.append(bias.reshape(1, n))
    if residual is not None:
        operands.append(residual)
    shape = (count, m, n) if batched else (m, n)
    out = out_struct(shape, jnp.dtype(out_dtype) if out_dtype else a.dtype, a)
    lead = (count,) if batched else ()
    semantics: Any = ("parallel",) * (len(lead) + 2) + ("arbitrary",)
    body = functools.partial(
        _body, steps=steps, tail=k - (steps - 1) * bk if k % bk else 0, a_axis=0 if transpose_a else 1,
        b_axis=1 if transpose_b else 0, activation=activation, precision=matrix_precision(a.dtype, precision),
        has_bias=bias is not None, has_residual=residual is not None, step_axis=len(lead) + 2,
    )  # fmt: skip
    call = pl.pallas_call(
        body,
        out_shape=out,
        grid=(*lead, math.ceil(m / bm), math.ceil(n / bn), steps),
        **_specs(a, b, bias, residual, (bm, bn, bk), transpose_a=transpose_a, transpose_b=transpose_b),
        scratch_shapes=[_accumulator((bm, bn, bk))] if steps > 1 else [],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * m * n * k,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands) + count * m * n * out.dtype.itemsize,
            transcendentals=count * m * n if activation else 0,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_gemm",
    )
    return call(*operands)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    gemm_tpu,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=TileConfig,
    candidates=candidates,
)
