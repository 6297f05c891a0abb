"""A gated mlp of fp8 products whose activation, and its gradients, are rounded before they are written."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run, takes_kernel
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.layers.gated_fp8 import hopper, rules, xla
from capibara.kernels.ops.layers.gated_fp8.cases import CASES, GRAD_CASES
from capibara.kernels.ops.layers.gated_fp8.reference import reference, reference_grad
from capibara.kernels.ops.linalg import fp8
from capibara.precision import fp8_scale

GATED_FP8_GRAD = Op(
    "gated_fp8_grad",
    family="layers",
    reference=reference_grad,
    operands=("gate", "up", "flow", "factors"),
    params={"kind": "silu", "dtype": fp8.GRADIENTS},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    partition=rules.PARTITION_GRAD,
    cases=GRAD_CASES,
)
GATED_FP8 = Op(
    "gated_fp8",
    family="layers",
    reference=reference,
    operands=("gate", "up", "factor"),
    params={"kind": "silu", "dtype": fp8.VALUES},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    partition=rules.PARTITION,
    cases=CASES,
)
GATED_FP8.implement(Implementation("xla", xla.xla), hopper.IMPLEMENTATION, Implementation("reference", reference))
GATED_FP8_GRAD.implement(
    Implementation("xla", xla.xla_grad), hopper.GRAD_IMPLEMENTATION, Implementation("reference", reference_grad)
)  # fmt: skip

Histories = tuple[jax.Array, jax.Array]


def has_kernels(x: Any, up: Any, *, kind: str) -> bool:
    """Whether `fp8_gated_mlp` would have its activation and gradients by kernels; shapes and types will do."""
    if not fp8.has_fp8_units():
        return False
    wide = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), up.shape[-1]), x.dtype)
    one, two = (jax.ShapeDtypeStruct((count,), jnp.float32) for count in (1, 2))
    calls = (
        call_of(GATED_FP8, (wide, wide, one), {"kind": kind}),
        call_of(GATED_FP8_GRAD, (wide, wide, wide, two), {"kind": kind}),
    )
    return all(takes_kernel(call) for call in calls)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_gated_mlp(
    kind: str, x: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array], histories: Histories
) -> jax.Array:
    """(activation(x @ gate) · (x @ up)) @ down in fp8 products with "delayed" scales, where `has_kernels`.

    A scale that is known beforehand is what lets the activation be rounded before it is written. `histories` are those
    that `fp8_products` has: of gate and up, and of down.
    """
    return _forward(kind, x, weights, histories)[0]


def _forward(
    kind: str, x: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array], histories: Histories
) -> tuple[jax.Array, Any]:
    gate, up, down = weights
    rounded = fp8.by_tensor(x, fp8.VALUES, fp8.expected_input(histories[0]), both=True)
    (gated, raised), first = fp8.forward(True, rounded, (gate, up), histories[0], x.dtype)
    flat = [y.reshape(-1, y.shape[-1]) for y in (gated, raised)]
    scale = fp8_scale(fp8.expected_input(histories[1]), fp8.VALUES)
    values, turned, largest = run(GATED_FP8, (*flat, (1 / scale).reshape(1)), {"kind": kind})
    inner = _rounded(values, turned, scale, largest[0], gated.shape)
    (y,), second = fp8.forward(True, inner, (down,), histories[1], x.dtype)
    return y, (gated, raised, first, second, histories[0])


def _backward(kind: str, kept: Any, dy: jax.Array) -> Any:
    gated, raised, first, second, history = kept
    flow, (d_down,), new_down = fp8.backward(False, True, second, (dy,))
    rows = math.prod(gated.shape[:-1])
    scales = [fp8_scale(fp8.expected_gradient(history, number, rows), fp8.GRADIENTS) for number in (0, 1)]
    flat = [y.reshape(rows, -1) for y in (gated, raised, flow)]
    *made, largest = run(GATED_FP8_GRAD, (*flat, jnp.stack([1 / scale for scale in scales])), {"kind": kind})
    gradients = tuple(
        _rounded(values, turned, scale, seen, gated.shape)
        for values, turned, scale, seen in zip(made[::2], made[1::2], scales, largest, strict=True)
    )
    dx, (d_gate, d_up), new = fp8.backward(False, True, first, gradients)
    return dx, (d_gate, d_up, d_down), (new, new_down)


def _rounded(values: Any, turned: Any, scale: Any, largest: Any, shape: tuple[int, ...]) -> fp8.Rounded:
    said = fp8.unless_infinite(scale, largest)
    return fp8.Rounded(fp8.Quantized(values.reshape(shape), said, turned), largest)


fp8_gated_mlp.defvjp(_forward, _backward)

register(GATED_FP8_GRAD)
register(GATED_FP8)
