"""What a kernel's scratch takes: the description that is allocated is the one that is counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def scratch_bytes(scratch: Any) -> int:
    """The arrays in a tree of `plgpu.SMEM(...)` or `pltpu.VMEM(...)`; barriers and semaphores are not counted.

    >>> from jax.experimental.pallas import mosaic_gpu as plgpu
    >>> ring = {"tiles": plgpu.SMEM((2, 64, 64), jnp.bfloat16), "arrived": plgpu.Barrier(num_barriers=2)}
    >>> scratch_bytes(ring)
    16384
    """
    arrays = (x for x in jax.tree.leaves(scratch) if hasattr(x, "shape"))
    sizes = ((math.prod(x.shape), x.dtype) for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.extended))
    return sum(count * jnp.dtype(dtype).itemsize for count, dtype in sizes)


def vmem_bytes(blocks: Iterable[tuple[pl.BlockSpec, Any]], scratch: Any = ()) -> int:
    """VMEM of a TPU kernel: two of every block that its grid moves, each with its array's type, and one of its scratch.

    >>> vmem_bytes([(pl.BlockSpec((None, 16, 100)), jnp.bfloat16)]) == 2 * 16 * 128 * 2
    True
    """
    moved = sum(_tiled_bytes([n for n in spec.block_shape or () if n is not None], dtype) for spec, dtype in blocks)
    kept = (x for x in jax.tree.leaves(scratch) if not jnp.issubdtype(x.dtype, jax.dtypes.extended))
    return 2 * moved + sum(_tiled_bytes(x.shape, x.dtype) for x in kept)


def _tiled_bytes(shape: Sequence[Any], dtype: Any) -> int:
    """An array as it lies in VMEM: its last axis in whole lanes, the one before in whole registers or, where it is
    shorter, in a power of two."""
    itemsize = jnp.dtype(dtype).itemsize
    *lead, rows, lanes = (1, 1, *shape)
    sublanes = min(8 * 4 // itemsize, max(2, 1 << (rows - 1).bit_length()))
    return math.prod(lead) * math.ceil(rows / sublanes) * sublanes * math.ceil(lanes / 128) * 128 * itemsize
