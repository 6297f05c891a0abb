"""The router for the TPU, in Pallas (Mosaic): tokens lie along lanes and experts along sublanes.

So every choice is a maximum over sublanes and nothing crosses lanes. The logits come transposed, which XLA folds into
the product that makes them; weights and indices leave as [k, tokens].
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
from capibara.kernels.ops.layers.router.rules import MOST_CHOSEN, refuses_sizes, rows_of
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES = 128
LIVE = 6  # copies of a block in float32 that may be alive at once: logits, scores, what is left, experts, and masks


@dataclasses.dataclass(frozen=True)
class LanesConfig:
    """Tokens of a block."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise rule_error("tokens is 1 or more", self, "use tokens=1024")


def candidates(call: Call) -> Sequence[LanesConfig]:
    logits = call.need("logits")
    rows, experts = rows_of(logits), logits.shape[-1]
    if rows <= LANES:  # a block of all tokens may have any number of them
        return [LanesConfig(max(rows, 1))]

    def fits(tokens: int) -> bool:
        logits_spec, bias_spec, out_spec = _specs(experts, MOST_CHOSEN, tokens)
        blocks = [(logits_spec, jnp.float32), (bias_spec, jnp.float32), *[(out_spec, jnp.float32)] * 2]
        return vmem_bytes(blocks, [pltpu.VMEM((experts, tokens), jnp.float32)] * LIVE) <= vmem.limit(call)

    # Past a thousand tokens a block hides what a step costs; a smaller one fits the registers better.
    return [LanesConfig(n) for n in (1024, 512, 2048, 256, 128) if n <= math.ceil(rows / LANES) * LANES and fits(n)]


def _specs(experts: int, top_k: int, tokens: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """The blocks of the logits, of a bias and of a result."""
    return (
        pl.BlockSpec((experts, tokens), lambda i: (0, i)),
        pl.BlockSpec((experts, 1), lambda i: (0, 0)),
        pl.BlockSpec((top_k, tokens), lambda i: (0, i)),
    )


def refuses(call: Call) -> str | None:
    logits = call.need("logits")
    for name in call.op.operands:
        x = call[name]
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {x.dtype.name}"
    if rows_of(logits) == 0:
        return "there are no tokens"
    return refuses_sizes(call)


def _body(logits_ref: Any, *refs: Any, biased: bool, top_k: int, gate: str, normalize: bool, scale: float) -> None:
    *bias_ref, weights_ref, indices_ref = refs
    logits = logits_ref[...].astype(jnp.float32)
    experts = logits.shape[0]
    scores, total, highest = logits, None, None
    if gate == "softmax" and (biased or not normalize):
        highest = logits.max(0, keepdims=True)
        powers = jnp.exp(logits - highest)
        total = powers.sum(0, keepdims=True)
        scores = powers / total if biased else scores
    if biased:
        scores = (jax.nn.sigmoid(logits) if gate == "sigmoid" else scores) + bias_ref[0][...]
    unusable = scores != scores
    left = jnp.where(unusable, -jnp.inf, scores)
    # What is taken has the number `experts`, past all others: no score is left to say so, for -inf is one too.
    expert = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    indices, chosen = [], []
    for _ in range(top_k):
        best = left.max(0, keepdims=True)
        index = jnp.where(left == best, expert, experts).min(0, keepdims=True)
        taken = expert == index
        chosen.append(jnp.where(taken, logits, -jnp.inf).max(0, keepdims=True))
        left, expert = jnp.where(taken, -jnp.inf, left), jnp.where(taken, experts, expert)
        indices.append(index)
    picked = jnp.concatenate(chosen, 0)
    if gate == "sigmoid":
        weights = jax.nn.sigmoid(picked)
        if normalize:
            weights = weights / jnp.maximum(weights.sum(0, keepdims=True), float(np.finfo(np.float32).tiny))
    elif normalize:
        powers = jnp.exp(picked - picked.max(0, keepdims=True))
        weights = powers / powers.sum(0, keepdims=True)
    else:
        assert highest is not None  # unnormalised softmax has both
        assert total is not None
        weights = jnp.exp(picked - highest) / total
    spoilt = jnp.where(unusable, 1.0, 0.0).max(0, keepdims=True) > 0
    weights_ref[...] = jnp.where(spoilt, jnp.nan, weights * scale)
    indices_ref[...] = jnp.concatenate(indices, 0)


def route_forward(
    logits: jax.Array, bias: jax.Array | None = None, *, config: LanesConfig, top_k: int, gate: str, normalize: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """One Pallas call over blocks of tokens; see the module's text."""
    *lead, experts = logits.shape
    rows = rows_of(logits)
    operands = [logits.reshape(rows, experts).T]
    logits_spec, bias_spec, out_spec = _specs(experts, top_k, config.tokens)
    specs = [logits_spec]
    if bias is not None:
        operands.append(bias.astype(jnp.float32).reshape(experts, 1))
        specs.append(bias_spec)
    weights, indices = pl.pallas_call(
        functools.partial(
            _body, biased=bias is not None, top_k=top_k, gate=gate, normalize=normalize, scale=float(scale)
        ),
        out_shape=[out_struct((top_k, rows), jnp.float32, logits), out_struct((top_k, rows), jnp.int32, logits)],
        grid=(math.ceil(rows / config.tokens),),
        in_specs=specs,
        out_specs=[out_spec] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=rows * experts * 4 * top_k,
            bytes_accessed=rows * (experts * logits.dtype.itemsize + 8 * top_k),
            transcendentals=rows * experts,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_route",
    )(*operands)
    shape = (*lead, top_k)
    return weights.T.reshape(shape), indices.T.reshape(shape)


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    route_forward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=LanesConfig,
    candidates=candidates,
)
