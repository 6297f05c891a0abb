"""between_attentions: the public function and the op behind it."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from capibara.kernels.core.dispatch import run, takes_kernel
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.layers.between_attentions import hopper
from capibara.kernels.ops.layers.between_attentions.cases import CASES
from capibara.kernels.ops.layers.between_attentions.reference import reference
from capibara.kernels.ops.layers.between_attentions.rules import OPTIONAL, check, cost, tolerance
from capibara.kernels.ops.layers.between_attentions.xla import xla

BETWEEN_ATTENTIONS: Op = Op(
    "between_attentions",
    family="layers",
    reference=reference,
    operands=(
        "x", "residual", "out_weight", "scale", "up_weight", "down_weight", "next_scale", "next_weight",
        "out_weight_scale", "up_weight_scale", "down_weight_scale", "next_weight_scale", "board",
    ),
    params={"gate": "silu", "eps": 1e-6, "out_parts": None},
    check=check,
    cost=cost,
    tolerance=tolerance,
    cases=CASES,
)  # fmt: skip
BETWEEN_ATTENTIONS.implement(Implementation("xla", xla), hopper.IMPLEMENTATION, Implementation("reference", reference))


def between_attentions(
    x: Float[Array, "rows inner"],
    residual: Float[Array, "rows hidden"],
    out_weight: Array,
    scale: Float[Array, " hidden"],
    up_weight: Array,
    down_weight: Array,
    next_scale: Float[Array, " hidden"],
    next_weight: Array | None = None,
    out_weight_scale: Float[Array, " hidden"] | None = None,
    up_weight_scale: Float[Array, " both"] | None = None,
    down_weight_scale: Float[Array, " hidden"] | None = None,
    next_weight_scale: Float[Array, " outputs"] | None = None,
    board: Int[Array, " words"] | None = None,
    *,
    gate: str = "silu",
    eps: float = 1e-6,
    out_parts: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Array, ...]:
    """What a decoder does to a row between one attention and the next, as one kernel: four products and two norms.

    The attention's output through its last projection, added to the residual stream; the RMS norm of that through a
    gated mlp, added; the RMS norm of that through the next attention's first projection.

    Args:
      x: [rows, inner], what an attention gives; the kernel takes one row.
      residual: [rows, hidden], the residual stream before it.
      out_weight: [hidden, inner], of the attention's last projection. All weights are held by output.
      scale: [hidden], of the norm after it.
      up_weight: [2 * ffn, hidden]: what is gated by, then what is gated.
      down_weight: [hidden, ffn].
      next_scale: [hidden], of the norm after the mlp.
      next_weight: [outputs, hidden], of the next attention's queries, keys and values; None after the last layer.
      out_weight_scale, up_weight_scale, down_weight_scale, next_weight_scale: of weights of int8, what each of their
        outputs is multiplied by. All weights are of int8, or none.
      board: what programs of the kernel tell one another goes by: `new_board`, and handed on from call to call. None
        makes one for this call, which is a pass of its own.
      gate: the activation of the mlp, as `few_rows` takes it.
      eps: of the norms.
      out_parts: how many parts the last product is left in, float32 sums over equal parts of its inputs: 1 is whole.
      implementation: force one by name ("xla", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    Returns:
      (the residual stream, the product [out_parts, rows, outputs] in float32, or without a next weight the norm
      [rows, hidden]), and the board where one was given.

    >>> import jax.numpy as jnp
    >>> x, ones = jnp.ones((1, 2)), jnp.ones(4)
    >>> out, up, down, following = jnp.ones((4, 2)), jnp.ones((6, 4)), jnp.zeros((4, 3)), jnp.ones((5, 4))
    >>> total, product = between_attentions(x, jnp.zeros((1, 4)), out, ones, up, down, ones, following)
    >>> total.tolist(), product.shape, round(float(product[0, 0, 0]), 3)
    ([[2.0, 2.0, 2.0, 2.0]], (1, 1, 5), 4.0)
    """
    given = (
        x, residual, out_weight, scale, up_weight, down_weight, next_scale, next_weight, out_weight_scale,
        up_weight_scale, down_weight_scale, next_weight_scale, board,
    )  # fmt: skip
    operands = tuple(
        as_array("between_attentions", name, value, optional=name in OPTIONAL)
        for name, value in zip(BETWEEN_ATTENTIONS.operands, given, strict=True)
    )
    params: dict[str, Any] = {}
    if gate != BETWEEN_ATTENTIONS.params["gate"]:
        params["gate"] = gate
    if eps != BETWEEN_ATTENTIONS.params["eps"]:
        params["eps"] = float(eps)
    if out_parts is not None:
        params["out_parts"] = out_parts
    return run(BETWEEN_ATTENTIONS, operands, params, implementation=implementation, config=config)


def kernel_parts(*operands: Any, gate: str, eps: float) -> int | None:
    """In how many parts the last product is left where dispatch takes a kernel for this call; None where it does not.

    Shapes and types will do (`jax.ShapeDtypeStruct`). Without a next weight it is 1.
    """
    params: dict[str, Any] = {"gate": gate, "eps": eps}
    parts = hopper.parts_of(call_of(BETWEEN_ATTENTIONS, operands, params))
    last = operands[BETWEEN_ATTENTIONS.operands.index("next_weight")] is None
    call = call_of(BETWEEN_ATTENTIONS, operands, params if last else {**params, "out_parts": parts})
    return parts if parts is not None and takes_kernel(call) else None


def new_board(hidden: int, ffn: int) -> jax.Array:
    """A board for layers of these sizes, which every call of theirs is handed, one after another."""
    return hopper.new_board(hidden, ffn)


BETWEEN_ATTENTIONS.public = between_attentions
register(BETWEEN_ATTENTIONS)
