"""What the grouped products are held against besides their own implementations: lax.ragged_dot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.layers.grouped.reference import gated


def _output(case: Case) -> Any:
    return jnp.dtype(str(case.params.get("out_dtype") or case.dtype))


def ragged_dot(case: Case) -> Callable[..., Any] | None:
    """A product; [groups, N, K] weights are read as they lie."""
    flipped = bool(case.params.get("transpose_rhs"))
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2 if flipped else 1,)), ((), ())), [0], [0])
    return jax.jit(
        lambda lhs, rhs, sizes: lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=_output(case))
    )


def ragged_dot_weights(case: Case) -> Callable[..., Any] | None:
    """The gradient of the weights: its ragged axis is contracted."""
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def product(lhs: jax.Array, d_out: jax.Array, sizes: jax.Array) -> jax.Array:
        left, right = (d_out, lhs) if case.params.get("transpose") else (lhs, d_out)
        return lax.ragged_dot_general(left, right, sizes, numbers, preferred_element_type=_output(case))

    return jax.jit(product)


def ragged_dot_gated(case: Case) -> Callable[..., Any] | None:
    """Two products and the activation, in one program."""
    if case.params.get("return_products"):
        return None
    activation = str(case.params.get("activation", "silu"))

    def both(lhs: jax.Array, gate: jax.Array, up: jax.Array, sizes: jax.Array) -> jax.Array:
        products = (lax.ragged_dot(lhs, w, sizes, preferred_element_type=jnp.float32) for w in (gate, up))
        return gated(activation, *products).astype(case.dtype)

    return jax.jit(both)
