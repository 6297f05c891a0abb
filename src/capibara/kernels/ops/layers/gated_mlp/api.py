"""gated_mlp: the public function, and the ops that its products and activations are one pass in."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run, takes_kernel
from capibara.kernels.core.op import Op, call_of, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Implementation, describe
from capibara.kernels.ops.layers.activation.api import gated_activation
from capibara.kernels.ops.layers.gated_mlp import hopper, rules, xla
from capibara.kernels.ops.layers.gated_mlp.cases import CASES, GRAD_CASES
from capibara.kernels.ops.layers.gated_mlp.pairs import WIDTH, paired, unpaired
from capibara.kernels.ops.layers.gated_mlp.reference import reference, reference_grad

GATED_PRODUCTS_GRAD = Op(
    "gated_products_grad",
    family="layers",
    reference=reference_grad,
    operands=("d_out", "down", "products"),
    params={"kind": "silu"},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    partition=rules.PARTITION_GRAD,
    cases=GRAD_CASES,
)
GATED_PRODUCTS = Op(
    "gated_products",
    family="layers",
    reference=reference,
    operands=("x", "pairs"),
    params={"kind": "silu", "keep": True},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    partition=rules.PARTITION,
    cases=CASES,
)
GATED_PRODUCTS.implement(
    Implementation("xla", xla.xla), hopper.IMPLEMENTATION, Implementation("reference", reference)
)  # fmt: skip
GATED_PRODUCTS_GRAD.implement(
    Implementation("xla", xla.xla_grad), hopper.GRAD_IMPLEMENTATION, Implementation("reference", reference_grad)
)  # fmt: skip


def gated_mlp(
    x: Float[Array, "*rows K"],
    gate: Float[Array, "K columns"],
    up: Float[Array, "K columns"],
    down: Float[Array, "columns outputs"],
    *,
    kind: str = "silu",
) -> Float[Array, "*rows outputs"]:
    """(activation(x @ gate) · (x @ up)) @ down, with the activation and its gradient inside of the products.

    Where there are kernels for both (`has_kernels`), the activation leaves the product that it is of, and what comes
    back through `down` is never written: its gradients are. Elsewhere three products and a `gated_activation`.

    Args:
      x: [..., K].
      gate, up: [K, columns]. The kernels have them side by side, which costs nothing in the pass that casts them to x's
        type; weights of x's type would need a pass of their own, and are not given to kernels.
      down: [columns, outputs].
      kind: the activation, as `activation` takes it.

    >>> x, up = jnp.ones((2, 8)), jnp.ones((8, 16))
    >>> gated_mlp(x, up, up, jnp.ones((16, 8)), kind="relu")[0, 0].item()
    1024.0
    """
    x, gate, up, down = (
        as_array("gated_mlp", name, given)
        for name, given in (("x", x), ("gate", gate), ("up", up), ("down", down))
    )  # fmt: skip
    shapes = {"gate": x.shape[-1:] + up.shape[1:], "up": x.shape[-1:] + gate.shape[1:]}
    if up.ndim != 2 or down.ndim != 2 or gate.shape != shapes["gate"] or up.shape != shapes["up"]:
        given = ", ".join(map(describe, (x, gate, up, down)))
        raise rule_error("gated_mlp takes x [..., K], gate and up [K, columns]", given, "check which array is which")
    if down.shape[0] != up.shape[1]:
        raise rule_error(
            f"down is [columns, outputs], with the {up.shape[1]} columns of up", describe(down), "transpose it"
        )
    by_kernels = has_kernels(x, gate, up, down, kind=kind)
    gate, up, down = (a.astype(x.dtype) for a in (gate, up, down))
    if not by_kernels:
        return jnp.matmul(gated_activation(jnp.matmul(x, gate), jnp.matmul(x, up), kind=kind), down)
    rows = x.reshape(-1, x.shape[-1])
    return _by_kernels(rows, gate, up, down, kind).reshape(*x.shape[:-1], down.shape[1])


def has_kernels(x: Any, gate: Any, up: Any, down: Any, *, kind: str) -> bool:
    """Whether `gated_mlp` has its products and their gradient by kernels: where dispatch takes those, and both weights
    are cast on the way.

    Shapes and types will do (`jax.ShapeDtypeStruct`).
    """
    columns = gate.shape[-1]
    if columns % WIDTH or x.dtype in (gate.dtype, up.dtype):
        return False
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=x.dtype)
    rows = math.prod(x.shape[:-1])
    products = call_of(GATED_PRODUCTS, (shape((rows, x.shape[-1])), shape((x.shape[-1], 2 * columns))), {"kind": kind})
    grads = (shape((rows, down.shape[-1])), shape(down.shape), shape((rows, 2 * columns)))
    gradient = call_of(GATED_PRODUCTS_GRAD, grads, {"kind": kind})
    return all(takes_kernel(call) for call in (products, gradient))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _by_kernels(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, kind: str) -> jax.Array:
    inner = run(GATED_PRODUCTS, (x, paired(gate, up)), {"kind": kind, "keep": False})
    return jnp.matmul(inner, down)


def _forward(x: Any, gate: Any, up: Any, down: Any, kind: str) -> tuple[jax.Array, Any]:
    pairs = paired(gate, up)
    inner, products = run(GATED_PRODUCTS, (x, pairs), {"kind": kind})
    return jnp.matmul(inner, down), (x, pairs, down, inner, products)


def _backward(kind: str, kept: Any, d_out: jax.Array) -> tuple[jax.Array, ...]:
    """Both gradients lie as the weights do, in pairs: one product gives x's gradient, and one those of both weights."""
    x, pairs, down, inner, products = kept
    d_products = run(GATED_PRODUCTS_GRAD, (d_out, down, products), {"kind": kind})
    d_gate, d_up = unpaired(_dot(x, d_products, 0, 0))
    return _dot(d_products, pairs, 1, 1), d_gate, d_up, _dot(inner, d_out, 0, 0)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))


_by_kernels.defvjp(_forward, _backward)

register(GATED_PRODUCTS_GRAD)
register(GATED_PRODUCTS)
