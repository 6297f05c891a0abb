"""gemm: the public function, what it checks, and the op behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from capibara import precision as precisions
from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array, as_dtype
from capibara.kernels.core.spec import Gradient, Implementation, Partition, describe
from capibara.kernels.ops.linalg.fp8 import fp8_products, has_fp8_units
from capibara.kernels.ops.linalg.gemm import gradient, hopper, peers, tpu
from capibara.kernels.ops.linalg.gemm.cases import CASES
from capibara.kernels.ops.linalg.gemm.reference import reference
from capibara.kernels.ops.linalg.gemm.rules import LAX_PRECISIONS, check, cost, efficiency, tolerance
from capibara.kernels.ops.linalg.gemm.xla import xla

GEMM: Op = Op(
    "gemm",
    family="linalg",
    reference=reference,
    operands=("a", "b", "bias", "residual"),
    params={
        "transpose_a": False,
        "transpose_b": False,
        "activation": None,
        "precision": None,
        "out_dtype": None,
    },
    check=check,
    cost=cost,
    efficiency=efficiency,
    tolerance=tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(GEMM, *args)),
    batch=gradient.batch,
    # Rows, columns or the contraction: only the caller knows which of them is split.
    partition=Partition(gradient.mesh_rule, reduced=("k",), combine=gradient.combine, logical={}),
    cases=CASES,
    peers={"xla-two-step": peers.xla_two_step},
    stock_tpu=peers.stock_tpu,
)
GEMM.implement(
    Implementation("xla", xla),
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    hopper.TURNED_IMPLEMENTATION,
    Implementation("reference", reference),
)


def gemm(
    a: Float[Array, "*#B rows_a columns_a"],
    b: Float[Array, "*#B rows_b columns_b"],
    *,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*#B M N"] | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*#B M N"]:
    """`activation(a @ b + bias) + residual`, accumulated in float32, by the fastest implementation that takes it.

    Args:
      a: matrices [..., M, K], or [..., K, M] with `transpose_a`; no copy is made for the transpose.
      b: matrices [..., K, N], or [..., N, K] with `transpose_b`. Leading axes broadcast against a's.
      bias: a row added to every row of the product.
      residual: added after the activation; the output's shape.
      activation: None, "gelu" (tanh form) or "silu".
      precision: None keeps the inputs' type and JAX's default matrix precision. "bfloat16", "float32", "mixed" and
        "fp8" are capibara's policies: what the inputs are rounded to, and the output's type. A plain product in "fp8"
        is `fp8_products` on chips with matrix units for it, and emulated elsewhere. "default", "high" and "highest" are
        JAX's, for float32 inputs.
      out_dtype: the output's type; by default what `precision` says, else the inputs' own.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "hopper_turned", "reference"); a refusal is an
        error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> x = jnp.ones((2, 3)); w = jnp.ones((3, 4))
    >>> gemm(x, w, activation="silu").shape
    (2, 4)
    """
    a, b = as_array("gemm", "a", a), as_array("gemm", "b", b)
    bias = as_array("gemm", "bias", bias, optional=True)
    residual = as_array("gemm", "residual", residual, optional=True)
    out = None if out_dtype is None else as_dtype("out_dtype", out_dtype).name
    if precision is not None and precision not in LAX_PRECISIONS:
        policy = precisions.policy(precision)
        alone = all(x is None for x in (bias, residual, activation, implementation, config)) and not transpose_a
        if policy.rounds_to_fp8 and alone and _is_layer(a, b, transpose_b) and has_fp8_units():
            (y,) = fp8_products(a.astype(policy.compute_dtype), [b.T if transpose_b else b])
            return y.astype(out or policy.output_dtype)
        a, b = policy.cast_to_compute(a), policy.cast_to_compute(b)
        out = out or np.dtype(policy.output_dtype).name
        # For 16-bit operands there is one precision: not naming it finds what was tuned without a name.
        precision = None if a.dtype.itemsize == 2 else policy.matmul_precision
    if out == jnp.result_type(a, b).name:
        out = None
    params: dict[str, Any] = {}
    if transpose_a:
        params["transpose_a"] = True
    if transpose_b:
        params["transpose_b"] = True
    if activation is not None:
        params["activation"] = activation
    if precision is not None:
        params["precision"] = precision
    if out is not None:
        params["out_dtype"] = out
    if a.ndim == b.ndim and a.ndim in (2, 3):
        arrays = (a, b, bias, residual)
        return run(GEMM, arrays, params, implementation=implementation, config=config)
    return _with_leading_axes(a, b, bias, residual, params, implementation, config)


def _is_layer(a: Any, b: Any, transpose_b: bool) -> bool:
    """Whether this is rows times one matrix; what is not, or is wrong, goes the usual way."""
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b))
    return floats and a.ndim >= 2 and b.ndim == 2 and a.shape[-1] == b.shape[1 if transpose_b else 0]


def leading_axes(a: Any, b: Any) -> tuple[int, ...]:
    """What the axes before the matrices broadcast to."""
    try:
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError as error:
        raise rule_error(
            "The leading axes of a and b, before their matrices, are equal or 1, counted from the last",
            f"{a.shape[:-2]} and {b.shape[:-2]} ({describe(a)} {describe(b)})",
            "reshape or broadcast one of them",
        ) from error


def _with_leading_axes(
    a: jax.Array, b: jax.Array, bias: Any, residual: Any, params: dict[str, Any], implementation: Any, config: Any
) -> jax.Array:
    """Any number of leading axes, folded into the rows where that needs no copy, else into one batch axis."""
    if a.ndim < 2 or b.ndim < 2:
        GEMM.call(a, b, bias, residual, **params)  # raises, naming the operand
    lead = leading_axes(a, b)
    if residual is not None and residual.ndim < 2:
        raise rule_error(
            "The residual has the output's shape, matrices [..., M, N]", describe(residual), "broadcast it first"
        )
    keep = {"implementation": implementation, "config": config}
    if b.ndim == 2 and not params.get("transpose_a") and (bias is None or bias.ndim == 1):
        rows = a.reshape(-1, a.shape[-1])
        flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
        out = run(GEMM, (rows, b, bias, flat), params, **keep)
        return out.reshape(*lead, a.shape[-2], out.shape[-1])

    def fold(x: jax.Array) -> jax.Array:
        if x.ndim == 2:
            return x
        return jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, *x.shape[-2:])

    folded = None if residual is None else residual.reshape(-1, *residual.shape[-2:])
    out = run(GEMM, (fold(a), fold(b), bias, folded), params, **keep)
    return out.reshape(*lead, *out.shape[-2:])


GEMM.public = gemm
register(GEMM)
