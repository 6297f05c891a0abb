"""Activations with dropout: the public functions, and the two ops behind them."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.layers.activation import gradient, hopper, mesh, peers, rules, xla
from capibara.kernels.ops.layers.activation.cases import CASES, GRAD_CASES
from capibara.kernels.ops.layers.activation.reference import reference, reference_grad

PARAMS = {"kind": "gelu", "rate": 0.0, "strides": None}

ACTIVATION_GRAD = Op(
    "activation_grad",
    family="layers",
    reference=reference_grad,
    operands=("x", "up", "seed", "offsets", "d_out"),
    params=PARAMS,
    untuned=("rate", "strides"),
    check=rules.check,
    cost=rules.cost_grad,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=GRAD_CASES,
)

ACTIVATION = Op(
    "activation",
    family="layers",
    reference=reference,
    operands=("x", "up", "seed", "offsets"),
    params=PARAMS,
    untuned=("rate", "strides"),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(ACTIVATION_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    peers={"jax_random": peers.jax_random},
)

ACTIVATION.implement(
    xla.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference),
)
ACTIVATION_GRAD.implement(
    xla.GRAD_IMPLEMENTATION,
    hopper.GRAD_IMPLEMENTATION,
    Implementation("reference", reference_grad),
)


def activation(
    x: Float[Array, "*rows columns"],
    *,
    kind: str = "gelu",
    dropout_rate: float = 0.0,
    key: Any = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*rows columns"]:
    """An activation of x and dropout of its result, in one pass over memory.

    What is dropped is decided by the key and the element's place in x: it is the same on every chip, for every way of
    splitting x over a mesh under jit, and in the backward pass, which draws it again and stores no mask. Inside
    shard_map an element's place is the one in its shard: fold the device's index into the key there.

    Args:
      x: [..., columns].
      kind: "gelu" (by the normal distribution), "gelu_tanh", "silu", "relu", "sigmoid", "tanh", or "identity".
      dropout_rate: the share of elements to drop, from 0 to below 1; the others are scaled by 1 / (1 - rate). It is
        rounded to a multiple of 1/65536, for both.
      key: a JAX key; needed where the rate is above 0.
      implementation: force one by name ("xla", "hopper", "reference"); a refusal is an error. For
        forward-mode derivatives (`jvp`, `jacfwd`) ask for "reference", which is plain JAX to JAX as well.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> activation(jnp.array([-1.0, 0.0, 2.0]), kind="relu").tolist()
    [0.0, 0.0, 2.0]
    """
    return _activation(x, None, kind, dropout_rate, key, implementation, config)


def gated_activation(
    gate: Float[Array, "*rows columns"],
    up: Float[Array, "*rows columns"],
    *,
    kind: str = "silu",
    dropout_rate: float = 0.0,
    key: Any = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*rows columns"]:
    """activation(gate) · up, and dropout of the product, in one pass over memory.

    Args:
      gate, up: of one shape and one type.
      kind, dropout_rate, key, implementation, config: see `activation`.

    >>> gated_activation(jnp.array([-1.0, 2.0]), jnp.array([5.0, 5.0]), kind="relu").tolist()
    [0.0, 10.0]
    """
    if up is None:
        raise rule_error("gated_activation takes a gate and an up", "an up of None", "pass both, or use activation()")
    return _activation(gate, up, kind, dropout_rate, key, implementation, config)


class HowActivation(TypedDict, total=False):
    """Who computes it: see `activation`."""

    implementation: str | None
    config: Any


class ActivationOptions(HowActivation, total=False):
    """Dropout of the result, and who computes it: see `activation`."""

    dropout_rate: float
    key: Any


def gelu(
    x: Float[Array, "*rows columns"], *, approximate: bool = False, **options: Unpack[ActivationOptions]
) -> Float[Array, "*rows columns"]:
    """x · P(normal number < x), or its tanh form with `approximate`; `options` as `activation`'s."""
    return activation(x, kind="gelu_tanh" if approximate else "gelu", **options)


def silu(x: Float[Array, "*rows columns"], **options: Unpack[ActivationOptions]) -> Float[Array, "*rows columns"]:
    """x · sigmoid(x); `options` as `activation`'s."""
    return activation(x, kind="silu", **options)


def glu(
    gate: Float[Array, "*rows columns"], up: Float[Array, "*rows columns"], **options: Unpack[ActivationOptions]
) -> Float[Array, "*rows columns"]:
    """sigmoid(gate) · up; `options` as `activation`'s."""
    return gated_activation(gate, up, kind="sigmoid", **options)


def swiglu(
    gate: Float[Array, "*rows columns"], up: Float[Array, "*rows columns"], **options: Unpack[ActivationOptions]
) -> Float[Array, "*rows columns"]:
    """silu(gate) · up; `options` as `activation`'s."""
    return gated_activation(gate, up, kind="silu", **options)


def geglu(
    gate: Float[Array, "*rows columns"],
    up: Float[Array, "*rows columns"],
    *,
    approximate: bool = False,
    **options: Unpack[ActivationOptions],
) -> Float[Array, "*rows columns"]:
    """gelu(gate) · up; `approximate` as `gelu`'s, `options` as `activation`'s."""
    return gated_activation(gate, up, kind="gelu_tanh" if approximate else "gelu", **options)


def dropout(
    x: Float[Array, "*rows columns"], dropout_rate: float, key: Any, **options: Unpack[HowActivation]
) -> Float[Array, "*rows columns"]:
    """x, of which a share is dropped and the rest scaled by 1 / (1 - dropout_rate); `options` as `activation`'s.

    >>> kept = dropout(jnp.ones(1000), 0.25, jax.random.key(0))
    >>> sorted({round(number, 3) for number in kept.tolist()})
    [0.0, 1.333]
    """
    return activation(x, kind="identity", dropout_rate=dropout_rate, key=key, **options)


def _activation(x: Any, up: Any, kind: str, rate: Any, key: Any, implementation: Any, config: Any) -> Any:
    x = as_array("activation", "x" if up is None else "gate", x)
    up = as_array("activation", "up", up, optional=True)
    params: dict[str, Any] = {}
    if kind != PARAMS["kind"]:
        params["kind"] = kind
    seed = None
    if isinstance(rate, jax.core.Tracer):
        raise rule_error("dropout_rate is known before tracing", rate, "pass a Python float (static under jit)")
    rate = float(rate) if isinstance(rate, np.floating) else rate
    if rate != 0:
        params["rate"] = rate
        seed = _seed(key)
    return run(ACTIVATION, (x, up, seed), params, implementation=implementation, config=config)


def _seed(key: Any) -> jax.Array | None:
    """Two words drawn from a JAX key; the op's check refuses a rate without them, and a rate out of range."""
    if key is None:
        return None
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except TypeError as error:
        raise rule_error("Dropout draws from a JAX key", repr(key), "pass jax.random.key(...)") from error


ACTIVATION.public = activation
register(ACTIVATION_GRAD)
register(ACTIVATION)
