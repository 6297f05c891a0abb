"""Blocks of 64 x 64 in memory in the order a warpgroup's registers have them, so that each thread reads whole lines.

In WGMMA's layout a thread has pairs of neighbouring numbers; read one by one from a matrix they are 4 bytes each. What
only this kernel reads may lie in memory as the registers have it: 16 bytes a thread, and a warp's in a row.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.pallas.hopper import load, store_to_memory

ROWS = 64
LAYOUT = plgpu.Layout.WGMMA
_THREADS = 128
_VECTOR = 8  # bfloat16 numbers in 16 bytes
_PAIRS = _VECTOR // 2
_IN_ORDER = plgpu.Layout.WG_STRIDED((ROWS, ROWS), vec_size=_VECTOR)


def places() -> np.ndarray:
    """For each number of a block in memory its place in the matrix, row · 64 + column: [64 · 64]."""
    part, thread, pair, number = np.indices((ROWS * ROWS // (_THREADS * _VECTOR), _THREADS, _PAIRS, 2))
    tile, lower = np.divmod(part * _PAIRS + pair, 2)  # WGMMA's registers: 8 columns, their rows 0 to 7 then 8 to 15
    warp, lane = np.divmod(thread, 32)
    row = 16 * warp + 8 * lower + lane // 4
    column = 8 * tile + 2 * (lane % 4) + number
    return (row * ROWS + column).reshape(-1)


def load_in_order(ref: Any) -> Any:
    """A block [64, 64] of bfloat16 numbers in the registers' order, in WGMMA's layout."""

    @plgpu.inline_mgpu(
        arg_types=(_IN_ORDER,), return_type=plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, layout=LAYOUT)
    )
    def emit(_: Any, given: Any) -> Any:
        from jax.experimental.mosaic.gpu import utils

        pairs = [utils.vector_slice(v, slice(2 * i, 2 * i + 2)) for v in given.registers.flat for i in range(_PAIRS)]
        return _fragments(pairs, LAYOUT.to_mgpu())

    return emit(load(ref, _IN_ORDER))


def store_in_order(ref: Any, value: Any) -> None:
    """The other way around, to global memory."""

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT,), return_type=plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, layout=_IN_ORDER)
    )
    def emit(_: Any, given: Any) -> Any:
        from jax.experimental.mosaic.gpu import utils

        pairs = list(given.registers.flat)
        whole = [utils.vector_concat(pairs[i : i + _PAIRS]) for i in range(0, len(pairs), _PAIRS)]
        return _fragments(whole, _IN_ORDER.to_mgpu())

    store_to_memory(ref, emit(value))


def _fragments(registers: list[Any], layout: Any) -> Any:
    from jax.experimental.mosaic.gpu import FragmentedArray

    placed = np.empty(len(registers), object)
    placed[:] = registers
    shape = layout.registers_shape((ROWS, ROWS))
    return FragmentedArray(_registers=placed.reshape(shape), _layout=layout, _is_signed=None)
