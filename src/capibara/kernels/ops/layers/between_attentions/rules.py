"""What a call of between_attentions may be, its sizes, its cost, and how far from exact it may come."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import FLOATS, Call, Cost, describe, nbytes, unit_roundoff
from capibara.kernels.ops.layers.activation.formulas import KINDS

WEIGHTS = ("out_weight", "up_weight", "down_weight", "next_weight")
WEIGHT_SCALES = tuple(f"{name}_scale" for name in WEIGHTS)
OPTIONAL = ("next_weight", *WEIGHT_SCALES, "board")


class Sizes(NamedTuple):
    rows: int
    inner: int
    """Numbers that an attention gives a row."""
    hidden: int
    ffn: int
    outputs: int
    """Of the last product; 0 where there is none."""


def sizes(call: Call) -> Sizes:
    (rows, inner), hidden = call.need("x").shape, call.need("residual").shape[1]
    following = call["next_weight"]
    outputs = 0 if following is None else following.shape[0]
    return Sizes(rows, inner, hidden, call.need("down_weight").shape[1], outputs)


def is_quantized(call: Call) -> bool:
    return np.dtype(call.need("out_weight").dtype).name == "int8"


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    for name in call.op.operands:
        given = call[name]
        if given is None and name not in OPTIONAL:
            raise rule_error(f"between_attentions needs {name}", call.signature, "pass it")
        rank = 2 if name in ("x", "residual", *WEIGHTS) else 1
        if given is not None and len(given.shape) != rank:
            raise rule_error(f"{name} has {rank} axes", describe(given), "reshape it")
    x = call.need("x")
    n, dtype = sizes(call), np.dtype(x.dtype).name
    if dtype not in FLOATS:
        raise rule_error(f"x is of {', '.join(FLOATS)}", describe(x), "convert it with .astype()")
    shapes = {
        "residual": (n.rows, n.hidden), "out_weight": (n.hidden, n.inner), "scale": (n.hidden,),
        "up_weight": (2 * n.ffn, n.hidden), "down_weight": (n.hidden, n.ffn), "next_scale": (n.hidden,),
        "next_weight": (n.outputs, n.hidden), "out_weight_scale": (n.hidden,), "up_weight_scale": (2 * n.ffn,),
        "down_weight_scale": (n.hidden,), "next_weight_scale": (n.outputs,),
    }  # fmt: skip
    for name, shape in shapes.items():
        given = call[name]
        if given is not None and given.shape != shape:
            raise rule_error(
                f"{name} is {list(shape)} beside x {list(x.shape)}, residual [rows, {n.hidden}] and down_weight "
                f"[{n.hidden}, {n.ffn}]",
                describe(given),
                "weights are held by output, [outputs, inputs]: check which one it is",
            )
    _check_types(call, dtype)
    _check_params(call)


def _check_types(call: Call, dtype: str) -> None:
    weights = [name for name in WEIGHTS if call[name] is not None]
    held = {np.dtype(call.need(name).dtype).name for name in weights}
    if held not in ({dtype}, {"int8"}) or np.dtype(call.need("residual").dtype).name != dtype:
        raise rule_error(
            "x, the residual and the weights have one type, or the weights are all of int8",
            call.signature,
            "convert them with .astype()",
        )
    for name, scale in zip(WEIGHTS, WEIGHT_SCALES, strict=True):
        if (call[scale] is not None) != (held == {"int8"} and name in weights):
            raise rule_error(
                "Every weight of int8 has the scales of its outputs, and no other has",
                f"{name} {'without' if call[scale] is None else 'with'} {scale} ({call.signature})",
                f"pass {scale} with an int8 weight, and none with another",
            )
    board = call["board"]
    if board is not None and np.dtype(board.dtype).name != "int32":
        raise rule_error("A board is of int32", describe(board), "make one with new_board(hidden, ffn)")


def _check_params(call: Call) -> None:
    gate, eps, out_parts = (call.params[name] for name in ("gate", "eps", "out_parts"))
    if gate not in KINDS:
        raise unknown_name(f"gate of {call.op.name}", gate, KINDS)
    if not isinstance(eps, float) or not 0 < eps < float("inf"):
        raise rule_error("eps is a finite float above 0", repr(eps), "pass a small positive float, e.g. 1e-6")
    if out_parts is None:
        return
    if call["next_weight"] is None:
        raise rule_error("out_parts is of the last product", "no next_weight", "leave it out")
    if not isinstance(out_parts, int) or out_parts < 1 or sizes(call).hidden % out_parts:
        raise rule_error("out_parts divides the inputs", f"{out_parts!r} of {sizes(call).hidden}", "use 2")


def cost(call: Call) -> Cost:
    """Everything read once, the results written once; what programs tell one another stays in the cache."""
    n, x = sizes(call), call.need("x")
    numbers = sum(int(np.prod(call.need(name).shape)) for name in WEIGHTS if call[name] is not None)
    out_parts: Any = call.params["out_parts"]
    written = nbytes(call.need("residual"))
    written += n.rows * n.outputs * 4 * (out_parts or 1) if n.outputs else written
    read = sum(nbytes(call[name]) for name in call.op.operands if name != "board")
    beside = n.rows * (10.0 * n.ffn + 2 * 8.0 * n.hidden)
    if is_quantized(call):
        beside += n.rows * (2.0 * n.hidden + 2 * n.ffn + n.outputs)
    return Cost(
        matrix_flops=2.0 * n.rows * numbers, vector_flops=beside, bytes=float(read + written),
        dtype=np.dtype(x.dtype).name,
    )  # fmt: skip


def tolerance(call: Call) -> float:
    """The relative error, in norm and at the worst element against the largest, that a right result stays under.

    The first sum is rounded, before it its product, and its norm: three units. A gated product has that error twice,
    once for each factor, and rounds both and itself: nine. The second sum has it at most, with three of its own, and
    what follows one more. Sums in float32 grow as the root of their length, four of them each for an unlucky draw.
    """
    n, dtype = sizes(call), call.need("x").dtype
    wide = unit_roundoff(jnp.promote_types(jnp.float32, dtype))
    longest = max(n.inner, n.hidden, n.ffn, 1) ** 0.5
    return 13 * unit_roundoff(dtype) + 32 * wide * longest
