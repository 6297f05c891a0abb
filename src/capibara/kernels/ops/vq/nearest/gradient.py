"""How nearest_code is differentiated: indices and counts have no derivative; distances and sums do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Prefer
from capibara.kernels.ops.vq.nearest.reference import wide_type

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    x, codebook = arrays
    made = run(op, arrays, params, prefer=prefer)
    indices = made[0] if isinstance(made, tuple) else made
    return made, (x, codebook, indices)


def backward(residuals: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """d|x - c|²/dx = 2 (x - c), its negative for c; a row's part of a code's sum is the row itself."""
    x, codebook, indices = residuals
    given = list(cotangent) if isinstance(cotangent, tuple) else [cotangent]
    d_distances = given[1] if params["return_distances"] else None
    d_sums = given[-1] if params["return_stats"] else None
    wide = wide_type(x, codebook)
    found = (indices >= 0)[..., None]
    at = jnp.maximum(indices, 0)
    dx, dcodes = jnp.zeros(x.shape, wide), jnp.zeros(codebook.shape, wide)
    if d_distances is not None:
        difference = jnp.where(found, x.astype(wide) - codebook[at].astype(wide), 0)
        pulled = 2 * difference * jnp.where(found, d_distances[..., None], 0)
        dx = dx + pulled
        dcodes = dcodes.at[at.reshape(-1)].add(-pulled.reshape(-1, x.shape[-1]))
    if d_sums is not None:
        dx = dx + jnp.where(found, d_sums[at], 0)
    return dx.astype(x.dtype), dcodes.astype(codebook.dtype)
