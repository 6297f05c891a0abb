"""Products of blocks for the causal filters' kernel: those of `plgpu.wgmma`, in fewer operations to compile.

A product of two 64 x 64 blocks is four instructions of the matrix units, that add to the same registers. Pallas makes
each a piece of assembly, which takes the 32 numbers of a sum and gives them back one by one, and lets a left operand in
registers through another piece before every product. Here a product is one piece, which also says where its operands
lie. The instructions of the matrix units are the same, on the same operands, in the same order; without the other piece
CUDA 13.4's ptxas no longer lets each end before the next, for want of registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.pallas.hopper import SWIZZLE, swizzled

ROWS = 64  # of one wgmma, and of a block
LAYOUT = plgpu.Layout.WGMMA
# The same places with every number on its own: two in one register would be taken apart and put together again while
# the matrix units add to them.
_SUMS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)
_DEPTH = 16  # of bfloat16 numbers in one instruction
_STEPS = ROWS // _DEPTH
_SUMS = ROWS * ROWS // 128  # of a block in each thread
_PAIRS = _DEPTH // 4  # of bfloat16 numbers in each thread, of a left operand of one instruction
_REF = plgpu.RefType(swizzled(jnp.bfloat16))


def added(total: Any, left: Any, right: Any, *, turned: tuple[bool, bool] = (False, False)) -> Any:
    """A sum, or None for 0, with the product of two blocks added, which `ready` waits for.

    The right block is in shared memory, the left one too, or an array of bfloat16 numbers. Those `turned` are in shared
    memory and multiplied as their transposes. A product is a group of its own among those that are under way.
    """
    sums = [] if total is None else [total]
    in_registers = isinstance(left, jax.Array)  # a part of shared memory is none

    @plgpu.inline_mgpu(
        arg_types=([_SUMS_LAYOUT] * len(sums), LAYOUT if in_registers else _REF, _REF),
        return_type=_sums_struct(_SUMS_LAYOUT),
    )
    def emit(_: Any, sums: Any, left: Any, right: Any) -> Any:
        numbers = list(sums[0].registers.flat) if sums else [_zero()] * _SUMS
        lefts = _pairs(left) if in_registers else [_address(left)]
        # Registers that something else wrote have to be there first.
        fence = in_registers or not sums
        return _fragments(_product(numbers, lefts, _address(right), turned, fence=fence), _SUMS_LAYOUT)

    return emit(sums, left, right)


def ready(sums: Sequence[Any], later: int) -> tuple[Any, ...]:
    """The sums as arrays in WGMMA's layout, when no more than the `later` last products are under way."""

    @plgpu.inline_mgpu(arg_types=[_SUMS_LAYOUT] * len(sums), return_type=[_sums_struct(LAYOUT)] * len(sums))
    def emit(_: Any, *sums: Any) -> Any:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        wait = f"wgmma.wait_group.sync.aligned {later};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], wait, "", has_side_effects=True)
        numbers = [list(total.registers.flat) for total in sums]
        return [
            _fragments([utils.vector_concat(own[i : i + 2]) for i in range(0, _SUMS, 2)], LAYOUT) for own in numbers
        ]

    return tuple(emit(*sums))


def _sums_struct(layout: Any) -> Any:
    return plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.float32, layout=layout)


def _product(sums: list[Any], left: list[Any], right: Any, turned: tuple[bool, bool], *, fence: bool) -> list[Any]:
    """A product and the end of its group: the sums as they will be."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    in_registers = len(left) > 1
    first = 2 * _SUMS  # operand: they follow the sums as they are given back, and as they are taken
    # The sign of either operand, and whether it is turned from how the matrix units like it, which one in registers
    # cannot be: numbers that are summed over side by side.
    flags = ", ".join(["1", "1", *([] if in_registers else [str(int(turned[0]))]), str(int(not turned[1]))])
    text = ["{ .reg .pred add; .reg .b32 place;", f".reg .b64 left<{_STEPS}>, right<{_STEPS}>;"]
    text += _descriptors("right", first + len(left), side_by_side=turned[1])
    text += [] if in_registers else _descriptors("left", first, side_by_side=not turned[0])
    text += ["setp.ne.b32 add, 1, 0;", *(["wgmma.fence.sync.aligned;"] if fence else [])]
    to = ", ".join(f"${i}" for i in range(_SUMS))
    for step in range(_STEPS):
        pairs = ", ".join(f"${first + _PAIRS * step + i}" for i in range(_PAIRS))
        own = f"{{{pairs}}}" if in_registers else f"left{step}"
        kind = f"wgmma.mma_async.sync.aligned.m{ROWS}n{ROWS}k{_DEPTH}.f32.bf16.bf16"
        text.append(f"{kind} {{{to}}}, {own}, right{step}, add, {flags};")
    text.append("wgmma.commit_group.sync.aligned; }")
    constraints = ["=f"] * _SUMS + [str(i) for i in range(_SUMS)] + ["r"] * (len(left) + 1)
    number = ir.VectorType.get((1,), ir.F32Type.get())
    made: Any = llvm.inline_asm(
        llvm.StructType.get_literal([number] * _SUMS),
        [*sums, *left, right],
        "\n".join(text),
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, made, [i]) for i in range(_SUMS)]


_TILE = 8 * SWIZZLE  # bytes of the eight rows that are swizzled together; a block is a stack of such tiles


def _descriptors(name: str, operand: int, *, side_by_side: bool) -> list[str]:
    """PTX that says for each of a product's instructions where its part of a block lies: {name}0 to {name}3.

    Of the block this operand is the address. `side_by_side`: numbers that are summed over lie in a row; else in a
    column. The words are those of PTX's "matrix descriptor" for wgmma, all in units of 16 bytes: where the part
    begins (bits 0 to 13), how far from one tile to the next to the side (16 to 29), of which a row is one, and down
    (32 to 45); 1 in bits 62 and 63 is a swizzle of 128 bytes.
    """
    aside = 0 if side_by_side else _TILE  # never gone, and what Pallas says
    further = _DEPTH * (2 if side_by_side else SWIZZLE)  # bytes from one instruction's part to the next's
    low, high = aside // 16 << 16, _TILE // 16 | 1 << 30
    return [
        f"bfe.u32 place, ${operand}, 4, 14; or.b32 place, place, {low}; mov.b64 {name}0, {{place, {high}}};",
        *(f"add.s64 {name}{step}, {name}0, {step * further // 16};" for step in range(1, _STEPS)),
    ]


def _address(block: Any) -> Any:
    """Of a block in shared memory."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(block))


def _pairs(block: Any) -> list[Any]:
    """A block's registers, of two bfloat16 numbers each, in the order in which the instructions take them."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32 = ir.IntegerType.get_signless(32)
    parts = [block[:, at : at + _DEPTH].registers.flat for at in range(0, ROWS, _DEPTH)]
    return [llvm.bitcast(i32, pair) for part in parts for pair in part]


def _zero() -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    number = ir.F32Type.get()
    kind = ir.VectorType.get((1,), number)
    return llvm.ConstantOp(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(number, 0.0))).result


def _fragments(registers: list[Any], layout: Any) -> Any:
    from jax.experimental.mosaic.gpu import FragmentedArray

    placed = np.empty(len(registers), object)
    placed[:] = registers
    kind: Any = layout.to_mgpu()
    return FragmentedArray(_registers=placed.reshape(kind.registers_shape((ROWS, ROWS))), _layout=kind, _is_signed=None)
