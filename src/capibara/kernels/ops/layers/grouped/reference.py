"""The specification of the grouped products, in plain JAX: one masked product a group, at full precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.layers.grouped.tiles import group_ends

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    # By erf, which a TPU kernel has too; jax.nn's is by erfc, which it has not.
    "gelu": lambda z: 0.5 * z * (1 + jax.lax.erf(z * 2**-0.5)),
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "relu": lambda z: jnp.maximum(z, 0),
    "sigmoid": jax.nn.sigmoid,
}


def wide_type(*arrays: Any) -> Any:
    """What products are summed in: float32, or wider where an operand is."""
    return jnp.promote_types(jnp.float32, jnp.result_type(*arrays))


def members(group_sizes: jax.Array, rows: int) -> jax.Array:
    """bool [groups, rows]: which rows each group has. A row past the last group is in none."""
    ends = group_ends(group_sizes, rows)
    row = jnp.arange(rows)
    return (row < ends[:, None]) & (row >= jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])[:, None])


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) · up, of two products in float32."""
    return ACTIVATIONS[activation](gate) * up


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: str | None = None,
) -> jax.Array:
    """[rows, N]: each row by its group's weight; zeros for a row that is in no group.

    Masks are selections before and after the product, so that NaN in one group's rows or weight stays there, forward
    and backward.
    """
    out = jnp.dtype(out_dtype) if out_dtype else jnp.result_type(lhs, rhs)
    wide = wide_type(lhs, rhs)

    def add(total: jax.Array, group: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        mask, weight = group
        own = jnp.where(mask[:, None], lhs.astype(wide), 0)
        weight = (weight.mT if transpose_rhs else weight).astype(wide)
        product = jnp.matmul(own, weight, precision=jax.lax.Precision.HIGHEST)
        return total + jnp.where(mask[:, None], product, 0), None

    empty = vary_like(jnp.zeros((lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]), wide), lhs)
    # Checkpointed: a derivative would else keep the rows once for each group.
    total, _ = jax.lax.scan(jax.checkpoint(add), empty, (members(group_sizes, lhs.shape[0]), rhs))
    return total.astype(out)


def reference_weights(
    lhs: jax.Array,
    d_out: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose: bool = False,
    out_dtype: str | None = None,
) -> jax.Array:
    """[groups, K, N]: for each group the product of its rows of lhs, transposed, with its rows of d_out.

    [groups, N, K] with `transpose`. Zeros for an empty group; rows that are in no group count nowhere.
    """
    out = jnp.dtype(out_dtype) if out_dtype else jnp.result_type(lhs, d_out)
    wide = wide_type(lhs, d_out)

    @jax.checkpoint
    def one(mask: jax.Array) -> jax.Array:
        left, right = (jnp.where(mask[:, None], x.astype(wide), 0) for x in (lhs, d_out))
        product = jnp.matmul(left.T, right, precision=jax.lax.Precision.HIGHEST)
        return (product.T if transpose else product).astype(out)

    return jax.lax.map(one, members(group_sizes, lhs.shape[0]))


def reference_gated(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: str = "silu",
    return_products: bool = False,
) -> Any:
    """activation(lhs @ gate) · (lhs @ up), each row by its group's two weights; zeros for a row that is in no group.

    With `return_products` also both products, rounded to the result's type; the result is made of the unrounded ones.
    """
    out = jnp.result_type(lhs, gate, up)
    wide = wide_type(lhs, gate, up)
    products = [reference(lhs, weight, group_sizes, out_dtype=wide.name) for weight in (gate, up)]
    y = gated(activation, *products).astype(out)
    return (y, *(p.astype(out) for p in products)) if return_products else y
