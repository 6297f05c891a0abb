"""cross_entropy: the public function, and the two ops behind it."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation, describe
from capibara.kernels.core.varying import vary_alike
from capibara.kernels.ops.layers.cross_entropy import gradient as gradients
from capibara.kernels.ops.layers.cross_entropy import mesh, peers, rules, xla
from capibara.kernels.ops.layers.cross_entropy.cases import CASES, GRAD_CASES
from capibara.kernels.ops.layers.cross_entropy.explicit_mesh import with_automatic_axes
from capibara.kernels.ops.layers.cross_entropy.in_forward import CROSS_ENTROPY_AND_GRAD, fits_at_once, weighted_sum
from capibara.kernels.ops.layers.cross_entropy.loss import token_losses
from capibara.kernels.ops.layers.cross_entropy.reference import reference, reference_grad, vocabulary_axis, wide_type

REDUCTIONS = ("mean", "sum", "none")
GRADIENTS = ("recompute", "in_forward", "in_forward_narrow")
PARAMS = {"transpose_weights": False, "soft_cap": None, "block": None}

CROSS_ENTROPY_GRAD = Op(
    "cross_entropy_grad",
    family="layers",
    reference=reference_grad,
    operands=("hidden", "weights", "labels", "lse", "d_lse", "d_picked", "d_sum", "logits"),
    params=PARAMS,
    hints=("block",),
    untuned=("soft_cap",),
    check=rules.check,
    cost=rules.cost_grad,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch,
    partition=mesh.PARTITION_GRAD,
    cases=GRAD_CASES,
)

CROSS_ENTROPY = Op(
    "cross_entropy",
    family="layers",
    reference=reference,
    operands=("hidden", "weights", "labels"),
    params={**PARAMS, "return_sum": False, "keep_logits": False, "return_logits": False},
    hints=("block",),
    untuned=("soft_cap", "return_sum", "keep_logits", "return_logits"),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradients.forward, lambda *args: gradients.backward(CROSS_ENTROPY_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    peers={"logits_in_memory": peers.logits_in_memory},
)

CROSS_ENTROPY.implement(
    xla.IMPLEMENTATION,
    Implementation("reference", reference, refuses=rules.refuses_block),
)
CROSS_ENTROPY_GRAD.implement(
    xla.GRAD_IMPLEMENTATION,
    Implementation("reference", reference_grad, refuses=rules.refuses_block),
)


@overload
def cross_entropy(
    hidden: Float[Array, "*tokens depth"],
    weights: Float[Array, "depth vocabulary"] | Float[Array, "vocabulary depth"], labels: Integer[Array, "*tokens"], *,
    transpose_weights: bool = False, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    ignore_index: int = -100, reduction: str = "mean", gradient: str | None = None, block_size: int | None = None,
    return_z_loss: Literal[False] = False, implementation: str | None = None,
) -> Float[Array, ""] | Float[Array, "*tokens"]: ...  # fmt: skip


@overload
def cross_entropy(
    hidden: Float[Array, "*tokens depth"],
    weights: Float[Array, "depth vocabulary"] | Float[Array, "vocabulary depth"], labels: Integer[Array, "*tokens"], *,
    transpose_weights: bool = False, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    ignore_index: int = -100, reduction: str = "mean", gradient: str | None = None, block_size: int | None = None,
    return_z_loss: Literal[True], implementation: str | None = None,
) -> tuple[Float[Array, ""] | Float[Array, "*tokens"], Float[Array, ""] | Float[Array, "*tokens"]]: ...  # fmt: skip


def cross_entropy(
    hidden: Float[Array, "*tokens depth"],
    weights: Float[Array, "depth vocabulary"] | Float[Array, "vocabulary depth"],
    labels: Integer[Array, "*tokens"],
    *,
    transpose_weights: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    gradient: str | None = None,
    block_size: int | None = None,
    return_z_loss: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, ""]
    | Float[Array, "*tokens"]
    | tuple[Float[Array, ""] | Float[Array, "*tokens"], Float[Array, ""] | Float[Array, "*tokens"]]
):
    """The softmax cross-entropy of the logits hidden @ weights, whose logits are never all in memory but of few tokens.

    Forward and backward go over the vocabulary in chunks. Logits, sums and the result are float32. On a mesh the
    tokens and the vocabulary may be split as they like.

    Args:
      hidden: [..., depth], the last layer's output.
      weights: [depth, vocabulary], or [vocabulary, depth] with `transpose_weights` (an embedding's own table).
      labels: [...], the right token of each place. A token whose label is `ignore_index` has a loss of 0 and no
        gradient. Any other label outside of the vocabulary is an error; under jit, where nobody can look at it, it
        makes the loss and the gradient NaN.
      label_smoothing: this share of the right answer, from 0 to below 1, is spread evenly over the vocabulary.
      z_loss: so many times the square of log(sum of exponentials) is added to each token's loss.
      softcap: cap · tanh(logit / cap) instead of each logit.
      reduction: "mean" over the tokens that are not ignored (0 if all are), "sum", or "none" for a loss a token.
      gradient: "recompute" makes each chunk's logits again in the backward pass: the least memory. "in_forward" makes
        the gradient in the forward pass, a chunk of tokens at a time: three matrix products instead of four, and
        memory for the weights' gradient in float32. It is for "mean" and "sum". "in_forward_narrow" does so without
        that memory, with logits in the operands' type, and rounds a 16-bit gradient of the weights once for each chunk
        of tokens: on an H200 the speed of logits in memory with a 21st to a 28th of theirs. What it costs: where the
        right logit is about 30 a bfloat16 one is off by 0.06, and gradients by 3 % where "recompute" is off by 0.2 %,
        and the loss that comes with them is that of the rounded logits. By default "in_forward" on a GPU where it can
        be (where all logits in float32 take about as much memory as it would, they are kept for the backward pass
        instead: three products as well), and "recompute" elsewhere, where the two have not been timed.
      block_size: columns of a chunk of the vocabulary, by default as many as make 256 MiB of logits; with "in_forward"
        and "in_forward_narrow", tokens of a chunk, by default 512 and 384 MiB of logits.
      return_z_loss: also return how much of the result is z_loss: the result less that is the cross-entropy. It has no
        gradient of its own.
      implementation: force one by name ("xla", "reference"); a refusal is an error. Only "xla" has chunks, and takes
        a `block_size`.

    >>> hidden, weights = jnp.ones((3, 2)), jnp.zeros((2, 10))
    >>> round(float(cross_entropy(hidden, weights, jnp.array([1, 2, -100]))), 4)  # log 10
    2.3026
    """
    hidden, weights, labels = (
        as_array("cross_entropy", name, x) for name, x in (("hidden", hidden), ("weights", weights), ("labels", labels))
    )
    if reduction not in REDUCTIONS:
        raise unknown_name("reduction of cross_entropy", reduction, REDUCTIONS)
    _check_numbers(label_smoothing, z_loss, ignore_index)
    if gradient is not None and gradient not in GRADIENTS:
        raise unknown_name("gradient of cross_entropy", gradient, GRADIENTS)
    if gradient not in (None, "recompute") and reduction == "none":
        raise rule_error(
            f'gradient="{gradient}" needs to know what becomes of each token\'s loss',
            'reduction="none"',
            'pass reduction="sum" or "mean", or gradient="recompute"',
        )
    params: dict[str, Any] = {}
    if transpose_weights:
        params["transpose_weights"] = True
    if softcap is not None:
        params["soft_cap"] = softcap
    if block_size is not None:
        params["block"] = block_size
    call = call_of(CROSS_ENTROPY, (hidden, weights, labels), params)  # its errors come before those of label values
    if gradient is None:
        # On an H200 three products were 1.06 to 1.54 times as fast as four at seven shapes (32,000 to 151,936 words).
        # A block is of columns where the gradient recomputes, as it was before there was a choice.
        by_default = call.target.platform == "gpu" and reduction != "none" and block_size is None
        gradient = "in_forward" if by_default else "recompute"
        if by_default and fits_at_once(call):
            gradient, params["keep_logits"] = "recompute", True
    size = weights.shape[vocabulary_axis(transpose_weights)]
    given_labels, ignored = labels, _is_ignored(labels, ignore_index)
    labels = _widened(labels)
    wrong = ~ignored & ((labels < 0) | (labels >= size))
    _check_labels(given_labels, wrong, size, ignore_index)

    def losses(hidden: Any, weights: Any, labels: Any, options: dict[str, Any]) -> Any:
        wanted = options | {"return_sum": True} if label_smoothing else options
        sums = run(CROSS_ENTROPY, (hidden, weights, labels), wanted, implementation=implementation)
        return token_losses(sums, size, label_smoothing, z_loss), sums[0]

    def reduced(hidden: Any, weights: Any, labels: Any, ignored: Any, wrong: Any) -> Any:
        # What padding holds may be anything: a NaN times a gradient of 0 would still be one, in the weights' gradient.
        hidden = jnp.where(ignored[..., None], 0, hidden)
        # A product with NaN, not a choice of NaN: so the gradient of a wrong label is NaN as well.
        scale = jnp.where(wrong, jnp.nan, 1.0).astype(wide_type(hidden))
        share = 1 / jnp.maximum((~ignored).sum(), 1).astype(scale.dtype) if reduction == "mean" else 1
        if gradient == "recompute":
            each, lse = losses(hidden, weights, labels, params)
            parts = [each, z_loss * jnp.square(jax.lax.stop_gradient(lse))] if return_z_loss else [each]
            made = [jnp.where(ignored, 0, part * scale) for part in parts]
            made = made if reduction == "none" else [part.sum() * share for part in made]
            return tuple(made) if return_z_loss else made[0]
        columns = {name: value for name, value in params.items() if name != "block"}  # the block is of tokens here
        given = {"label_smoothing": label_smoothing, "z_loss": z_loss, "narrow": gradient == "in_forward_narrow"}
        given["return_lse"] = return_z_loss
        together = params | {name: value for name, value in given.items() if value}
        undifferentiated = functools.partial(losses, options=columns)
        # Inside shard_map the gradient of weights that all devices share is then their sum.
        arrays = vary_alike((hidden, weights, labels, jnp.where(ignored, 0, scale * share)))
        total, of_z = weighted_sum(undifferentiated, tuple(together.items()), implementation, *arrays)
        return (total, of_z) if return_z_loss else total

    operands = (hidden, weights, labels, ignored, wrong)
    return with_automatic_axes(reduced, operands, labels if reduction == "none" else None)


def _check_numbers(label_smoothing: Any, z_loss: Any, ignore_index: Any) -> None:
    if not (rules.is_number(label_smoothing) and 0 <= label_smoothing < 1):
        raise rule_error("label_smoothing is a number from 0 to below 1", repr(label_smoothing), "pass e.g. 0.1")
    if not (rules.is_number(z_loss) and 0 <= z_loss < math.inf):
        raise rule_error("z_loss is a finite number, 0 or more", repr(z_loss), "pass e.g. z_loss=1e-4")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int | np.integer):
        raise rule_error("ignore_index is a whole number", repr(ignore_index), "pass e.g. ignore_index=-100")


def _is_ignored(labels: jax.Array, ignore_index: int) -> jax.Array:
    """Which labels are `ignore_index`: none in a type that cannot hold it, where it would wrap to another number."""
    holds = jnp.iinfo(labels.dtype)
    if not holds.min <= ignore_index <= holds.max:
        return jnp.zeros_like(labels, bool)
    return labels == jnp.asarray(ignore_index, labels.dtype)


def _widened(labels: jax.Array) -> jax.Array:
    """Labels in a signed type of 32 bits or 64, which the vocabulary's size and a difference of labels fit in.

    What is too large for it stays too large for the vocabulary.
    """
    holds = jnp.iinfo(labels.dtype)
    signed = jnp.dtype(jnp.int32 if holds.bits <= 32 else jnp.int64)
    most = jnp.iinfo(signed).max
    if holds.max > most:
        labels = jnp.minimum(labels, jnp.asarray(most, labels.dtype))
    return labels.astype(signed)


def _check_labels(labels: Any, wrong: Any, size: int, ignore_index: int) -> None:
    """Refuse labels whose values can be looked at."""
    if isinstance(wrong, jax.core.Tracer) or not bool(wrong.any()):
        return
    first = np.asarray(labels)[np.asarray(wrong)].flat[0]
    raise rule_error(
        f"A label is an index of the vocabulary, 0 to {size - 1}, or ignore_index={ignore_index}",
        f"{first} among {describe(labels)}",
        "check the tokenizer, or pass the label to leave out as ignore_index",
    )


CROSS_ENTROPY.public = cross_entropy
register(CROSS_ENTROPY_GRAD)
register(CROSS_ENTROPY_AND_GRAD)
register(CROSS_ENTROPY)
