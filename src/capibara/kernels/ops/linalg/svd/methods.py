"""The two ways to singular triplets of one matrix [M, N]: exactly, and by a random sketch.

Randomized (Halko, Martinsson and Tropp, "Finding structure with randomness", 2011): the products of the matrix with a
few random columns span nearly what its leading left vectors span. Power iterations, alternating products with the
matrix and its transpose, sharpen that when singular values fall slowly; between them the columns are made independent
again, or all would lean to the first singular vector and rounding would eat the rest. With Q the orthonormal basis
found, the decomposition of Qᵀ A, a matrix with few rows, gives the triplets. That one is reduced from the other side
in the same way, so that what is left to decompose is square and small, and its singular values are not squared.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.kernels.ops.linalg.svd.choice import Plan
from capibara.kernels.ops.linalg.svd.jacobi import jacobi_svd
from capibara.kernels.ops.linalg.svd.orthonormal import orthonormal, polished, well_conditioned
from capibara.kernels.ops.linalg.svd.rows import WHOLE, Rows, product

Triplets = tuple[jax.Array, jax.Array, jax.Array]


def triplets(a: jax.Array, sketch: jax.Array, plan: Plan) -> Triplets:
    """(u, s, vh) with signs such that the largest element of each row of vh is positive."""
    if plan.method == "randomized":
        u, s, vh = randomized(a, sketch, plan)
    else:
        u, s, vh = exact(a, plan)
    u, s, vh = u[:, : plan.rank], s[: plan.rank], vh[: plan.rank]
    largest = jnp.take_along_axis(vh, jnp.argmax(jnp.abs(vh), axis=1)[:, None], axis=1)
    sign = jnp.where(largest < 0, -1, 1).astype(vh.dtype)
    return u * sign[:, 0], s, vh * sign


def singular_values(a: jax.Array, sketch: jax.Array, plan: Plan) -> jax.Array:
    if plan.method == "randomized":
        return triplets(a, sketch, plan)[1]
    rows = Rows(plan.axis_name)
    if plan.reduced == "rows":
        a = rows.inner(orthonormal(a, rows)[0], a)
    elif plan.reduced == "columns":
        a = product(a, orthonormal(a.T)[0])
    return jnp.linalg.svd(a, compute_uv=False)[: plan.rank]


def exact(a: jax.Array, plan: Plan) -> Triplets:
    rows = Rows(plan.axis_name)
    if plan.reduced == "rows":
        q, _ = orthonormal(a, rows)
        u, s, vh = library_svd(rows.inner(q, a))
        return product(q, u), s, vh
    if plan.reduced == "columns":
        q, _ = orthonormal(a.T)
        u, s, vh = library_svd(product(a, q))
        return u, s, product(vh, q.T)
    return library_svd(a)


def randomized(a: jax.Array, sketch: jax.Array, plan: Plan) -> Triplets:
    rows = Rows(plan.axis_name)

    def times(x: jax.Array) -> jax.Array:
        return gemm(a, x, precision="highest")

    def transposed_times(x: jax.Array) -> jax.Array:
        return rows.summed(gemm(a, x, transpose_a=True, precision="highest"))

    def power(_: Any, y: jax.Array) -> jax.Array:
        z = transposed_times(well_conditioned(y, rows)[0])
        return times(well_conditioned(z)[0])

    y = times(sketch)
    if plan.power_iterations:
        y = jax.lax.fori_loop(0, plan.power_iterations, power, y)
    left, _ = orthonormal(y, rows)
    across = transposed_times(left)  # Aᵀ Q [N, width]
    right, _ = orthonormal(across, WHOLE)
    core = product(across.T, right)
    if plan.core == "jacobi":
        u, s, vh = jacobi_svd(core)
    else:
        u, s, vh = library_svd(core)
        u, vh = polished(u), polished(vh)
    kept = plan.rank
    return product(left, u[:, :kept]), s[:kept], product(vh[:kept], right.T)


def library_svd(a: jax.Array) -> Triplets:
    u, s, vh = jnp.linalg.svd(a, full_matrices=False)
    # Libraries differ in what they make of NaN and infinity: some return numbers.
    good = jnp.all(jnp.isfinite(a))
    return jnp.where(good, u, jnp.nan), jnp.where(good, s, jnp.nan), jnp.where(good, vh, jnp.nan)
