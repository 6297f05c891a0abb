"""The nearest code for the TPU's matrix units, in Pallas (Mosaic).

The grid is (blocks of rows, blocks of codes). A block of rows stays in VMEM while the codes pass; each step multiplies
at full precision and keeps, for every row, the best score x·c - |c|²/2 so far and its index. The blocks of rows are
parallel, so both cores of a v4 chip have half of them.
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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.vq.nearest.equal import lowest_equal
from capibara.kernels.ops.vq.nearest.reference import enlargement, is_finite, squared_norms
from capibara.kernels.ops.vq.nearest.rules import sizes_of
from capibara.kernels.ops.vq.nearest.xla import centre_of, finish
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES = 128
MOST_WIDTH = 8192


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Rows and codes of one step."""

    rows: int
    codes: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.codes < 1:
            raise rule_error("rows and codes are 1 or more", self, "use rows=512, codes=256")


def _blocks(config: BlockConfig, width: int) -> dict[str, Any]:
    """What `pallas_call` moves and keeps: rows, codes, half norms; indices; the best score and its index."""
    block_m, block_n = config.rows, config.codes
    as_lanes = block_m % LANES == 0
    return {
        "in_specs": [
            pl.BlockSpec((block_m, width), lambda i, j: (i, 0)),
            pl.BlockSpec((block_n, width), lambda i, j: (j, 0)),
            pl.BlockSpec((1, block_n), lambda i, j: (0, j)),
        ],
        "out_specs": pl.BlockSpec((1, block_m), lambda i, j: (0, i))
        if as_lanes
        else pl.BlockSpec((block_m, 1), lambda i, j: (i, 0)),
        "scratch_shapes": [pltpu.VMEM((block_m, LANES), jnp.float32)] * 2,
    }


def _vmem_bytes(call: Call, config: BlockConfig) -> int:
    """What is allocated, and what the compiler adds: operands in parts, the table of scores, the new best of a row."""
    width = math.ceil(sizes_of(call).width / LANES) * LANES
    blocks = _blocks(config, width)
    dtypes = (call.need("x").dtype, call.need("codebook").dtype, jnp.float32, jnp.int32)
    moved = zip([*blocks["in_specs"], blocks["out_specs"]], dtypes, strict=True)
    parts = 3 * 4 * width * (config.rows + config.codes)  # at full precision an operand is multiplied in three
    scores = 4 * 4 * config.rows * config.codes
    return vmem_bytes(moved, blocks["scratch_shapes"]) + parts + scores + 2 * 4 * config.rows * LANES


def candidates(call: Call) -> Sequence[BlockConfig]:
    """Blocks that fit VMEM, those first that read the codes least often."""
    rows, codes, _ = sizes_of(call)
    configs = [BlockConfig(min(m, rows), min(n, codes)) for m in (1024, 512, 256, 128) for n in (512, 256, 128)]
    fitting = [c for c in dict.fromkeys(configs) if _vmem_bytes(call, c) <= vmem.limit(call)]
    return sorted(fitting, key=lambda c: (-c.rows, -c.codes))


