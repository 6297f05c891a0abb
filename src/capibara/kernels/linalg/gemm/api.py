"""gemm: the public function, what it checks, and the op behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from capibara import precision as precisions
from capibara.errors import rule_error, unknown_name
from capibara.kernels.context import matmul_precision
from capibara.kernels.dispatch import run
from capibara.kernels.linalg.gemm import gradient, pallas_gpu, pallas_tpu, peers
from capibara.kernels.linalg.gemm.cases import CASES
from capibara.kernels.linalg.gemm.reference import ACTIVATIONS, reference
from capibara.kernels.linalg.gemm.xla import xla
from capibara.kernels.op import (
    Call,
    Cost,
    Gradient,
    Implementation,
    Op,
    Partition,
    describe,
    register,
    unit_roundoff,
)
from capibara.kernels.operands import as_array, as_dtype

LAX_PRECISIONS = ("default", "high", "highest")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def sizes(call: Call) -> tuple[int, int, int, int]:
    """(batch, M, N, K); batch is 1 when no operand has one."""
    a, b = call.need("a").shape, call.need("b").shape
    m, k = (a[-1], a[-2]) if call.params["transpose_a"] else (a[-2], a[-1])
    n = b[-2] if call.params["transpose_b"] else b[-1]
    return (a[0] if len(a) == 3 else b[0] if len(b) == 3 else 1), m, n, k


def check(call: Call) -> None:
    """Refuse a call that has no meaning, saying the rule, what arrived and the fix."""
    a, b, bias, residual = call.args
    arrived = call.signature
    if a is None or b is None:
        raise rule_error("gemm multiplies two arrays", arrived, "pass both a and b")
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and np.dtype(x.dtype).name not in DTYPES:
            raise rule_error(
                f"gemm takes {', '.join(DTYPES)}", f"{name} of {describe(x)}", f"convert {name} with .astype(...)"
            )
    for name, x in (("a", a), ("b", b)):
        if len(x.shape) not in (2, 3):
            raise rule_error(
                "gemm's operands are matrices, or batches of matrices [B, rows, columns]",
                f"{name} of {describe(x)}",
                f"give {name} two or three axes",
            )
    if len(a.shape) == len(b.shape) == 3 and a.shape[0] != b.shape[0]:
        raise rule_error("The batch axes of a and b are equal", f"{a.shape[0]} and {b.shape[0]}", "broadcast one")
    k_a = a.shape[-2 if call.params["transpose_a"] else -1]
    k_b = b.shape[-1 if call.params["transpose_b"] else -2]
    if k_a != k_b:
        raise rule_error(
            "The contracted axes of a (its columns) and b (its rows) are equal",
            f"{k_a} and {k_b} ({arrived})",
            "check the shapes, or set transpose_a or transpose_b",
        )
    activation = call.params["activation"]
    if activation is not None and activation not in ACTIVATIONS:
        raise unknown_name("activation of gemm", activation, ACTIVATIONS)
    if call.params["precision"] not in (None, *LAX_PRECISIONS):
        raise unknown_name("matrix precision", call.params["precision"], LAX_PRECISIONS)
    count, m, n, _ = sizes(call)
    batched = len(a.shape) == 3 or len(b.shape) == 3
    if bias is not None and bias.shape not in {(n,), (count, n) if batched else (n,)}:
        raise rule_error(f"The bias is a row of N = {n} numbers", describe(bias), f"reshape it to ({n},)")
    expected = (count, m, n) if batched else (m, n)
    if residual is not None and residual.shape != expected:
        raise rule_error(f"The residual has the output's shape {expected}", describe(residual), "broadcast it first")


def out_dtype_of(call: Call) -> Any:
    chosen = call.params["out_dtype"]
    return jnp.dtype(str(chosen)) if chosen else jnp.result_type(call.need("a"), call.need("b"))


def cost(call: Call) -> Cost:
    """2·B·M·N·K operations; every operand read once and the output written once."""
    count, m, n, k = sizes(call)
    moved = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in call.args if x is not None)
    moved += count * m * n * out_dtype_of(call).itemsize
    return Cost(2.0 * count * m * n * k, float(moved), np.dtype(jnp.result_type(call.need("a"), call.need("b"))).name)


def tolerance(call: Call) -> float:
    """The relative error, in norm and at the worst element against the largest, that a right result stays under.

    The inputs are exact, so rounding the output once costs one unit roundoff of its type. Products accumulated in
    float32 grow as sqrt(K) units of float32 (four of them leave room for an unlucky draw), and a float32 product
    at default precision may be computed from inputs rounded to the matrix unit's own type (TF32 on a GPU,
    bfloat16 on a TPU): two roundings a product.
    """
    _, _, _, k = sizes(call)
    inputs = jnp.result_type(call.need("a"), call.need("b"))
    accumulated = unit_roundoff(jnp.promote_types(jnp.float32, inputs)) * max(k, 1) ** 0.5
    unit = 0.0
    asked = call.params["precision"] or matmul_precision()
    if inputs == jnp.float32 and asked not in ("highest", "float32"):
        unit = {"gpu": 2.0**-11, "tpu": 2.0**-8}.get(call.target.platform, 0.0)
        if asked in ("bfloat16", "BF16_BF16_F32"):
            unit = 2.0**-8
    return unit_roundoff(out_dtype_of(call)) + 4 * accumulated + 2 * unit


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
    tolerance=tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(GEMM, *args)),
    batch=gradient.batch,
    # Rows, columns or the contraction: only the caller knows which of them is split.
    partition=Partition(gradient.mesh_rule, reduced=("k",), combine=gradient.combine, logical={}),
    cases=CASES,
    peers={"xla-two-step": peers.xla_two_step},
    stock_tpu=peers.stock_tpu,
)
GEMM.implement(Implementation("xla", xla, rank=lambda call: 10))
GEMM.implement(pallas_tpu.IMPLEMENTATION)
GEMM.implement(pallas_gpu.IMPLEMENTATION)
GEMM.implement(Implementation("reference", reference, rank=lambda call: -1))


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
        "fp8" are capibara's policies: what the inputs are rounded to, and the output's type. "default", "high"
        and "highest" are JAX's, for float32 inputs.
      out_dtype: the output's type; by default what `precision` says, else the inputs' own.
      implementation: force one by name ("xla", "pallas_tpu", "mosaic_gpu", "reference"); a refusal is an error.
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
