"""causal_conv1d: the public functions, and the op behind them."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation, describe
from capibara.kernels.ops.conv.causal1d import gradient, hopper, peers, rules, xla
from capibara.kernels.ops.conv.causal1d.cases import CASES, GRAD_CASES
from capibara.kernels.ops.conv.causal1d.reference import finished, reference, reference_grad, wide_type

CAUSAL_CONV1D_GRAD = Op(
    "causal_conv1d_grad",
    family="conv",
    reference=reference_grad,
    operands=("x", "w", "bias", "initial_state", "d_out", "d_state"),
    params={"activation": None},
    check=rules.check_grad,
    cost=rules.cost_grad,
    tolerance=rules.tolerance,
    batch=gradient.batch_grad,
    partition=gradient.PARTITION_GRAD,
    cases=GRAD_CASES,
)

CAUSAL_CONV1D = Op(
    "causal_conv1d",
    family="conv",
    reference=reference,
    operands=("x", "w", "bias", "initial_state"),
    params={"activation": None, "return_final_state": False},
    untuned=("return_final_state",),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(CAUSAL_CONV1D_GRAD, *args)),
    batch=gradient.batch,
    partition=gradient.PARTITION,
    cases=CASES,
    peers={"lax-depthwise": peers.depthwise},
)
CAUSAL_CONV1D.implement(
    xla.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference),
)
CAUSAL_CONV1D_GRAD.implement(
    xla.GRAD_IMPLEMENTATION,
    hopper.GRAD_IMPLEMENTATION,
    Implementation("reference", reference_grad),
)


@overload
def causal_conv1d(
    x: Array, w: Array, bias: Array | None = None, *, activation: str | None = None, initial_state: Array | None = None,
    return_state: Literal[False] = False, implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def causal_conv1d(
    x: Array, w: Array, bias: Array | None = None, *, activation: str | None = None, initial_state: Array | None = None,
    return_state: Literal[True], implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def causal_conv1d(
    x: Array, w: Array, bias: Array | None = None, *, activation: str | None = None, initial_state: Array | None = None,
    return_state: bool, implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def causal_conv1d(
    x: Float[Array, "B T C"],
    w: Float[Array, "width C"],
    bias: Float[Array, " C"] | None = None,
    *,
    activation: str | None = None,
    initial_state: Float[Array, "B before C"] | None = None,
    return_state: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "B T C"] | tuple[Float[Array, "B T C"], Float[Array, "B before C"]]:
    """Each channel of x convolved with its own short filter over the past; in float32, the result in x's type.

    Args:
      x: [batch, time, channels].
      w: [width, channels]; the last row meets the present input, the first the oldest.
      bias: one number a channel.
      activation: None or "silu", of the sum and the bias.
      initial_state: the width - 1 inputs before x, [batch, width - 1, channels]; zeros by default.
      return_state: return (y, the last width - 1 inputs), what `causal_conv1d_step` and the next call start from.
      implementation: force one by name ("xla", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    Forward-mode derivatives need implementation="reference".

    >>> x = jnp.arange(4.0).reshape(1, 4, 1)
    >>> y, state = causal_conv1d(x, jnp.array([[10.0], [1.0]]), return_state=True)
    >>> y.ravel().tolist(), state.ravel().tolist()
    ([0.0, 1.0, 12.0, 23.0], [3.0])
    """
    arrays = tuple(
        as_array("causal_conv1d", name, given, optional=name not in ("x", "w"))
        for name, given in zip(CAUSAL_CONV1D.operands, (x, w, bias, initial_state), strict=True)
    )
    params: dict[str, Any] = {}
    if activation is not None:
        params["activation"] = activation
    if return_state:
        params["return_final_state"] = True
    return run(CAUSAL_CONV1D, arrays, params, implementation=implementation, config=config)


def causal_conv1d_step(
    state: Float[Array, "B before C"],
    x: Float[Array, "B C"],
    w: Float[Array, "width C"],
    bias: Float[Array, " C"] | None = None,
    *,
    activation: str | None = None,
) -> tuple[Float[Array, "B C"], Float[Array, "B before C"]]:
    """One step of `causal_conv1d`, for generation: (y of the input x, the next state).

    >>> w = jnp.array([[10.0], [1.0]])
    >>> y, state = causal_conv1d_step(jnp.array([[[3.0]]]), jnp.array([[4.0]]), w)
    >>> y.tolist(), state.tolist()
    ([[34.0]], [[[4.0]]])
    """
    state, x, w = (as_array("causal_conv1d_step", n, v) for n, v in (("state", state), ("x", x), ("w", w)))
    bias = as_array("causal_conv1d_step", "bias", bias, optional=True)
    if x.ndim != 2:
        raise rule_error("One step takes x [batch, channels]", describe(x), "pass one input, or use causal_conv1d")
    # The same rules as the whole op's, with a time of 1.
    one = jax.ShapeDtypeStruct((x.shape[0], 1, x.shape[1]), x.dtype)
    CAUSAL_CONV1D.call(one, w, bias, state, activation=activation)
    wide = wide_type(x)
    seen = jnp.concatenate([state.astype(x.dtype), x[:, None]], 1)
    total = (seen.astype(wide) * w.astype(wide)).sum(1)
    return finished(total, bias, activation).astype(x.dtype), seen[:, 1:]


CAUSAL_CONV1D.public = causal_conv1d
register(CAUSAL_CONV1D_GRAD)
register(CAUSAL_CONV1D)
