"""How tiles of a long transform come apart in a Hopper warpgroup's registers, and how they leave them; see `long`.

A complex array has real and imaginary numbers by turns, and a thread of the warpgroup has pairs of neighbours: a
number's real and imaginary part. So nothing moves between threads to take them apart; the columns come out in another
order, TURNS, which the constants of a transform can follow.

Pallas stores what lies in the layout of a product's sum in pieces of four bytes, and transposes by exchanging numbers
between threads. The chip has an instruction for both, which moves four blocks of 8 x 8 at once. In that layout a warp
has 16 rows: block `down` (0 or 1) of 8 rows and block `right` of 8 columns is one register of each lane.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.pallas.hopper import swizzled

LAYOUT = plgpu.Layout.WGMMA
TURNS = (0, 4, 1, 5, 2, 6, 3, 7)  # column s of eight in registers is column TURNS[s] in memory
# Column n of 16 in registers is column QUADS[n] in memory: a thread then has four columns that lie side by side.
QUADS = tuple(4 * (n % 8 // 2) + 2 * (n // 8) + n % 2 for n in range(16))


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
        planes = []
        for which in range(2):
            registers = np.empty(both.registers[:, 0::2].shape, object)
            for at in np.ndindex(registers.shape):
                own = (at[0], slice(2 * at[1], 2 * at[1] + 2), *at[2:])
                numbers = [vector.extract(v, dynamic_position=[], static_position=[which]) for v in both.registers[own]]
                registers[at] = vector.from_elements(pair, numbers)
            planes.append(FragmentedArray(_registers=registers, _layout=both.layout, _is_signed=None))
        return tuple(planes)

    return split(value)


class _Index:
    """Whole numbers of a thread, with the operators that address arithmetic needs."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def thread(cls) -> _Index:
        from jax.experimental.mosaic.gpu import utils

        return cls(utils.thread_idx())

    def _with(self, operation: str, other: _Index | int) -> _Index:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        number = other.value if isinstance(other, _Index) else utils.c(other, ir.IntegerType.get_signless(32))
        return _Index(getattr(arith, operation)(self.value, number))

    def __add__(self, other: _Index | int) -> _Index:
        return self._with("addi", other)

    def __mul__(self, other: int) -> _Index:
        return self._with("muli", other)

    def __mod__(self, other: int) -> _Index:
        return self._with("remui", other)

    def __floordiv__(self, other: int) -> _Index:
        return self._with("divui", other)

    def __xor__(self, other: _Index | int) -> _Index:
        return self._with("xori", other)


def _store_blocks(to: Any, offset: _Index, registers: Any, transposed: bool) -> None:
    """Four blocks of 8 x 8, in the order of (right, down), whose rows go where the lanes say: lane 8 b + r says it, in
    bytes from `to` on, of row r, or column r if they are transposed, of block b."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32 = ir.IntegerType.get_signless(32)
    assert len(registers) == 4
    address = offset + _Index(llvm.ptrtoint(i32, utils.memref_ptr(to)))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [address.value, *(utils.bitcast(register, i32) for register in registers)],
        f"stmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 [$0], {{$1, $2, $3, $4}};",
        "r,r,r,r,r",
        has_side_effects=True,
    )


def _lane_row() -> tuple[_Index, _Index, _Index, _Index]:
    """(warp, row, down, right) of the row that a lane speaks for."""
    thread = _Index.thread()
    lane, warp = thread % 32, (thread // 32) % 4
    return warp, lane % 8, (lane // 8) % 2, lane // 16


def operand_offset(warp: Any, row: Any, down: Any, right: Any) -> Any:
    """Where `keep_operand` puts a column: bytes from the start of [16, 64] in swizzled lines of 128 bytes."""
    return right * 1024 + row * 128 + ((warp * 2 + down) ^ row) * 16


def keep_operand(ref: Any, value: Any) -> None:
    """A bfloat16 value [64, 16], transposed, to shared memory [16, 64], where a product reads it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(value.dtype)), LAYOUT))
    def store(_: Any, to: Any, blocks: Any) -> None:
        _store_blocks(to, operand_offset(*_lane_row()), list(blocks.registers.flat), transposed=True)

    store(ref, value)


