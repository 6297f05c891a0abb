"""The router in plain JAX: the specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def wide_type(x: Any) -> Any:
    """What scores and weights are computed in: float32, or wider where the logits are."""
    return jnp.promote_types(jnp.float32, x.dtype)


def choice_scores(logits: jax.Array, bias: jax.Array | None, gate: str) -> jax.Array:
    """What the experts are chosen by, in the wide type: the logits, or the gate's scores plus the bias.

    Without a bias the logits order the experts as any gate does, and do not tie where a gate rounds to the same.
    """
    wide = logits.astype(wide_type(logits))
    if bias is None:
        return wide
    if gate == "softmax":
        wide = jax.nn.softmax(wide, -1)
    elif gate == "sigmoid":
        wide = jax.nn.sigmoid(wide)
    return wide + bias.astype(wide.dtype)


def weigh(chosen: jax.Array, logits: jax.Array, gate: str, normalize: bool, scale: float) -> jax.Array:
    """The weights of the chosen experts from their logits [..., k], both in the wide type.

    Softmax scores divided by their sum are the softmax over the chosen alone, which does not underflow.
    """
    if gate == "sigmoid":
        weights = jax.nn.sigmoid(chosen)
        if normalize:
            weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(weights.dtype).tiny)
    elif normalize:
        weights = jax.nn.softmax(chosen, -1)
    else:
        weights = jnp.exp(chosen - jax.nn.logsumexp(logits, -1, keepdims=True))
    return weights * scale


def reference(
    logits: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int = 1,
    gate: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """(weights, indices) [..., top_k] of the experts with the largest scores, best first, ties to the lowest expert.

    gate "softmax": scores are the softmax over all experts; "sigmoid": of each logit alone; "softmax_topk": the
    logits choose, and the weights are the softmax over the chosen. The bias is added to the scores for the choice and
    is not in the weights. `normalize` divides a token's weights by their sum; `scale` multiplies them at the end. A
    NaN is chosen last, and all the weights of its token are NaN.
    """
    scores = lax.stop_gradient(choice_scores(logits, bias, gate))
    unusable = jnp.isnan(scores)
    _, indices = lax.top_k(jnp.where(unusable, -jnp.inf, scores), top_k)
    wide = logits.astype(wide_type(logits))
    weights = weigh(jnp.take_along_axis(wide, indices, -1), wide, gate, normalize, scale)
    return jnp.where(unusable.any(-1, keepdims=True), jnp.nan, weights), indices
