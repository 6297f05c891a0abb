"""Activation and its gradient for the TPU, in Pallas (Mosaic): tiles stream through VMEM, each number once.

x is seen as [groups, rows, columns]: within a group rows are counted evenly, so that a row's number is where its group
begins plus its place. Those beginnings and the seeds are scalars, fetched before the first tile. Inside a tile a loop
takes a few rows at a time, which keeps what is computed small beside what is moved.
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
from capibara.kernels.ops.layers.activation.folding import fold_of, fold_rows, group_scalars, word
from capibara.kernels.ops.layers.activation.formulas import value, value_and_slope
from capibara.kernels.ops.layers.activation.masking import Strides, scale
from capibara.kernels.pallas import prng, vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES = 128
CHUNKS = {2: 16, 4: 8}  # rows computed at a time, by bytes of a number: what fills a packed register
LIVE = 8  # copies of a chunk in 32 bits that may be alive at once: the hash's, the formula's
WIDEST = 2048  # columns of a tile
ENOUGH = 1 << 20  # bytes of a tile: moving it then hides what a step costs
MOST_GROUPS = 512  # whose four scalars each fit a core's scalar memory


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Rows and columns of a tile, and how many of its rows are computed at a time."""

    rows: int
    columns: int
    chunk: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.chunk) < 1 or self.rows % self.chunk:
            raise rule_error("A tile's rows are a positive multiple of chunk", self, "use rows=256, chunk=16")


