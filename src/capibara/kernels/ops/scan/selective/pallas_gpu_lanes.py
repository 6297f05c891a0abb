"""Sums over the threads of a warp, many at a time, in a Hopper kernel's registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP = 128
WARP = 32


def one_a_thread() -> Any:
    """The layout of a line of 128 numbers of which every thread of a warpgroup has one."""
    return plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def warp_sums(values: Sequence[Any]) -> Any:
    """Of 32 lines of 128 numbers, one a thread: line i summed over each warp, in the warp's thread i.

    At each of five turns a thread sends half of what it has to the thread whose number differs in one bit, and adds
    what it gets to the other half: 31 numbers cross, where a sum by itself would take five for each line.
    """
    from jax.experimental.mosaic.gpu import FragmentedArray, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    assert len(values) == WARP
    layout = one_a_thread()
    line = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * WARP, return_type=line)
    def exchange(_: Any, *lines: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        thread = utils.thread_idx()
        held = [vector.extract(v.registers[0], dynamic_position=[], static_position=[0]) for v in lines]
        while len(held) > 1:
            bit = len(held) // 2
            masked = arith.andi(thread, utils.c(bit, i32))
            upper = arith.cmpi(arith.CmpIPredicate.ne, masked, utils.c(0, i32))
            kept = []
            for low, high in zip(held[:bit], held[bit:], strict=True):
                sent = utils.shfl_bfly(arith.select(upper, low, high), bit)
                kept.append(arith.addf(arith.select(upper, high, low), sent))
            held = kept
        registers = lines[0].registers.copy()
        registers[0] = vector.from_elements(registers[0].type, held)
        return FragmentedArray(_registers=registers, _layout=lines[0].layout, _is_signed=None)

    return exchange(*values)
