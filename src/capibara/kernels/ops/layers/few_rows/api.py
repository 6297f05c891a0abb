"""few_rows: the public function and the op behind it."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from capibara.kernels.core.dispatch import run, takes_kernel
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.operands import as_array, as_dtype
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.layers.few_rows import hopper
from capibara.kernels.ops.layers.few_rows.cases import CASES
from capibara.kernels.ops.layers.few_rows.reference import reference
from capibara.kernels.ops.layers.few_rows.rules import check, cost, sizes, tolerance
from capibara.kernels.ops.layers.few_rows.xla import xla
from capibara.kernels.pallas.hopper import multiprocessors

FEW_ROWS: Op = Op(
    "few_rows",
    family="layers",
    reference=reference,
    operands=("x", "weight", "residual", "scale", "weight_scale"),
    params={"gate": None, "eps": 1e-6, "out_dtype": None, "out_parts": None},
    check=check,
    cost=cost,
    tolerance=tolerance,
    cases=CASES,
)
FEW_ROWS.implement(Implementation("xla", xla), hopper.IMPLEMENTATION, Implementation("reference", reference))


@overload
def few_rows(
    x: Array, weight: Array, residual: None = None, scale: None = None, weight_scale: Array | None = None, *,
    gate: str | None = None, out_dtype: Any = None, out_parts: int | None = None,
    implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def few_rows(
    x: Array, weight: Array, residual: Array, scale: Array, weight_scale: Array | None = None, *,
    gate: str | None = None, eps: float = 1e-6, implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


def few_rows(
    x: Float[Array, "rows K"],
    weight: Float[Array, "held K"] | Int8[Array, "held K"],
    residual: Float[Array, "rows outputs"] | None = None,
    scale: Float[Array, " outputs"] | None = None,
    weight_scale: Float[Array, " held"] | None = None,
    *,
    gate: str | None = None,
    eps: float = 1e-6,
    out_dtype: Any = None,
    out_parts: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*parts rows outputs"] | tuple[Float[Array, "rows outputs"], Float[Array, "rows outputs"]]:
    """A few rows times a weight that is held by output: what a step of decoding does, at the memory's speed.

    Args:
      x: [rows, K]; the kernel takes up to 64 rows.
      weight: [outputs, K]. With a gate [2 · outputs, K]: what is gated by, then what is gated.
      residual: [rows, outputs]; then the result is (residual + product, the RMS norm of that), each in x's type.
      scale: [outputs], of that norm.
      weight_scale: of an int8 weight, what each of its outputs is multiplied by, before the gate or the residual.
      gate: the activation of a gated product, act(x @ first.T) · (x @ second.T): "silu", "gelu", "gelu_tanh", "relu",
        "sigmoid", "tanh" or "identity".
      eps: of the norm.
      out_dtype: the result's type where there is no residual; x's by default.
      out_parts: leave the product in so many parts, float32 sums over equal parts of the inputs: [out_parts, rows,
        outputs]. Who takes it next adds them up, `summed_row` for one.
      implementation: force one by name ("xla", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> import jax.numpy as jnp
    >>> x, residual = jnp.ones((2, 8)), jnp.zeros((2, 4))
    >>> few_rows(x, jnp.ones((6, 8)), gate="silu").shape
    (2, 3)
    >>> total, normal = few_rows(x, jnp.ones((4, 8)), residual, jnp.ones(4))
    >>> float(total[0, 0]), round(float(normal[0, 0]), 3)
    (8.0, 1.0)
    >>> few_rows(x, jnp.ones((6, 8)), out_parts=4)[:, 0, 0].tolist()
    [2.0, 2.0, 2.0, 2.0]
    >>> eight_bits = jnp.full((4, 8), 100, jnp.int8)
    >>> float(few_rows(x, eight_bits, weight_scale=jnp.full(4, 0.01))[0, 0])
    8.0
    """
    operands = (
        as_array("few_rows", "x", x),
        as_array("few_rows", "weight", weight),
        as_array("few_rows", "residual", residual, optional=True),
        as_array("few_rows", "scale", scale, optional=True),
        as_array("few_rows", "weight_scale", weight_scale, optional=True),
    )
    params: dict[str, Any] = {}
    if gate is not None:
        params["gate"] = gate
    if eps != FEW_ROWS.params["eps"]:
        params["eps"] = float(eps)
    if out_dtype is not None:
        params["out_dtype"] = as_dtype("out_dtype", out_dtype).name
    if out_parts is not None:
        params["out_parts"] = out_parts
    return run(FEW_ROWS, operands, params, implementation=implementation, config=config)


def has_kernel(
    x: Array,
    weight: Array,
    residual: Array | None = None,
    scale: Array | None = None,
    weight_scale: Array | None = None,
    *,
    gate: str | None = None,
    eps: float = 1e-6,
    out_dtype: str | None = None,
    out_parts: int | None = None,
) -> bool:
    """Whether dispatch takes a kernel for this call of `few_rows`: elsewhere its steps are as well written out."""
    params = {"gate": gate, "eps": eps, "out_dtype": out_dtype, "out_parts": out_parts}
    return takes_kernel(call_of(FEW_ROWS, (x, weight, residual, scale, weight_scale), params))


def parts_to_leave(x: Any, weight: Any) -> int | None:
    """Into how many parts a product is best left for who adds them up anyway; None where no kernel would take it.

    Shapes and types will do (`jax.ShapeDtypeStruct`).
    """
    scale = jax.ShapeDtypeStruct(weight.shape[:1], jnp.float32) if weight.dtype == jnp.int8 else None
    call = call_of(FEW_ROWS, (x, weight, None, None, scale), {})
    cores = multiprocessors(call.target.device_kind)
    return None if hopper.IMPLEMENTATION.refusal(call) else hopper.parts_that_fill(sizes(call), weight.dtype, cores)


FEW_ROWS.public = few_rows
register(FEW_ROWS)