def exchanged_offset(
    warp: Any, row: Any, down: Any, right: Any, *, part: int, radix: int, row_bytes: int, in_turns: bool
) -> Any:
    """Where `keep_exchanged` puts a column of a block, in bytes."""
    column = right * 8 + ((row % 2) * TURNS[1] + row // 2 if in_turns else row)
    piece = 32 * radix
    return (column // radix) * row_bytes + (column % radix) * 16 + down * (piece // 2) + (warp + 4 * part) * piece


def keep_exchanged(ref: Any, value: Any, part: int, radix: int, in_turns: bool) -> None:
    """A part of the first pass, bfloat16 [64, 16], to the rows of the second pass that it makes.

    The 16 columns are 16 / radix of those rows, each with `radix` parts. A row has a piece for every 16 rows of this
    value and of the parts before it: two halves, in each the parts, in each 8 numbers. With `in_turns` the columns of
    each eight are in the order of TURNS.
    """
    rows, *rest = ref.shape
    assert rows == 16 // radix, ref.shape
    row_bytes = 2 * math.prod(rest)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def store(_: Any, to: Any, blocks: Any) -> None:
        offset = exchanged_offset(*_lane_row(), part=part, radix=radix, row_bytes=row_bytes, in_turns=in_turns)
        _store_blocks(to, offset, list(blocks.registers.flat), transposed=True)

    store(ref, value)


def result_offset(warp: Any, row: Any, down: Any, right: Any) -> Any:
    """Where `keep_result` puts a row: bytes from the start of [64, 16] in swizzled lines of 32 bytes."""
    return (warp * 2 + down) * 256 + row * 32 + (right ^ (row // 4)) * 16


def keep_result(ref: Any, left: Any, right: Any) -> None:
    """Bfloat16 values [64, 8] side by side in shared memory [64, 16]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(left.dtype, 32)), LAYOUT, LAYOUT))
    def store(_: Any, to: Any, *halves: Any) -> None:
        registers = [register for half in halves for register in half.registers.flat]
        _store_blocks(to, result_offset(*_lane_row()), registers, transposed=False)

    store(ref, left, right)


def store_quads(ref: Any, left: Any, right: Any) -> None:
    """Float32 values [64, 8], together 16 columns in the order of QUADS, to device memory [64, 16]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, LAYOUT))
    def store(_: Any, to: Any, *halves: Any) -> None:
        for down in range(2):
            _store_numbers(to, [half.registers.flat[down] for half in halves], _SIDE_BY_SIDE, down)

    store(ref, left, right)


def store_pairs(ref: Any, re: Any, im: Any) -> None:
    """Planes [64, 8] by turns to device memory [64, 16]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, LAYOUT))
    def store(_: Any, to: Any, *planes: Any) -> None:
        for down in range(2):
            _store_numbers(to, [plane.registers.flat[down] for plane in planes], _BY_TURNS, down)

    store(ref, re, im)


# (register, which number of it), in the order in which four numbers lie in memory.
_SIDE_BY_SIDE = ((0, 0), (0, 1), (1, 0), (1, 1))
_BY_TURNS = ((0, 0), (1, 0), (0, 1), (1, 1))


def _store_numbers(to: Any, registers: Any, order: tuple[tuple[int, int], ...], down: int) -> None:
    """Four numbers of each thread to its row of device memory: four lanes fill 64 bytes."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    (stride, _), _offset = ir.MemRefType(to.type).get_strides_and_offset()
    f32 = ir.F32Type.get()
    thread = _Index.thread()
    lane, warp = thread % 32, (thread // 32) % 4
    at = (warp * 16 + lane // 4 + 8 * down) * stride + (lane % 4) * 4
    begin = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(to))
    numbers = [vector.extract(registers[r], dynamic_position=[], static_position=[which]) for r, which in order]
    four = vector.from_elements(ir.VectorType.get((4,), f32), numbers)
    llvm.store(four, utils.getelementptr(begin, [at.value], f32), alignment=16)
