"""Orthonormal columns by matrix products: Cholesky QR, repeated until it is safe.

One pass forms the Gram matrix G = YᵀY, factors G = RᵀR and takes Y R⁻¹. It is all matrix products, whose sums over
the rows are the only thing that devices exchange, but G has the square of Y's condition number: in float32 the factor
does not exist from a condition of about 3,000 on. So the columns are scaled to length one and, unless G is near the
identity, a small multiple of it is added before the factorisation. A shifted pass always exists and divides the
condition number by 1/sqrt(shift), hundreds in float32; passes are repeated until G is near the identity, and an
unshifted pass ends with columns that are orthonormal to rounding. Well-conditioned columns take two passes in all
(this is then CholeskyQR2), columns that are dependent to rounding about five: the number is returned.

Columns that are exactly dependent have no direction to amplify. Noise of one unit roundoff, as large as the rounding
of Y itself, gives them one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.spec import unit_roundoff
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.linalg.svd.rows import WHOLE, Rows, product
from capibara.kernels.pallas import prng

MAX_PASSES = 30
NEAR = 0.5
"""G is near the identity when |G - I| is at most this in the Frobenius norm: its condition number is then below 3."""
_NOISE_SEED = (0x5EED, 0x0FC0)


def orthonormal(y: jax.Array, rows: Rows = WHOLE) -> tuple[jax.Array, jax.Array]:
    """(q, passes): columns that are orthonormal to rounding and span those of y [rows, columns]; never more columns.

    >>> q, passes = orthonormal(jnp.ones((100, 3)))
    >>> bool(jnp.abs(q.T @ q - jnp.eye(3)).max() < 1e-6)
    True
    """
    y, gram, passes = _until_near(y, rows)
    scale = _column_scale(gram)
    factor = jax.lax.linalg.cholesky(_scaled(gram, scale), symmetrize_input=False)
    q = product(y, scale[:, None] * _inverse_transpose(factor))
    # A matrix product may add up one term after another; a plain sum does it in a tree, and loses less over many rows.
    return q * jax.lax.rsqrt(rows.summed(jnp.sum(jnp.square(q), axis=0))), passes + 1


def well_conditioned(y: jax.Array, rows: Rows = WHOLE) -> tuple[jax.Array, jax.Array]:
    """(x, passes): columns that span those of y, with a condition number below 2: enough between power iterations."""
    y, gram, passes = _until_near(y, rows)
    return y * _column_scale(gram), passes


def polished(x: jax.Array) -> jax.Array:
    """A square matrix that is orthogonal but for hundreds of roundings, made so to a few: one Newton step."""
    return 1.5 * x - 0.5 * product(product(x, x.T), x)


def _until_near(y: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """y after as many shifted passes as it takes, its Gram matrix, and how many they were."""
    width = y.shape[1]
    identity = jnp.eye(width, dtype=y.dtype)
    # The error of G and of its factor is a few units roundoff a column; a shift of that size keeps G positive.
    least = 4 * width * unit_roundoff(y.dtype)
    y = _with_noise(y, rows)
    gram = rows.inner(y, y)

    def far(state: tuple[Any, ...]) -> Any:
        _, gram, _, passes = state
        distance = jnp.linalg.norm(_scaled(gram, _column_scale(gram)) - identity)
        # What is not a number will not become one.
        return (distance > NEAR) & jnp.isfinite(distance) & (passes < MAX_PASSES)

    def one_pass(state: tuple[Any, ...]) -> tuple[Any, ...]:
        y, gram, shift, passes = state
        scale = _column_scale(gram)
        factor = jax.lax.linalg.cholesky(_scaled(gram, scale) + shift * identity, symmetrize_input=False)
        exists = jnp.all(jnp.isfinite(factor))
        step = jnp.where(exists, _inverse_transpose(jnp.where(exists, factor, identity)), identity)
        y = product(y, scale[:, None] * step)
        return y, rows.inner(y, y), jnp.where(exists, least, 16 * shift).astype(shift.dtype), passes + 1

    shift, passes = (vary_like(x, gram) for x in (jnp.asarray(least, y.dtype), jnp.int32(0)))
    y, gram, _, passes = jax.lax.while_loop(far, one_pass, (y, gram, shift, passes))
    return y, gram, passes


def _column_scale(gram: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.diagonal(gram))


def _scaled(gram: jax.Array, scale: jax.Array) -> jax.Array:
    return gram * scale[:, None] * scale


def _inverse_transpose(lower: jax.Array) -> jax.Array:
    """lower⁻ᵀ. It is small: a product with it is one matrix product that every device does on its own rows."""
    identity = jnp.eye(lower.shape[0], dtype=lower.dtype)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True).T


def _with_noise(y: jax.Array, rows: Rows) -> jax.Array:
    """y plus noise of one unit roundoff of its norm a column, the same wherever the rows lie."""
    local, width = y.shape
    size = jnp.sqrt(rows.summed(jnp.sum(jnp.square(y))))
    size = jnp.where(size == 0, 1, size)
    keys = prng.row_keys(_NOISE_SEED, rows.indices(local)[:, None])
    bits = prng.random_bits(keys, jnp.arange(width, dtype=jnp.uint32))
    signed = jax.lax.bitcast_convert_type(bits, jnp.int32).astype(y.dtype)
    # Uniform in [-sqrt 3, sqrt 3): variance one.
    unit = signed * np.asarray(3**0.5 * 2.0**-31, y.dtype)
    return y + unit * (unit_roundoff(y.dtype) / rows.count(local) ** 0.5 * size).astype(y.dtype)
