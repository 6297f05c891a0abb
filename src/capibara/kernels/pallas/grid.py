"""Programs of one Hopper kernel that wait for one another, by a board in global memory that all of them read and write.

All programs of the grid have to run at the same time, or those that wait keep the others from ever starting: a grid of
no more programs than the chip has multiprocessors.

A board is an array of int32, zeros before the first kernel that has it, and handed from each kernel to the next. It
begins with the number of kernels that had it, `turn`: counters only ever grow, by as much in every kernel, and nobody
has to set them back. What a program writes for others is a pair of a float32 and the turn that it is of, in one 64-bit
word: who reads it sees by the turn whether the number is this kernel's, and asks again where it is not. No program
waits until what it wrote has arrived, which takes a microsecond, more where the memory is busy.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

PATIENCE = 1 << 26  # looks at the memory, most of a minute, after which it is an error and not a wait
THREADS = 128  # of a warpgroup
LINE = 32  # int32 of a cache line: counters have one each
WORDS = 2  # int32 of a pair
_SPLAT = plgpu.Layout.WG_SPLAT(())


def board_words(events: int, pairs: int) -> int:
    """int32 of a board with so many events and pairs."""
    return (1 + events) * LINE + WORDS * pairs


def pairs(board: Any, events: int, first: Any, count: int) -> Any:
    """A part of the board's pairs; `first` is a multiple of 16."""
    return board.at[pl.ds((1 + events) * LINE + WORDS * first, WORDS * count)]


def turn_of(board: Any) -> Any:
    """Of this kernel, from 1 on; the same for all programs until one of them calls `end_turn`."""
    made = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SPLAT)
    return _emit("ld.relaxed.gpu.global.u32 $0, [$1]; add.u32 $0, $0, 1;", board, returns=made)


def end_turn(board: Any, turn: Any) -> None:
    """By one warpgroup of all programs, after an event that each arrives at when all of its warpgroups have read it."""
    _emit(f"{_FIRST_THREAD} @p st.relaxed.gpu.global.u32 [$0], $1;", board, turn)


def arrive(board: Any, event: int) -> None:
    """One more program has come so far: by a warpgroup, which waits for nothing that it wrote."""
    _emit(f"{_FIRST_THREAD} @p red.relaxed.gpu.global.add.u32 [$0], 1;", board.at[(1 + event) * LINE])


def wait(board: Any, event: int, arrivals: int, turn: Any) -> None:
    """By a warpgroup: go on when so many programs have come so far, as in every turn before. What they announced is
    there, or about to be: `gather` looks."""
    _emit(
        "mov.u32 t, 0;"
        "AGAIN: ld.relaxed.gpu.global.u32 v, [$0]; sub.u32 v, v, $1; setp.ge.s32 p, v, 0; @p bra DONE;"
        f"add.u32 t, t, 1; setp.lt.u32 p, t, {PATIENCE}; @p bra AGAIN; trap;"
        "DONE:",
        board.at[(1 + event) * LINE],
        turn * arrivals,
    )


