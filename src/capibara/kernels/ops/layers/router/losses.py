"""What keeps the experts evenly used: two losses, the counts that they read, and the bias that needs no loss."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.layers.router.reference import wide_type
from capibara.kernels.ops.layers.router.rules import GATES


def expert_counts(indices: Int[Array, "*tokens top_k"], num_experts: int) -> Int[Array, " experts"]:
    """How many tokens each expert was chosen by.

    >>> expert_counts(jnp.array([[0, 2], [2, 1]]), 4).tolist()
    [1, 1, 2, 0]
    """
    chosen = indices.reshape(-1, 1) == jnp.arange(num_experts, dtype=indices.dtype)
    return chosen.sum(0, dtype=jnp.int32)


def load_balancing_loss(
    logits: Float[Array, "*tokens experts"], counts: Int[Array, " experts"], *, gate: str = "softmax"
) -> Float[Array, ""]:
    """E · Σ f_e · P_e: 1 when the experts are evenly used, up to E when one has everything (Switch transformer).

    f_e is expert e's share of all choices and has no gradient; P_e is the mean over tokens of its probability: the
    softmax, or with gate="sigmoid" the sigmoids divided by their sum.

    >>> logits = jnp.zeros((4, 2))
    >>> float(load_balancing_loss(logits, jnp.array([2, 2])))
    1.0
    """
    if gate not in GATES:
        raise unknown_name("gate", gate, GATES)
    logits = as_array("load_balancing_loss", "logits", logits)
    counts = as_array("load_balancing_loss", "counts", counts)
    _check_counts(counts, logits.shape[-1])
    wide = logits.astype(wide_type(logits))
    if gate == "sigmoid":
        scores = jax.nn.sigmoid(wide)
        probability = scores / jnp.maximum(scores.sum(-1, keepdims=True), jnp.finfo(wide.dtype).tiny)
    else:
        probability = jax.nn.softmax(wide, -1)
    share = counts.astype(wide.dtype) / jnp.maximum(counts.sum(), 1).astype(wide.dtype)
    # Leading axes stay apart: on a mesh each may be split.
    tokens = math.prod(logits.shape[:-1])
    mean = probability.sum(tuple(range(logits.ndim - 1))) / max(tokens, 1)  # of no tokens, zeros
    return logits.shape[-1] * (jax.lax.stop_gradient(share) * mean).sum()


def z_loss(logits: Float[Array, "*tokens experts"]) -> Float[Array, ""]:
    """The mean over tokens of logsumexp(logits)²: it keeps the logits small (ST-MoE).

    >>> round(float(z_loss(jnp.zeros((3, 8)))), 3)
    4.324
    """
    logits = as_array("z_loss", "logits", logits)
    squares = jnp.square(jax.nn.logsumexp(logits.astype(wide_type(logits)), -1))
    return squares.sum() / max(squares.size, 1)  # of no tokens, zero


def update_bias(bias: Float[Array, " experts"], counts: Any, rate: float) -> Float[Array, " experts"]:
    """The bias of `route`, up by `rate` for experts with fewer tokens than the mean and down for those with more.

    Once a step, outside of the gradient, in place of a balancing loss.

    >>> update_bias(jnp.zeros(3), jnp.array([5, 2, 2]), 0.5).tolist()
    [-0.5, 0.5, 0.5]
    """
    bias, counts = as_array("update_bias", "bias", bias), as_array("update_bias", "counts", counts)
    if bias.ndim != 1 or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise rule_error("The bias is one float an expert", describe(bias), "start from jnp.zeros(num_experts)")
    _check_counts(counts, bias.shape[0])
    counts = counts.astype(jnp.float32)
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(counts.mean() - counts).astype(bias.dtype)


def _check_counts(counts: Any, experts: int) -> None:
    if counts.shape != (experts,):
        raise rule_error(
            f"The counts are one number an expert, ({experts},)",
            describe(counts),
            "use expert_counts(...)",
        )
