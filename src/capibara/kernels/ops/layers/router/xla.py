"""The router in plain JAX, as passes over the experts that XLA fuses: no sort.

The best is a maximum and then the lowest expert that reaches it, two plain reductions; a variadic argmax and
lax.top_k both measured slower (CPU, the choice alone, 16384 tokens, 4 of 32: 1.6 ms, 6.7 and 6.6).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.layers.router.reference import choice_scores, weigh, wide_type
from capibara.kernels.ops.layers.router.rules import MOST_CHOSEN, top_k_of

MOST_PASSES = 512  # experts looked at, over all passes of a token


def xla(
    logits: jax.Array, bias: jax.Array | None = None, *, top_k: int, gate: str, normalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Two reductions for each of the `top_k`; what was taken goes below everything else."""
    experts = logits.shape[-1]
    wide = logits.astype(wide_type(logits))
    scores = choice_scores(logits, bias, gate)
    unusable = jnp.isnan(scores)
    left = jnp.where(unusable, -jnp.inf, scores)
    # What is taken has the number `experts`, past all others: no score is left to say so, for -inf is one too.
    expert = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    indices, chosen = [], []
    for _ in range(top_k):
        best = left.max(-1, keepdims=True)
        index = jnp.where(left == best, expert, experts).min(-1, keepdims=True)
        taken = expert == index
        if bias is None:  # the score is the logit
            chosen.append(best)
        else:
            chosen.append(jnp.where(taken, wide, -jnp.inf).max(-1, keepdims=True))
        left, expert = jnp.where(taken, -jnp.inf, left), jnp.where(taken, experts, expert)
        indices.append(index)
    weights = weigh(jnp.concatenate(chosen, -1), wide, gate, normalize, scale)
    return jnp.where(unusable.any(-1, keepdims=True), jnp.nan, weights), jnp.concatenate(indices, -1)


def sort_is_faster(call: Call) -> tuple[str, ...]:
    """What the reference's sort goes before: this form, where there would be more passes than the sort takes.

    On a CPU, 4 of 32 take half the time by passes, 8 of 64 about the same, 8 of 256 more. On an H200, 4 of 32 take 0.6
    of the sort's time and 8 of 128 take 1.1 of it. A TPU is not measured: there the limit is on how many passes are
    written out.
    """
    top_k, experts = top_k_of(call), call.need("logits").shape[-1]
    few = top_k <= MOST_CHOSEN and (call.target.platform == "tpu" or top_k * experts <= MOST_PASSES)
    return () if few else ("xla",)


# JAX's own derivative would scatter; the op's writes the gradient in one pass.
IMPLEMENTATION = Implementation("xla", xla, own_gradient=True)