def announce(row: Any, pairs: Any, turn: Any) -> None:
    """A row of float32 in shared memory, of up to 128 numbers, to as many pairs; by a warpgroup."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    count = math.prod(row.shape)
    text = (
        "{ .reg .pred p; .reg .u32 t, v, s; .reg .u64 a, w; mov.u32 t, %tid.x; and.b32 t, t, 127;"
        f"setp.lt.u32 p, t, {count}; shl.b32 s, t, 2; add.u32 s, s, $0; mul.wide.u32 a, t, 8; add.u64 a, a, $1;"
        "@p ld.shared.u32 v, [s]; mov.b64 w, {v, $2}; @p st.relaxed.gpu.global.b64 [a], w; }"
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SPLAT))
    def emit(_: Any, row: Any, pairs: Any, turn: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        shared = llvm.ptrtoint(i32, utils.memref_ptr(row))
        operands = [shared, utils.memref_ptr(pairs), turn.registers.item()]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r,~{memory}", has_side_effects=True)

    emit(row, pairs, turn)


def gather(pairs: list[Any], shape: tuple[int, ...], layout: Any, turn: Any) -> list[Any]:
    """The numbers of pairs that programs of this turn have announced, or are about to; by a warpgroup.

    Args:
      pairs: references to as many pairs each as the shape has numbers: all are asked for at once.
      shape: of the results.
      layout: of the results; strided over the warpgroup.
      turn: of this kernel.
    """
    from jax.experimental.mosaic.gpu import FragmentedArray, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    each = math.prod(shape) // THREADS
    vec = math.gcd(each, 4)
    made = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    total = len(pairs) * each
    base = total  # operands follow results
    lines = ["{ .reg .pred p; .reg .u32 t, n, d, e; .reg .u64 o;", f".reg .u32 f<{total}>; .reg .u64 a<{len(pairs)}>;"]
    lines += [f"mov.u32 t, %tid.x; and.b32 t, t, 127; mul.wide.u32 o, t, {8 * vec}; mov.u32 n, 0;"]
    lines += [f"add.u64 a{n}, o, ${base + n};" for n in range(len(pairs))]
    lines += ["AGAIN: mov.u32 d, 0;"]
    for number in range(total):
        part, place = divmod(number, each)
        group, inside = divmod(place, vec)
        offset = group * THREADS * 8 * vec + 8 * inside
        if vec > 1 and not inside % 2:
            both = f"{{${number}, f{number}, ${number + 1}, f{number + 1}}}"
            lines += [f"ld.relaxed.gpu.global.v4.u32 {both}, [a{part}+{offset}];"]
        elif vec == 1:
            lines += [f"ld.relaxed.gpu.global.v2.u32 {{${number}, f{number}}}, [a{part}+{offset}];"]
    lines += [f"xor.b32 e, f{n}, ${base + len(pairs)}; or.b32 d, d, e;" for n in range(total)]
    lines += ["setp.eq.u32 p, d, 0; @p bra DONE;"]
    lines += [f"add.u32 n, n, 1; setp.lt.u32 p, n, {PATIENCE}; @p bra AGAIN; trap; DONE: }}"]
    constraints = ",".join(["=&r"] * total + ["l"] * len(pairs) + ["r", "~{memory}"])

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(pairs), _SPLAT), return_type=[made] * len(pairs))
    def emit(_: Any, refs: Any, turn: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        struct = llvm.StructType.get_literal([i32] * total)
        operands = [*(utils.memref_ptr(ref) for ref in refs), turn.registers.item()]
        read: Any = llvm.inline_asm(struct, operands, "\n".join(lines), constraints, has_side_effects=True)
        numbers = [utils.bitcast(llvm.extractvalue(i32, read, [n]), f32) for n in range(total)]
        vector_type = ir.VectorType.get((vec,), f32)
        arrays = []
        for part in range(len(refs)):
            registers = np.empty(each // vec, object)
            for group in range(each // vec):
                some = numbers[part * each + group * vec :][:vec]
                registers[group] = vector.from_elements(vector_type, some)
            arrays.append(FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None))
        return arrays

    return emit(pairs, turn)


_FIRST_THREAD = "mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"


def _emit(code: str, ref: Any, number: Any = None, returns: Any = None) -> Any:
    """PTX about the place of `ref`, and a number that is every thread's; the last operands of it."""
    from jax.experimental.mosaic.gpu import FragmentedArray, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    numbers = [] if number is None else [number]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(_SPLAT for _ in numbers)), return_type=returns)
    def emit(_: Any, ref: Any, *numbers: Any) -> Any:
        # Labels of a block in braces are its own.
        text = "{ .reg .pred p; .reg .u32 t, v; " + code + " }"
        operands = [utils.memref_ptr(ref), *(n.registers.item() for n in numbers)]
        kinds = ["l", *("r" for _ in numbers), "~{memory}"]
        if returns is None:
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, operands, text, ",".join(kinds), has_side_effects=True)
            return None
        i32 = ir.IntegerType.get_signless(32)
        made: Any = llvm.inline_asm(i32, operands, text, ",".join(["=r", *kinds]), has_side_effects=True)
        return FragmentedArray.splat(made, (), is_signed=True)

    return emit(ref, *numbers)