def candidates(call: Call) -> Sequence[TileConfig]:
    """Tiles that fit VMEM, the smallest that moves enough at a time first, then the others from the largest."""
    x, rows = call.need("x"), fold_of(call).rows
    outputs = 1 if "d_out" not in call.op.operands else 1 + (call["up"] is not None)
    inputs = sum(v is not None and v.shape == x.shape for v in call.args)
    arrays = inputs + outputs
    chunk = min(CHUNKS[x.dtype.itemsize], rows)
    columns = x.shape[-1] if x.shape[-1] <= WIDEST else WIDEST
    width = math.ceil(columns / LANES) * LANES

    def fits(rows: int) -> bool:
        blocks = [(_block_spec(rows, columns), x.dtype)] * arrays
        return vmem_bytes(blocks) + LIVE * 4 * chunk * width <= vmem.limit(call)

    tiles = {min(target, rows // chunk * chunk) for target in (1024, 512, 256, 128, 64, 32, 16)}
    if chunk < CHUNKS[x.dtype.itemsize]:
        tiles = {rows}  # a tile of all rows may have any number of them
    enough = {r for r in tiles if r * width * arrays * x.dtype.itemsize >= ENOUGH}
    order = sorted(tiles, key=lambda r: (r not in enough, r if r in enough else -r))
    return [TileConfig(r, columns, chunk) for r in order if fits(r) and r % chunk == 0]


def _block_spec(rows: int, columns: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, columns), lambda g, i, j, scalars: (g, i, j))


def refuses(call: Call) -> str | None:
    x = call.need("x")
    if np.dtype(x.dtype).name not in ("bfloat16", "float32"):
        return f"a TPU's vector units take bfloat16 and float32; x is {x.dtype.name}"
    if math.prod(x.shape) == 0:
        return "x is empty"
    groups = fold_of(call).groups
    if groups > MOST_GROUPS:
        return f"it takes up to {MOST_GROUPS} groups of rows with a seed or a count of their own, not {groups}"
    return None


def _body(
    scalars: Any, *refs: Any, config: TileConfig, stride: int, kind: str, rate: float, has_up: bool, grad: bool
) -> None:
    x_ref, *rest = refs
    up_ref = rest.pop(0) if has_up else None
    flow_ref = rest.pop(0) if grad else None
    group, tile, across = (pl.program_id(axis) for axis in range(3))
    low, high, begin, first_column = (scalars[group * 4 + i] for i in range(4))
    short = x_ref.dtype.itemsize == 2

    def keep(turn: Any) -> jax.Array:
        place = lax.broadcasted_iota(jnp.int32, (config.chunk, 1), 0) + (tile * config.rows + turn * config.chunk)
        rows = place * word(stride) + begin
        columns = lax.broadcasted_iota(jnp.int32, (1, config.columns), 1) + (across * config.columns + first_column)
        return prng.pair_keep_mask((low, high), rows, columns, rate)

    def step(turn: Any, carry: None) -> None:
        at = pl.ds(pl.multiple_of(turn * config.chunk, config.chunk), config.chunk)
        values = x_ref[at, :].astype(jnp.float32)
        factor = None if up_ref is None else up_ref[at, :].astype(jnp.float32)
        if flow_ref is None:
            y = value(kind, values, short)
            outs = [y if factor is None else y * factor]
        else:
            y, slope = value_and_slope(kind, values, short)
            flow = flow_ref[at, :].astype(jnp.float32)
            outs = [flow * slope] if factor is None else [flow * slope * factor, flow * y]
        kept = keep(turn) if rate else None
        for ref, terms in zip(rest, outs, strict=True):
            if kept is not None:
                terms = jnp.where(kept, terms * scale(rate), 0.0)
            ref[at, :] = terms.astype(ref.dtype)
        return carry

    lax.fori_loop(0, config.rows // config.chunk, step, None)


def _run(
    operands: list[jax.Array], seed: Any, offsets: Any, outputs: int, config: TileConfig, kind: str, rate: float,
    strides: Strides | None, has_up: bool, grad: bool,
) -> list[jax.Array]:  # fmt: skip
    x = operands[0]
    *lead, columns = x.shape
    fold = fold_rows(tuple(lead), seed, strides)
    flat = (fold.groups, fold.rows, columns)
    spec = _block_spec(config.rows, config.columns)
    outs = pl.pallas_call(
        functools.partial(
            _body, config=config, stride=fold.stride, kind=kind, rate=rate, has_up=has_up, grad=grad
        ),
        out_shape=[out_struct(flat, x.dtype, x)] * outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(flat[0], math.ceil(fold.rows / config.rows), math.ceil(columns / config.columns)),
            in_specs=[spec] * len(operands),
            out_specs=[spec] * outputs,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=16 * x.size,
            bytes_accessed=(len(operands) + outputs) * x.size * x.dtype.itemsize,
            transcendentals=x.size,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_activation_grad" if grad else "capibara_activation",
    )(group_scalars(fold, seed, offsets), *(v.reshape(flat) for v in operands))  # fmt: skip
    return [v.reshape(x.shape) for v in outs]


def activation_forward(
    x: jax.Array, up: jax.Array | None = None, seed: jax.Array | None = None, offsets: jax.Array | None = None,
    *, config: TileConfig, kind: str, rate: float, strides: Strides | None,
) -> jax.Array:  # fmt: skip
    """The forward pass as one Pallas call; see the module's text."""
    operands = [v for v in (x, up) if v is not None]
    return _run(operands, seed, offsets, 1, config, kind, rate, strides, up is not None, False)[0]


def activation_backward(
    x: jax.Array, up: jax.Array | None, seed: jax.Array | None, offsets: jax.Array | None, d_out: jax.Array,
    *, config: TileConfig, kind: str, rate: float, strides: Strides | None,
) -> tuple[Any, Any]:  # fmt: skip
    operands = [v for v in (x, up, d_out) if v is not None]
    outputs = 1 if up is None else 2
    d_x, *d_up = _run(operands, seed, offsets, outputs, config, kind, rate, strides, up is not None, True)
    return d_x, d_up[0] if d_up else None


def _implementation(fn: Any) -> Implementation:
    return Implementation(
        "pallas_tpu",
        fn,
        platforms=("tpu",),
        refuses=refuses,
        rank=lambda call: 5,  # below xla's until it has been timed on a TPU
        kernel=True,
        config_type=TileConfig,
        default_config=lambda call: candidates(call)[0],
        candidates=candidates,
    )


IMPLEMENTATION = _implementation(activation_forward)
GRAD_IMPLEMENTATION = _implementation(activation_backward)
