"""summed_row: the public function and the op behind it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int8

from capibara.kernels.core.dispatch import run, takes_kernel
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.layers.summed_row import hopper
from capibara.kernels.ops.layers.summed_row.cases import CASES
from capibara.kernels.ops.layers.summed_row.reference import reference
from capibara.kernels.ops.layers.summed_row.rules import check, cost, tolerance
from capibara.kernels.ops.layers.summed_row.xla import xla

SUMMED_ROW: Op = Op(
    "summed_row",
    family="layers",
    reference=reference,
    operands=("parts", "residual", "scale", "weight", "weight_scale"),
    params={"gate": None, "eps": 1e-6, "out_parts": None},
    check=check,
    cost=cost,
    tolerance=tolerance,
    cases=CASES,
)
SUMMED_ROW.implement(Implementation("xla", xla), hopper.IMPLEMENTATION, Implementation("reference", reference))


def summed_row(
    parts: Float[Array, "parts rows K"],
    residual: Float[Array, "rows K"],
    scale: Float[Array, " K"],
    weight: Float[Array, "held K"] | Int8[Array, "held K"],
    weight_scale: Float[Array, " held"] | None = None,
    *,
    gate: str | None = None,
    eps: float = 1e-6,
    out_parts: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "rows K"], Float[Array, "*parts rows outputs"]]:
    """What `few_rows(..., out_parts=n)` left in parts, added to the residual, and its norm times the next weight.

    Two products of decoding follow each other without a pass in between: the parts are added up while the next weight
    is on its way.

    Args:
      parts: [parts, rows, K] in float32, which are added up; the kernel takes one row.
      residual: [rows, K], what they are added to.
      scale: [K], of the RMS norm of that.
      weight: [outputs, K], held by output. With a gate [2 * outputs, K]: what is gated by, then what is gated.
      weight_scale: of an int8 weight, what each of its outputs is multiplied by.
      gate: as `few_rows` takes it.
      eps: of the norm.
      out_parts: leave this product in parts, too.
      implementation: force one by name ("xla", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    Returns:
      (the residual with the parts added, the product).

    >>> import jax.numpy as jnp
    >>> from capibara.kernels import few_rows
    >>> residual, parts = jnp.zeros((1, 4)), few_rows(jnp.ones((1, 8)), jnp.ones((4, 8)), out_parts=2)
    >>> total, product = summed_row(parts, residual, jnp.ones(4), jnp.ones((3, 4)))
    >>> total.tolist(), [round(x, 3) for x in product[0].tolist()]
    ([[8.0, 8.0, 8.0, 8.0]], [4.0, 4.0, 4.0])
    """
    given = (parts, residual, scale, weight, weight_scale)
    operands = tuple(
        as_array("summed_row", name, x, optional=name == "weight_scale")
        for name, x in zip(SUMMED_ROW.operands, given, strict=True)
    )
    params: dict[str, Any] = {}
    if gate is not None:
        params["gate"] = gate
    if eps != SUMMED_ROW.params["eps"]:
        params["eps"] = float(eps)
    if out_parts is not None:
        params["out_parts"] = out_parts
    return run(SUMMED_ROW, operands, params, implementation=implementation, config=config)


def has_kernel(*operands: Any, gate: str | None = None, eps: float = 1e-6, out_parts: int | None = None) -> bool:
    """Whether dispatch takes a kernel for this call of `summed_row`: elsewhere its steps are as well taken apart.

    Shapes and types will do (`jax.ShapeDtypeStruct`).
    """
    return takes_kernel(call_of(SUMMED_ROW, operands, {"gate": gate, "eps": eps, "out_parts": out_parts}))


def parts_to_leave(parts: Any, residual: Any, scale: Any, weight: Any, weight_scale: Any = None) -> int | None:
    """Into how many parts the product is best left for who adds them up anyway; None where no kernel would take it."""
    call = call_of(SUMMED_ROW, (parts, residual, scale, weight, weight_scale), {})
    return None if hopper.IMPLEMENTATION.refusal(call) else hopper.parts_that_fill(call)


SUMMED_ROW.public = summed_row
register(SUMMED_ROW)
