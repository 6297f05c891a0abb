"""The singular value decomposition of a small square matrix by one-sided Jacobi rotations.

Pairs of rows are rotated until all rows are orthogonal; their lengths are then the singular values, and the rotations
the left vectors. A round rotates n/2 disjoint pairs at once, elementwise work with three sums a pair, so it compiles in
no time anywhere and is exact float32 on a TPU, whose library SVD takes minutes to compile. The round-robin order of a
tournament meets every pair once in n - 1 rounds (a sweep) and puts the rows back where they were. Convergence is
quadratic: five to seven sweeps, in a loop that ends when a sweep finds nothing to rotate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import unit_roundoff
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.linalg.svd.orthonormal import orthonormal, polished

MAX_SWEEPS = 15


def jacobi_svd(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(u [n, n], s [n], vh [n, n]) of a [n, n], s in descending order; NaN where a has one.

    >>> u, s, vh = jacobi_svd(jnp.array([[0.0, 2.0], [1.0, 0.0]]))
    >>> [round(float(x), 6) for x in s]
    [2.0, 1.0]
    """
    rows, turned, _ = rotated(a)
    # What a long product of rounded rotations has grown or shrunk by is seen on the rotations alone.
    s = jnp.sqrt(jnp.sum(jnp.square(rows), axis=1) / jnp.sum(jnp.square(turned), axis=1))
    order = jnp.argsort(-s)
    s, rows, turned = s[order], rows[order], turned[order]
    turned = polished(turned)
    # A row of length zero has no direction; this gives it one, and leaves the others, orthonormal already, in place.
    vh = orthonormal(jnp.where(s[:, None] > 0, rows / jnp.where(s > 0, s, 1)[:, None], 0).T)[0].T
    good = jnp.all(jnp.isfinite(s))
    return jnp.where(good, turned.T, jnp.nan), jnp.where(good, s, jnp.nan), jnp.where(good, vh, jnp.nan)


def rotated(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(j a with orthogonal rows, the rotations j, sweeps)."""
    n = a.shape[0]
    half = (n + 1) // 2
    # LAPACK's: rows are orthogonal when their cosine is what rounding leaves of a sum of n terms.
    tolerance = n**0.5 * float(jnp.finfo(a.dtype).eps)
    # Rows that are both lost in the matrix's rounding need not be orthogonal: turning one in place moves the matrix
    # by less than that. Without this, noise would be rotated for as long as the loop allows.
    negligible = unit_roundoff(a.dtype) ** 2
    size = jnp.sqrt(jnp.sum(jnp.square(a)))
    unit = jnp.where(size > 0, size, 1)
    # A row of zeros makes the number even. It is orthogonal to every other, so it is never rotated.
    padded = jnp.zeros((2 * half, n), a.dtype).at[:n].set(a / unit)
    both = jnp.concatenate([padded, jnp.eye(2 * half, dtype=a.dtype)], axis=1)
    both, angle, sweeps = (vary_like(x, a) for x in (both, jnp.ones((), a.dtype), jnp.int32(0)))

    def one_round(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        top, bottom, worst = state
        x, y = top[:, :n], bottom[:, :n]
        xx, yy, xy = jnp.sum(x * x, axis=1), jnp.sum(y * y, axis=1), jnp.sum(x * y, axis=1)
        lengths = jnp.sqrt(xx) * jnp.sqrt(yy)
        matters = jnp.abs(xy) > negligible
        cosine = jnp.where(matters, jnp.abs(xy) / jnp.where(matters, lengths, 1), 0)
        turn = cosine > tolerance
        zeta = (yy - xx) / (2 * jnp.where(turn, xy, 1))
        tangent = jnp.where(turn, jnp.where(zeta < 0, -1, 1) / (jnp.abs(zeta) + jnp.sqrt(1 + zeta * zeta)), 0)
        c = (1 / jnp.sqrt(1 + tangent * tangent))[:, None]
        s = tangent[:, None] * c
        top, bottom = c * top - s * bottom, s * top + c * bottom
        # The first row stays; the others move one seat on around the table.
        seats = jnp.concatenate([top[:1], bottom[:1], top[1:-1]]) if half > 1 else top
        below = jnp.concatenate([bottom[1:], top[-1:]]) if half > 1 else bottom
        return seats, below, jnp.maximum(worst, jnp.max(cosine))

    def sweep(state: tuple[Any, ...]) -> tuple[Any, ...]:
        top, bottom, angle, sweeps = state
        top, bottom, angle = jax.lax.fori_loop(0, 2 * half - 1, one_round, (top, bottom, 0 * angle))
        return top, bottom, angle, sweeps + 1

    def unfinished(state: tuple[Any, ...]) -> Any:
        # A comparison with NaN is false: what is not a number ends the loop.
        return (state[2] > tolerance) & (state[3] < MAX_SWEEPS)

    top, bottom, _, sweeps = jax.lax.while_loop(unfinished, sweep, (both[:half], both[half:], angle, sweeps))
    both = jnp.concatenate([top, bottom])[:n]
    return both[:, :n] * unit, both[:, n : 2 * n], sweeps
