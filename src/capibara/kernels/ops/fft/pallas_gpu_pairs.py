"""Complex numbers as they lie in memory, taken apart in a Hopper kernel's registers.

With 32-bit numbers a thread has pairs of neighbours: a number's real and imaginary part. Nothing moves between threads;
the columns come out in another order, which the constants of a transform can follow.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout.WGMMA
TURNS = (0, 4, 1, 5, 2, 6, 3, 7)  # column s of eight in registers is column TURNS[s] in memory


def split_pairs(value: Any) -> tuple[Any, Any]:
    """Real and imaginary numbers by turns, [64, 2 n], as two planes [64, n]; column s of each eight is TURNS[s]."""
    from jax.experimental.mosaic.gpu import FragmentedArray
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    rows, columns = value.shape
    plane = plgpu.ShapeDtypeStruct((rows, columns // 2), jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=(plane, plane))
    def split(_: Any, both: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        made = []
        for which in range(2):
            registers = np.empty(both.registers[:, 0::2].shape, object)
            for at in np.ndindex(registers.shape):
                own = (at[0], slice(2 * at[1], 2 * at[1] + 2), *at[2:])
                numbers = [vector.extract(v, dynamic_position=[], static_position=[which]) for v in both.registers[own]]
                registers[at] = vector.from_elements(pair, numbers)
            made.append(FragmentedArray(_registers=registers, _layout=both.layout, _is_signed=None))
        return tuple(made)

    return split(value)
