"""The forward pass of cross-entropy for the TPU, in Pallas (Mosaic): logits are in VMEM only, a tile at a time.

The grid is (blocks of tokens, blocks of the vocabulary), the vocabulary innermost: a block of hidden states stays while
the weights stream past it, and its running maximum and sums stay with it. The blocks of tokens are independent, so both
cores of a v4 chip have half of them. The weights are read once for each block of tokens, which is why that is large.
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
from capibara.kernels.ops.layers.cross_entropy.reference import capped, vocabulary_axis
from capibara.kernels.ops.layers.cross_entropy.rules import refuses_block, sizes_of
from capibara.kernels.ops.layers.cross_entropy.xla import LOWEST
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LIVE = 4  # copies of a tile of logits in float32 that may be alive at once


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tokens and columns of a tile of logits."""

    tokens: int
    columns: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.columns) < 1:
            raise rule_error("tokens and columns are 1 or more", self, "use tokens=512, columns=256")


def _specs(config: TileConfig, depth: int, axis: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """The blocks of hidden states, of weights with the vocabulary along `axis`, and of one number a token."""
    if axis == 1:
        weights_spec = pl.BlockSpec((depth, config.columns), lambda i, j: (0, j))
    else:
        weights_spec = pl.BlockSpec((config.columns, depth), lambda i, j: (j, 0))
    hidden_spec = pl.BlockSpec((config.tokens, depth), lambda i, j: (i, 0))
    return hidden_spec, weights_spec, pl.BlockSpec((config.tokens, 1), lambda i, j: (i, 0))


def _running_scratch(config: TileConfig) -> Any:
    """A maximum or a sum that waits for the next block of the vocabulary."""
    return pltpu.VMEM((config.tokens, 1), jnp.float32)


def _tile_bytes(config: TileConfig, depth: int, dtype: Any) -> int:
    """With all three results, and the tiles of logits that are alive at once."""
    hidden_spec, weights_spec, number_spec = _specs(config, depth, axis=0)
    blocks = [(hidden_spec, dtype), (weights_spec, dtype), *[(number_spec, jnp.float32)] * 4]
    return vmem_bytes(blocks, [_running_scratch(config)] * 4) + LIVE * 4 * config.tokens * config.columns


def candidates(call: Call) -> Sequence[TileConfig]:
    """Tiles that fit VMEM, those with the most tokens first: they read the weights the fewest times."""
    n = sizes_of(call)
    dtype = call.need("hidden").dtype
    configs = [
        TileConfig(min(tokens, n.tokens), min(columns, n.vocabulary))
        for tokens in (1024, 512, 256, 128, 64, 32, 16)
        for columns in (512, 256, 128)
    ]
    limit = vmem.limit(call)
    return list(dict.fromkeys(config for config in configs if _tile_bytes(config, n.depth, dtype) <= limit))


def refuses(call: Call) -> str | None:
    n = sizes_of(call)
    dtype = call.need("hidden").dtype
    if np.dtype(dtype).name not in ("bfloat16", "float32"):
        return f"a TPU's matrix units take bfloat16 and float32; hidden is {dtype.name}"
    if n.tokens == 0:
        return "there are no tokens"
    if call.need("labels").dtype != jnp.int32:
        return f"it takes labels of int32, not {call.need('labels').dtype.name}"
    if not candidates(call):
        return f"no tile of depth {n.depth} fits the core's VMEM"
    return refuses_block(call)


def _body(*refs: Any, config: TileConfig, size: int, axis: int, soft_cap: float | None, return_sum: bool) -> None:
    hidden_ref, weights_ref, labels_ref, *rest = refs
    outputs = 3 if return_sum else 2
    out_refs, (m_i, l_i, *sums) = rest[:outputs], rest[outputs:]  # the running maximum, and the sum of exponentials
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _start() -> None:
        m_i[...] = jnp.full(m_i.shape, LOWEST, jnp.float32)
        for ref in (l_i, *sums):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    contract = (((1,), (1 - axis,)), ((), ()))
    logits = lax.dot_general(hidden_ref[...], weights_ref[...], contract, preferred_element_type=jnp.float32)
    logits = capped(logits, soft_cap)
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, 1) + block * config.columns
    sums[0][...] += jnp.where(columns == labels_ref[...], logits, 0.0).sum(1, keepdims=True)
    outside = size % config.columns != 0  # then the last block has columns that are none, of any value
    if return_sum:
        sums[1][...] += (jnp.where(columns < size, logits, 0.0) if outside else logits).sum(1, keepdims=True)
    if outside:
        logits = jnp.where(columns < size, logits, LOWEST)
    m_next = jnp.maximum(m_i[...], logits.max(1, keepdims=True))
    l_i[...] = l_i[...] * jnp.exp(m_i[...] - m_next) + jnp.exp(logits - m_next).sum(1, keepdims=True)
    m_i[...] = m_next

    @pl.when(block == pl.num_programs(1) - 1)
    def _finish() -> None:
        out_refs[0][...] = m_i[...] + jnp.log(l_i[...])
        for ref, value in zip(out_refs[1:], sums, strict=True):
            ref[...] = value[...]


def cross_entropy_forward(
    hidden: jax.Array, weights: jax.Array, labels: jax.Array,
    *, config: TileConfig, transpose_weights: bool, soft_cap: float | None, return_sum: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The forward pass as one Pallas call; see the module's text."""
    axis = vocabulary_axis(transpose_weights)
    depth, size = hidden.shape[-1], weights.shape[axis]
    rows = hidden.reshape(-1, depth)
    tokens = rows.shape[0]
    grid = (math.ceil(tokens / config.tokens), math.ceil(size / config.columns))
    hidden_spec, weights_spec, number_spec = _specs(config, depth, axis)
    outputs = 3 if return_sum else 2
    outs = pl.pallas_call(
        functools.partial(_body, config=config, size=size, axis=axis, soft_cap=soft_cap, return_sum=return_sum),
        out_shape=[out_struct((tokens, 1), jnp.float32, hidden)] * outputs,
        grid=grid,
        in_specs=[hidden_spec, weights_spec, number_spec],
        out_specs=[number_spec] * outputs,
        scratch_shapes=[_running_scratch(config)] * (outputs + 1),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * depth * size,
            bytes_accessed=rows.size * rows.dtype.itemsize + grid[0] * weights.size * weights.dtype.itemsize,
            transcendentals=tokens * size,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_cross_entropy",
    )(rows, weights, labels.reshape(-1, 1))
    return tuple(x.reshape(labels.shape) for x in outs)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    cross_entropy_forward,
    platforms=("tpu",),
    refuses=refuses,
    rank=lambda call: 5,  # below xla's until it has been timed on a TPU
    kernel=True,
    config_type=TileConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
