"""The batching rule and the mesh rule of nearest_code.

vmap over x alone is one more leading axis. On a mesh every leading axis of x is split freely, and the codes too: each
device finds its nearest, and the nearest of those is taken over the mesh, the lowest index where they are equal.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.vq.nearest.reference import outputs, wide_type
from capibara.kernels.ops.vq.nearest.statistics import statistics

Params = dict[str, Any]


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap: one call of more rows where the codebook is shared and no sum is over rows; else one after another."""
    _, codes_batched = batched
    if not codes_batched and not params["return_stats"]:
        return run(op, arrays, params, prefer=prefer)
    mapped = [x for x, is_batched in zip(arrays, batched, strict=True) if is_batched]

    def one(slices: list[Any]) -> Any:
        given = iter(slices)
        full = tuple(next(given) if b else x for x, b in zip(arrays, batched, strict=True))
        return run(op, full, params, prefer=prefer)

    return lax.map(one, mapped)


def rule(call: Call) -> str:
    rows = " ".join(f"r{axis}" for axis in range(len(call.need("x").shape) - 1))
    made = [rows] * (2 if call.params["return_distances"] else 1)
    if call.params["return_stats"]:
        made += ["k", "k c"]
    return f"{rows} c, k c -> {', '.join(made)}".strip()


def local(op: Op, arrays: tuple[Any, ...], params: Params, axes: dict[str, tuple[str, ...]], prefer: Prefer) -> Any:
    """One device's rows against its codes, then what is left to do over the mesh."""
    x, codebook = arrays
    over_codes = axes.get("k", ())
    over_rows = tuple(name for factor, names in axes.items() if factor.startswith("r") for name in names)
    with_distances, with_stats = params["return_distances"], params["return_stats"]
    if not over_codes:
        made = run(op, arrays, params, prefer=prefer, local=True)
        if not with_stats or not over_rows:
            return made
        *rest, counts, sums = made
        return (*rest, lax.psum(counts, over_rows), lax.psum(sums, over_rows))
    own = {"return_distances": True, "return_stats": False}
    indices, distances = run(op, arrays, own, prefer=prefer, local=True)
    codes = codebook.shape[0]
    place = jnp.int32(0)
    for name in over_codes:  # the first named axis is the slowest
        place = place * lax.axis_size(name) + lax.axis_index(name)
    first = place * codes
    found = indices >= 0
    distances = jnp.where(found, distances, jnp.inf)
    nearest = lax.pmin(distances, over_codes)
    nobody = jnp.iinfo(jnp.int32).max
    # A device whose codes cannot be used has found nothing, and says nothing; a row that has no code has none anywhere.
    offered = jnp.where(found & (distances == nearest), indices + first, nobody)
    chosen = lax.pmin(offered, over_codes)
    chosen = jnp.where(chosen == nobody, -1, chosen)
    nearest = jnp.where(chosen >= 0, nearest, jnp.nan)
    counts = sums = None
    if with_stats:
        here = (chosen >= first) & (chosen < first + codes)
        flat = jnp.where(here, chosen - first, -1).reshape(-1)
        counts, sums = statistics(x.reshape(-1, x.shape[-1]), flat, codes, wide_type(x, codebook))
        if over_rows:
            counts, sums = lax.psum(counts, over_rows), lax.psum(sums, over_rows)
    return outputs(chosen, nearest, counts, sums, with_distances, with_stats)


PARTITION = Partition(rule, reduced=("k",), replicated=lambda call: ("c",), local=local)