def refuses(call: Call) -> str | None:
    for name in ("x", "codebook"):
        dtype = np.dtype(call.need(name).dtype).name
        if dtype not in ("bfloat16", "float32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {dtype}"
    rows, _, width = sizes_of(call)
    if rows == 0:
        return "x is empty"
    if width > MOST_WIDTH or not candidates(call):
        return f"no block of rows of {width} numbers fits the core's VMEM"
    return None


def _body(
    x_ref: Any, codes_ref: Any, half_ref: Any, out_ref: Any, best_ref: Any, index_ref: Any, *, codes: int, steps: int,
    precision: Any,
) -> None:  # fmt: skip
    step = pl.program_id(1)
    rows, block = best_ref.shape[0], codes_ref.shape[0]

    @pl.when(step == 0)
    def _start() -> None:
        best_ref[...] = jnp.full(best_ref.shape, -jnp.inf, jnp.float32)
        index_ref[...] = jnp.full(index_ref.shape, -1.0, jnp.float32)

    product = lax.dot_general(
        x_ref[...], codes_ref[...], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    # Past the last code lies whatever memory held, NaN too; a code that cannot be used has an infinite half norm.
    column = lax.broadcasted_iota(jnp.int32, (rows, block), 1)
    half = half_ref[...]
    allowed = (column < codes - step * block) & (half < jnp.inf)
    scores = jnp.where(allowed, product - half, -jnp.inf)
    highest = scores.max(-1, keepdims=True)
    # As numbers of float32, which the vector units reduce; they hold every index exactly.
    place = jnp.where(scores == highest, column.astype(jnp.float32), jnp.float32(block)).min(-1, keepdims=True)
    # Strictly better: an earlier block keeps a tie. A row of NaN is better than nothing, and keeps -1.
    better = highest > best_ref[:, :1]
    index = place + (step * block).astype(jnp.float32)
    index_ref[...] = jnp.where(better, jnp.broadcast_to(index, index_ref.shape), index_ref[...])
    best_ref[...] = jnp.where(better, jnp.broadcast_to(highest, best_ref.shape), best_ref[...])

    @pl.when(step == steps - 1)
    def _finish() -> None:
        index = index_ref[...]
        out_ref[...] = (index.T[:1, :] if rows % LANES == 0 else index[:, :1]).astype(jnp.int32)


def nearest_code_tpu(
    x: jax.Array, codebook: jax.Array, *, config: BlockConfig, return_distances: bool, return_stats: bool
) -> Any:
    """The indices as one Pallas call; distances and sums follow from them."""
    flat = x.reshape(-1, x.shape[-1])
    rows, width = flat.shape
    codes = codebook.shape[0]
    usable = is_finite(squared_norms(codebook.astype(jnp.float32)))
    valid = is_finite(squared_norms(flat.astype(jnp.float32)))
    # A product with a code that cannot be used would spoil nothing but itself, were it not for parts of infinities.
    both = jnp.result_type(x, codebook)
    values, clean = flat.astype(both), jnp.where(usable[:, None], codebook, jnp.zeros_like(codebook)).astype(both)
    by = enlargement(codebook.astype(jnp.float32))
    if both == jnp.float32:  # bfloat16 numbers, exact in the product, are too coarse for its rounding to hide anything
        centre, enough = centre_of(codebook.astype(both), by)
        centre = jnp.where(enough, centre, 0)
        values, clean = values - centre, clean - centre
    clean = clean * by.astype(both)
    half = jnp.where(usable, squared_norms(clean.astype(jnp.float32)) / 2, jnp.inf).reshape(1, codes)
    clean = clean * by.astype(both)  # for the rows, which stay as they are
    as_lanes = config.rows % LANES == 0
    steps = math.ceil(codes / config.codes)
    # bfloat16 products are exact in float32 by one pass; float32 takes all six.
    precision = lax.Precision.HIGHEST if both == jnp.float32 else None
    best = pl.pallas_call(
        functools.partial(_body, codes=codes, steps=steps, precision=precision),
        out_shape=out_struct((1, rows) if as_lanes else (rows, 1), jnp.int32, x),
        grid=(math.ceil(rows / config.rows), steps),
        **_blocks(config, width),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * codes * width,
            bytes_accessed=flat.size * flat.dtype.itemsize
            + math.ceil(rows / config.rows) * clean.size * clean.dtype.itemsize
            + 4 * rows,
            transcendentals=0,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_nearest_code",
    )(values, clean, half)
    # Without a code that can be used every score is minus infinity, and no row has an index.
    indices = jnp.where(valid, best.reshape(rows), -1)
    return finish(x, codebook, lowest_equal(codebook, indices), return_distances, return_stats)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    nearest_code_tpu,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=BlockConfig,
    candidates=candidates,
)
