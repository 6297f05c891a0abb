"""The grouped products for Hopper's tensor cores, in Pallas (Mosaic GPU): what the ops call.

`pallas_gpu_rows` multiplies grouped rows by their groups' weights, plain and gated; `pallas_gpu_weights` contracts
over grouped rows; `pallas_gpu_walk` is what both share; `pallas_gpu_config` says which calls they take.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.layers.grouped.pallas_gpu_config import (
    GroupedHopperConfig,
    default_gated_config,
    default_row_config,
    default_weight_config,
    gated_candidates,
    refuses,
    row_candidates,
    weight_candidates,
)
from capibara.kernels.ops.layers.grouped.pallas_gpu_rows import grouped_rows
from capibara.kernels.ops.layers.grouped.pallas_gpu_weights import grouped_weights


def mosaic_gpu(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, config: GroupedHopperConfig,
    transpose_rhs: bool = False, out_dtype: str | None = None,
) -> jax.Array:  # fmt: skip
    """grouped_gemm as one persistent kernel."""
    out = jnp.dtype(out_dtype) if out_dtype else lhs.dtype
    return grouped_rows(lhs, (rhs,), group_sizes, config=config, transposed=transpose_rhs, out_dtype=out)[0]


def mosaic_gpu_gated(
    lhs: jax.Array, gate: jax.Array, up: jax.Array, group_sizes: jax.Array, *, config: GroupedHopperConfig,
    activation: str = "silu", return_products: bool = False,
) -> Any:  # fmt: skip
    """grouped_gated_gemm as one persistent kernel; with `return_products` it writes all three results."""
    made = grouped_rows(
        lhs, (gate, up), group_sizes, config=config, transposed=False, out_dtype=lhs.dtype, activation=activation,
        outputs=3 if return_products else 1,
    )  # fmt: skip
    return tuple(made) if return_products else made[0]


def mosaic_gpu_weights(
    lhs: jax.Array, d_out: jax.Array, group_sizes: jax.Array, *, config: GroupedHopperConfig,
    transpose: bool = False, out_dtype: str | None = None,
) -> jax.Array:  # fmt: skip
    """grouped_gemm_weights as one persistent kernel, after a gather of each group's odd rows."""
    out = jnp.dtype(out_dtype) if out_dtype else lhs.dtype
    left, right = (d_out, lhs) if transpose else (lhs, d_out)
    return grouped_weights(left, right, group_sizes, config=config, out_dtype=out)


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 20,  # on an H200 30 times as fast as lax.ragged_dot, and level with one dense product
    kernel=True,
    config_type=GroupedHopperConfig,
    default_config=default_row_config,
    candidates=row_candidates,
)

GATED_IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu_gated,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 20,  # on an H200 at 0.97 of the rate of the plain grouped product
    kernel=True,
    config_type=GroupedHopperConfig,
    default_config=default_gated_config,
    candidates=gated_candidates,
)

WEIGHTS_IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu_weights,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 20,  # on an H200 30 times as fast as lax.ragged_dot, and 0.8 of one dense product
    kernel=True,
    config_type=GroupedHopperConfig,
    default_config=default_weight_config,
    candidates=weight_candidates,
)
