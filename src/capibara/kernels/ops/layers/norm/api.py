"""layer_norm and rms_norm: the public functions, and the two ops behind them."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import numpy as np
from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation, describe
from capibara.kernels.ops.layers.norm import gradient, hopper, mesh, rules, times, tpu, xla
from capibara.kernels.ops.layers.norm.cases import CASES, GRAD_CASES
from capibara.kernels.ops.layers.norm.efficiency import efficiency
from capibara.kernels.ops.layers.norm.reference import reference, reference_grad

PARAMS = {"kind": "layer", "eps": 1e-6, "offset": 0.0}

NORM_GRAD = Op(
    "norm_grad",
    family="layers",
    reference=reference_grad,
    operands=("x", "scale", "bias", "mean", "rstd", "d_out", "d_sum"),
    params=PARAMS,
    untuned=("eps", "offset"),
    check=rules.check_grad,
    cost=rules.cost_grad,
    efficiency=efficiency,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch,
    partition=mesh.PARTITION_GRAD,
    cases=GRAD_CASES,
    times=times.backward,
)

NORM = Op(
    "norm",
    family="layers",
    reference=reference,
    operands=("x", "scale", "bias", "residual"),
    params={**PARAMS, "return_residual": False, "return_stats": False},
    untuned=("eps", "offset", "return_stats"),
    check=rules.check,
    cost=rules.cost,
    efficiency=efficiency,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(NORM_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    times=times.forward,
)

# An implementation that was asked for by name is asked for backward too.
NORM.implement(
    xla.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference),
)
NORM_GRAD.implement(
    xla.GRAD_IMPLEMENTATION,
    tpu.GRAD_IMPLEMENTATION,
    hopper.GRAD_IMPLEMENTATION,
    Implementation("reference", reference_grad),
)


@overload
def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, residual: Array | None = None, *,
    eps: float = 1e-05, return_residual: Literal[False] = False, implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, residual: Array | None = None, *,
    eps: float = 1e-05, return_residual: Literal[True], implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, residual: Array | None = None, *,
    eps: float = 1e-05, return_residual: bool, implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def layer_norm(
    x: Float[Array, "*rows columns"],
    scale: Float[Array, " columns"] | None = None,
    bias: Float[Array, " columns"] | None = None,
    residual: Float[Array, "*rows columns"] | None = None,
    *,
    eps: float = 1e-5,
    return_residual: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*rows columns"] | tuple[Float[Array, "*rows columns"], Float[Array, "*rows columns"]]:
    """(s - mean) / sqrt(variance + eps) · scale + bias over the last axis of s = x + residual.

    Statistics and arithmetic are in float32, for rows of numbers up to 1e29; the result has x's type. The backward pass
    keeps s (x itself, where there is no residual) and two numbers a row, and computes every gradient in one pass.

    Args:
      x: [..., columns].
      scale, bias: one number a column, of any float type; absent, the rows are normalised and no more.
      residual: added to x first. The sum is rounded to x's type, and what is normalised is that.
      eps: added to the variance.
      return_residual: return (result, s), s being the next layer's residual. Without a residual it is x.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "reference"); a refusal is an error. For
        forward-mode derivatives (`jvp`, `jacfwd`) ask for "reference", which is plain JAX to JAX as well.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> x = jnp.array([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]])
    >>> [round(number, 2) for number in layer_norm(x, scale=jnp.ones(3), bias=jnp.full(3, 0.5))[0].tolist()]
    [-0.72, 0.5, 1.72]

    A block's second norm, which takes in the attention's output and hands the sum on:

    >>> y, stream = layer_norm(x, residual=jnp.ones((2, 3)), return_residual=True)
    >>> bool((stream == x + 1).all())
    True
    """
    return _norm((x, scale, bias, residual), {"eps": eps}, return_residual, implementation, config)


@overload
def rms_norm(
    x: Array, scale: Array | None = None, residual: Array | None = None, *, eps: float = 1e-06, offset: float = 0.0,
    return_residual: Literal[False] = False, implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def rms_norm(
    x: Array, scale: Array | None = None, residual: Array | None = None, *, eps: float = 1e-06, offset: float = 0.0,
    return_residual: Literal[True], implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def rms_norm(
    x: Array, scale: Array | None = None, residual: Array | None = None, *, eps: float = 1e-06, offset: float = 0.0,
    return_residual: bool, implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def rms_norm(
    x: Float[Array, "*rows columns"],
    scale: Float[Array, " columns"] | None = None,
    residual: Float[Array, "*rows columns"] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    return_residual: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*rows columns"] | tuple[Float[Array, "*rows columns"], Float[Array, "*rows columns"]]:
    """s / sqrt(mean of s² + eps) · (scale + offset) over the last axis of s = x + residual.

    As `layer_norm`, without a mean and a bias; the backward pass keeps one number a row. With an eps of 1e-6 rows of
    numbers up to about 1e29 have a mean of squares in float32; larger ones overflow, and come out as zeros.

    Args:
      x, residual, return_residual, implementation, config: see `layer_norm`.
      scale: one number a column, of any float type.
      eps: added to the mean of squares.
      offset: added to the scale in float32: 1.0 for weights stored as Gemma's are, around 0.

    >>> rms_norm(jnp.array([3.0, -3.0, 3.0]), scale=jnp.zeros(3), offset=1.0).round(3).tolist()
    [1.0, -1.0, 1.0]
    """
    given = {"kind": "rms", "eps": eps, "offset": offset}
    return _norm((x, scale, None, residual), given, return_residual, implementation, config)


def _norm(
    operands: tuple[Any, Any, Any, Any], given: dict[str, Any], return_residual: bool, implementation: Any, config: Any
) -> Any:
    x, scale, bias, residual = (
        as_array("norm", name, x, optional=name != "x") for name, x in zip(NORM.operands, operands, strict=True)
    )
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is not None and vector.ndim != 1:
            raise rule_error(f"The {name} is one number a column", describe(vector), "pass an array of one axis")
    for name in ("eps", "offset"):
        number = given.get(name)
        if isinstance(number, jax.Array | np.ndarray):
            raise rule_error(
                f"{name} is a Python number, known when the program is compiled",
                describe(as_array("norm", name, number)),
                "pass a float; under jit, make the argument static",
            )
    params = {name: value for name, value in given.items() if value != NORM.params[name]}
    if return_residual:
        params["return_residual"] = True
    return run(NORM, (x, scale, bias, residual), params, implementation=implementation, config=config)


NORM.functions = {"layer_norm": (layer_norm, {}), "rms_norm": (rms_norm, {"kind": "rms"})}
register(NORM_GRAD)
register(NORM)
