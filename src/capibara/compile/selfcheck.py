"""Two small targets that show whether the TPU compiler works here: XLA's matmul and the stock Pallas one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

__all__ = ["stock_pallas_matmul", "xla_matmul"]


def xla_matmul(size: int = 2048, dtype: str = "bfloat16") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`a @ b` of square matrices, as XLA compiles it."""
    import jax.numpy as jnp

    return jnp.matmul, _square_pair(size, dtype)


def stock_pallas_matmul(
    size: int = 2048, block: int = 512, dtype: str = "bfloat16"
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`jax.experimental.pallas.ops.tpu.matmul` in cubic blocks."""
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    return functools.partial(matmul, block_shape=(block, block), block_k=block), _square_pair(size, dtype)


def _square_pair(size: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    import jax
    import jax.numpy as jnp

    side = jax.ShapeDtypeStruct((size, size), jnp.dtype(dtype))
    return side, side
