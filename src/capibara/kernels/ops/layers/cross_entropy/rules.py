"""What a call of cross_entropy must be, what it costs, and how exact its result is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.layers.cross_entropy.reference import vocabulary_axis


class Sizes(NamedTuple):
    tokens: int
    depth: int
    vocabulary: int


def sizes_of(call: Call) -> Sizes:
    *lead, depth = call.need("hidden").shape
    axis = vocabulary_axis(bool(call.params["transpose_weights"]))
    return Sizes(math.prod(lead), depth, call.need("weights").shape[axis])


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    hidden, weights, labels = call["hidden"], call["weights"], call["labels"]
    if hidden is None or len(hidden.shape) == 0:
        raise rule_error("hidden is [..., depth]", describe(hidden), "pass the last layer's output")
    if weights is None or len(weights.shape) != 2 or 0 in weights.shape:
        raise rule_error(
            "weights are a matrix [depth, vocabulary], neither of them 0", describe(weights), "pass the output layer's"
        )
    for name, x in (("hidden", hidden), ("weights", weights)):
        if np.dtype(x.dtype).name not in FLOATS:
            raise rule_error(
                f"cross_entropy takes {', '.join(FLOATS)}", f"{name} of {describe(x)}", "convert it with .astype(...)"
            )
    if hidden.dtype != weights.dtype:
        raise rule_error("hidden and weights have one type", call.signature, "convert one with .astype(...)")
    transposed = bool(call.params["transpose_weights"])
    depth = weights.shape[1 - vocabulary_axis(transposed)]
    if depth != hidden.shape[-1]:
        layout = "[vocabulary, depth] with transpose_weights=True" if transposed else "[depth, vocabulary]"
        raise rule_error(
            f"weights are {layout}, with hidden's depth {hidden.shape[-1]}",
            describe(weights),
            "check the shapes, or change transpose_weights",
        )
    if labels is None or labels.shape != hidden.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise rule_error(f"labels are whole numbers {hidden.shape[:-1]}", describe(labels), "pass one for each token")
    cap = call.params["soft_cap"]
    if cap is not None and not (is_number(cap) and 0 < cast(float, cap) < math.inf):
        raise rule_error("The soft cap is a finite number above 0, or None", repr(cap), "pass e.g. softcap=30.0")
    block = call.params["block"]
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise rule_error("block_size is a whole number of columns, 1 or more, or None", repr(block), "pass e.g. 4096")
    for name in ("lse", "d_lse", "d_picked", "d_sum"):
        if name in call.op.operands:
            given = call[name]
            if (given is not None or name != "d_sum") and (given is None or given.shape != hidden.shape[:-1]):
                raise rule_error(f"{name} is a number a token, {hidden.shape[:-1]}", describe(given), "pass it so")
    logits = call["logits"] if "logits" in call.op.operands else None
    expected = (*hidden.shape[:-1], weights.shape[vocabulary_axis(transposed)])
    if logits is not None and logits.shape != expected:
        raise rule_error(f"logits are as the forward pass returned them, {expected}", describe(logits), "pass them so")


def refuses_block(call: Call) -> str | None:
    """For an implementation that has no chunks: a size asked for is not passed over in silence."""
    return None if call.params["block"] is None else "it has no chunks of a size to choose: leave block_size out"


def is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def cost(call: Call) -> Cost:
    """One product; each operand read once, two or three numbers a token written."""
    n = sizes_of(call)
    written = 4 * n.tokens * (3 if call.params["return_sum"] else 2)
    written += 4 * n.tokens * n.vocabulary if call.params["return_logits"] else 0
    moved = float(sum(map(nbytes, call.args)) + written)
    return Cost(matrix_flops=max(2.0 * math.prod(n), 1.0), bytes=moved, dtype=call.need("hidden").dtype.name)


def cost_grad(call: Call) -> Cost:
    """Three products, two where the logits were kept; each operand read once, two gradients written."""
    n = sizes_of(call)
    moved = sum(map(nbytes, call.args)) + nbytes(call["hidden"]) + nbytes(call["weights"])
    kept = "logits" in call.op.operands and call["logits"] is not None
    return Cost(
        matrix_flops=max((4.0 if kept else 6.0) * math.prod(n), 1.0),
        bytes=float(moved),
        dtype=call.need("hidden").dtype.name,
    )


def _logit_error(call: Call) -> float:
    """Relative to the size of a logit: products summed in float32 over the depth, four for an unlucky draw, and the
    matrix unit's own rounding of float32 operands (TF32 on a GPU, bfloat16 on a TPU)."""
    dtype = call.need("hidden").dtype
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    unit = 0.0
    if dtype == jnp.float32 and matmul_precision() not in ("highest", "float32"):
        unit = {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(call.target.platform, 0.0)
    return 4 * wide * max(sizes_of(call).depth, 1) ** 0.5 + 2 * unit


def tolerance(call: Call) -> float:
    """The logits' error, and sums of exponentials over the vocabulary whose roundings grow with the root of their
    number; nothing is rounded to the operands' type."""
    wide = unit_roundoff(jnp.promote_types(jnp.float32, call.need("hidden").dtype))
    return _logit_error(call) + wide * (16 + 4 * sizes_of(call).vocabulary ** 0.5)


def tolerance_grad(call: Call) -> float:
    """Each logit's gradient is rounded to the operands' type, and so is the sum: two units. A probability is wrong by
    its logit's absolute error, and a logit of standard normal operands is as large as the root of the depth."""
    n = sizes_of(call)
    dtype = call.need("hidden").dtype
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    return 2 * unit_roundoff(dtype) + _logit_error(call) * max(n.depth, 1) ** 0.5 + wide * (16 + 4 * n.tokens**0.5)
