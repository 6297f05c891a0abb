"""What cross-entropy needs of a token's logits, in plain JAX: the specification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide_type(x: Any) -> Any:
    """What logits and sums are computed in: float32, or wider where x is."""
    return jnp.promote_types(jnp.float32, x.dtype)


def vocabulary_axis(transpose_weights: bool) -> int:
    return 0 if transpose_weights else 1


def capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """cap · tanh(logits / cap): bounded by the cap, and near 0 what it was."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits * (1 / soft_cap))


def reference(
    hidden: jax.Array,
    weights: jax.Array,
    labels: jax.Array,
    *,
    transpose_weights: bool = False,
    soft_cap: float | None = None,
    return_sum: bool = False,
    keep_logits: bool = False,
    return_logits: bool = False,
) -> tuple[jax.Array, ...]:
    """(log of the sum of exponentials, the label's logit[, the sum of the logits]) for each token, in float32.

    The logits are hidden @ weights (weights [depth, vocabulary]; [vocabulary, depth] with `transpose_weights`), with a
    soft cap where one is given. A label that is no index of the vocabulary has a logit of 0. With `return_logits` they
    come last, and no gradient goes through them; `keep_logits` is about what a gradient keeps and changes nothing here.
    """
    wide = wide_type(hidden)
    size = weights.shape[vocabulary_axis(transpose_weights)]
    product = "...d,vd->...v" if transpose_weights else "...d,dv->...v"
    logits = capped(jnp.einsum(product, hidden, weights, preferred_element_type=wide), soft_cap)
    known = (labels >= 0) & (labels < size)
    at = jnp.where(known, labels, 0)
    picked = jnp.where(known, jnp.take_along_axis(logits, at[..., None], axis=-1)[..., 0], 0)
    made = [jax.nn.logsumexp(logits, axis=-1), picked]
    made += [logits.sum(-1)] if return_sum else []
    return *made, *([jax.lax.stop_gradient(logits)] if return_logits else [])


def reference_grad(
    hidden: jax.Array,
    weights: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    d_lse: jax.Array,
    d_picked: jax.Array,
    d_sum: jax.Array | None = None,
    logits: jax.Array | None = None,
    *,
    transpose_weights: bool = False,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(d_hidden, d_weights) by differentiating the reference.

    `lse` and `logits` are what the forward pass returned: implementations save work with them, the specification does
    not need them.
    """

    def forward(hidden: Any, weights: Any) -> Any:
        return reference(
            hidden, weights, labels, transpose_weights=transpose_weights, soft_cap=soft_cap, return_sum=True
        )

    made, pull = jax.vjp(forward, hidden, weights)
    flows = (d_lse, d_picked, jnp.zeros_like(d_lse) if d_sum is None else d_sum)
    return pull(tuple(flow.astype(like.dtype) for flow, like in zip(flows, made, strict=True)))
