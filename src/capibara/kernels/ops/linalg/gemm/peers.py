"""What gemm is held against besides its own implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.context import target
from capibara.kernels.core.op import lookup
from capibara.kernels.core.spec import Case
from capibara.kernels.ops.linalg.gemm.reference import epilogue
from capibara.kernels.ops.linalg.gemm.rules import sizes
from capibara.kernels.ops.linalg.gemm.tpu.forward import candidates, fit
from capibara.kernels.ops.linalg.gemm.xla import xla


def xla_two_step(case: Case) -> Callable[..., Any] | None:
    """The product by XLA, then the epilogue as a second program that reads it back: what unfused code does."""
    _, _, bias, residual = case.args()
    activation = case.params.get("activation")
    if bias is None and residual is None and activation is None:
        return None
    bare: dict[str, Any] = {k: v for k, v in case.params.items() if k != "activation"}
    product = jax.jit(lambda a, b: xla(a, b, **bare))
    wide = jnp.float32

    @jax.jit
    def finish(z: jax.Array, bias: Any, residual: Any) -> jax.Array:
        return epilogue(z.astype(wide), bias, residual, activation).astype(z.dtype)  # type: ignore[arg-type]

    return lambda a, b, bias, residual: finish(product(a, b), bias, residual)


def stock_tpu(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """jax's example TPU matmul at the tile our kernel takes; it knows plain matrices that divide, and no more."""
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    a, b, bias, residual = case.args()
    if case.params or bias is not None or residual is not None or len(case.shapes[0] or ()) != 2:
        return None
    with target("tpu"):
        call = lookup("gemm").call(a, b)
        _, m, n, k = sizes(call)
        bm, bn, bk = fit(candidates(call)[0], m, n, k)
    if m % bm or n % bn or k % bk or bm % 8 or bn % 128 or bk % 128:
        return None
    return (lambda a, b: matmul(a, b, block_shape=(bm, bn), block_k=bk)), (a, b)
