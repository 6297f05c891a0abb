"""How route is differentiated: through the weights alone, by one elementwise pass that writes the logits' gradient.

Where the weights are a softmax over the chosen, they and the indices are all that is kept; the other gates keep the
logits, which their product usually keeps alive anyway. Nothing is scattered: each choice's cotangent is compared into
its place. The choice has no derivative, and so neither has the bias.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.layers.router.reference import wide_type

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    logits, bias = arrays
    weights, indices = run(op, arrays, params, prefer=prefer)
    from_weights = params["gate"] != "sigmoid" and params["normalize"]
    like = jnp.zeros((0, logits.shape[-1]), logits.dtype)  # type and width, without the values
    return (weights, indices), (None if from_weights else logits, weights, indices, like, bias)


def backward(residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, ...]:
    logits, weights, indices, like, bias = residuals
    flow = cotangent[0].astype(weights.dtype)
    experts = like.shape[-1]
    if logits is None:
        share = weights / params["scale"]
        d_logits = spread(weights * (flow - (share * flow).sum(-1, keepdims=True)), indices, experts)
    elif params["gate"] == "sigmoid":
        d_logits = spread(_of_sigmoid(logits, indices, flow, params), indices, experts)
    else:
        probability = jax.nn.softmax(logits.astype(wide_type(logits)), -1)
        d_logits = spread(weights * flow, indices, experts) - probability * (weights * flow).sum(-1, keepdims=True)
    return d_logits.astype(like.dtype), None if bias is None else vary_like(jnp.zeros_like(bias), bias)


def _of_sigmoid(logits: jax.Array, indices: jax.Array, flow: jax.Array, params: Params) -> jax.Array:
    """The cotangents of the chosen logits."""
    chosen = jnp.take_along_axis(logits.astype(flow.dtype), indices, -1)
    score = jax.nn.sigmoid(chosen)
    if params["normalize"]:
        total, tiny = score.sum(-1, keepdims=True), jnp.finfo(score.dtype).tiny
        divisor = jnp.maximum(total, tiny)
        # Below `tiny` the divisor is a constant.
        inner = jnp.where(total > tiny, (score / divisor * flow).sum(-1, keepdims=True), 0)
        flow = (flow - inner) / divisor
    return params["scale"] * flow * score * jax.nn.sigmoid(-chosen)


def spread(values: jax.Array, indices: jax.Array, experts: int) -> jax.Array:
    """[..., experts] with the value of each choice in its expert's place, zeros elsewhere."""
    expert = jnp.arange(experts, dtype=indices.dtype)
    made = jnp.zeros((*values.shape[:-1], experts), values.dtype)
    for choice in range(values.shape[-1]):
        at = slice(choice, choice + 1)
        made = jnp.where(indices[..., at] == expert, values[..., at], made)
    return made
