"""The derivative of the leading singular triplets.

A = U S Vᵀ + R, where R holds the triplets that were left out: Uᵀ R = 0 and R V = 0. With P = Uᵀ dA V, differentiating
A V = U S and Aᵀ U = V S gives

    ds        = diag(P)
    Uᵀ dU     = F ∘ (P S + S Pᵀ),   Vᵀ dV = F ∘ (S P + Pᵀ S),   F_ij = 1 / (s_j² - s_i²) off the diagonal
    X S - R Y = (I - U Uᵀ) dA V,    Y S - Rᵀ X = (I - V Vᵀ) dAᵀ U,   for X = (I - U Uᵀ) dU, Y = (I - V Vᵀ) dV

The last line couples the vectors that were kept to those that were not. When none was left out R is zero and X, Y are
divisions; otherwise each column is a symmetric system, positive definite because |R| = s_{r+1} < s_i, solved by
conjugate gradients with products with A alone. Its condition number is (s_i + s_{r+1}) / (s_i - s_{r+1}).

Vectors of equal singular values are not determined, and have no derivative: their F is taken as 0, as
jnp.linalg.svd takes it. The randomized triplets are differentiated as the exact ones that they approximate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import unit_roundoff
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.linalg.svd import methods
from capibara.kernels.ops.linalg.svd.choice import Plan
from capibara.kernels.ops.linalg.svd.rows import Rows, product

MAX_STEPS = 200
Pair = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def triplets(a: jax.Array, sketch: jax.Array, plan: Plan) -> methods.Triplets:
    return methods.triplets(a, sketch, plan)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def singular_values(a: jax.Array, sketch: jax.Array, plan: Plan) -> jax.Array:
    return methods.singular_values(a, sketch, plan)


@singular_values.defjvp
def _values_jvp(plan: Plan, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    u, s, vh = triplets(*primals, plan)
    return s, Rows(plan.axis_name).summed(jnp.sum(u * product(tangents[0], vh.T), axis=0))


@triplets.defjvp
def _triplets_jvp(
    plan: Plan, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[methods.Triplets, methods.Triplets]:
    a, sketch = primals
    da = tangents[0]
    rows = Rows(plan.axis_name)
    u, s, vh = triplets(a, sketch, plan)
    v = vh.T
    da_v = product(da, v)
    dat_u = rows.inner(da, u)
    p = rows.inner(u, da_v)
    squares = jnp.square(s)
    gap = squares[None, :] - squares[:, None]
    f = jnp.where(gap == 0, 0, 1 / jnp.where(gap == 0, 1, gap))
    turn_u = f * (p * s + s[:, None] * p.T)
    turn_v = f * (s[:, None] * p + p.T * s)
    x, y = _outside(a, u, s, v, (da_v - product(u, p), dat_u - product(v, p.T)), plan)
    return (u, s, vh), (product(u, turn_u) + x, jnp.diagonal(p), (product(v, turn_v) + y).T)


def _outside(a: jax.Array, u: jax.Array, s: jax.Array, v: jax.Array, right: Pair, plan: Plan) -> Pair:
    """X and Y of the module's text; each column divided by its singular value first (0 for a value of 0)."""
    rows = Rows(plan.axis_name)
    inverse = jnp.where(s > 0, 1 / jnp.where(s > 0, s, 1), 0)
    start = right[0] * inverse, right[1] * inverse
    if plan.rank == min(plan.rows, plan.columns):
        return start

    # Inside shard_map x has other rows on every device and y is whole on each. Split into equal parts, y is summed
    # over the devices as x is, and the system stays symmetric as JAX transposes it.
    def operator(z: Pair) -> Pair:
        x, y = z[0], rows.gathered(z[1])
        rest_y = product(a, y - product(v, product(v.T, y)))
        rest_x = rows.inner(a, x - product(u, rows.inner(u, x)))
        rest_y -= product(u, rows.inner(u, rest_y))
        rest_x -= product(v, product(v.T, rest_x))
        return x - rest_y * inverse, z[1] - rows.spread(rest_x * inverse, x)

    def dots(z: Pair, w: Pair) -> jax.Array:
        return rows.summed(jnp.sum(z[0] * w[0], axis=0) + jnp.sum(z[1] * w[1], axis=0))

    solve = functools.partial(_conjugate_gradients, dots=dots)
    parts = start[0], rows.spread(start[1], start[0])
    x, y = jax.lax.custom_linear_solve(operator, parts, solve, symmetric=True)
    return x, rows.gathered(y)


def _conjugate_gradients(operator: Callable[[Pair], Pair], right: Pair, dots: Callable[[Pair, Pair], Any]) -> Pair:
    """Every column its own system, all in step; a column that is done, or not positive, stays where it is."""
    wanted = jnp.square(16 * unit_roundoff(right[0].dtype)) * dots(right, right)

    def unfinished(state: tuple[Any, ...]) -> Any:
        *_, left, step = state
        return jnp.any(left > wanted) & (step < MAX_STEPS)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        z, residual, direction, left, steps = state
        image = operator(direction)
        curvature = dots(direction, image)
        move = jnp.where((curvature > 0) & (left > wanted), left / jnp.where(curvature > 0, curvature, 1), 0)
        z = jax.tree.map(lambda one, two: one + move * two, z, direction)
        residual = jax.tree.map(lambda one, two: one - move * two, residual, image)
        new = dots(residual, residual)
        keep = jnp.where(left > 0, new / jnp.where(left > 0, left, 1), 0)
        direction = jax.tree.map(lambda one, two: one + keep * two, residual, direction)
        return z, residual, direction, new, steps + 1

    zero = jax.tree.map(jnp.zeros_like, right)
    begun = (zero, right, right, dots(right, right), vary_like(jnp.int32(0), wanted))
    return jax.lax.while_loop(unfinished, step, begun)[0]
