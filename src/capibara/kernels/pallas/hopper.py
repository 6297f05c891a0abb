"""What every Hopper kernel (Pallas, Mosaic GPU) shares: the chips, their shared memory, layouts, JAX's renames."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara import hardware
from capibara.errors import rule_error
from capibara.kernels.pallas import descriptors

descriptors.install()

SMEM_BYTES = 227 * 1024  # what one program may have
SMEM_ALIGNMENT = 1024  # bytes: every array in shared memory starts at a multiple
REDUCTION_BYTES = 2048  # what a kernel that reduces over registers has, unless its compiler parameters say another
SWIZZLE = 128  # bytes
LOG2E = math.log2(math.e)
# How a program is lowered whose every value has its layout said, where it is loaded or made. The other way, which JAX
# takes by default from 0.11 on, infers layouts in Python: ten seconds for a router of 1,800 instructions, which one
# suffices for. Whether the same instructions come of it is to be seen for each kernel (benchmarks/first_calls.py); sums
# over registers, and stores by `ref[...] = x`, may differ.
LANE = plgpu.LoweringSemantics.Lane
UNLISTED = ("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200", "NVIDIA H800")  # Hoppers by names that have no row


@dataclasses.dataclass(frozen=True)
class ProgramsConfig:
    """Of a kernel whose programs share the tiles: how many of them for each multiprocessor of the chip."""

    programs: int = 1

    def __post_init__(self) -> None:
        if self.programs < 1:
            raise rule_error("programs is one or more", self.programs, "use 1")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A row as [lines, width] in memory, handled in pieces of `depth` lines.

    Where the pieces are more than the row, the first `overlap` lines of the last are also the last of the one before.
    """

    lines: int
    width: int
    depth: int

    @property
    def pieces(self) -> int:
        return pl.cdiv(self.lines, self.depth)

    @property
    def overlap(self) -> int:
        return self.pieces * self.depth - self.lines

    @property
    def columns(self) -> int:
        return self.lines * self.width


def named(name: str, program: Callable[..., None], **options: Any) -> Callable[..., None]:
    """A kernel's program with its options, under the name that profiles show it by."""
    bound = functools.partial(program, **options)
    bound.__name__ = name  # type: ignore[attr-defined]  # where plgpu.kernel looks
    return bound


def tanh(x: Any, scale: float) -> Any:
    """tanh(scale x) by an exponential and a root, which the hardware has: a quotient takes it four instructions
    more, and its own tanh is right to 11 bits."""
    root = jax.lax.rsqrt(1.0 + jnp.exp2(x * (2 * scale * LOG2E)))
    return 1.0 - 2.0 * root * root


def reciprocal(x: Any, layout: Any) -> Any:
    """1 / x in a single instruction, right to 1 unit of float32; zero where x is larger than 2^126."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout))
    def emit(_: Any, x: Any) -> Any:
        from jax.experimental.mosaic.gpu import FragmentedArray
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        f32, made = ir.F32Type.get(), np.empty_like(x.registers)
        for place, register in np.ndenumerate(x.registers):
            kind = ir.VectorType(register.type)
            parts = [vector.extract(register, [], [n]) for n in range(math.prod(kind.shape))]
            found: list[Any] = [llvm.inline_asm(f32, [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f") for x in parts]
            made[place] = vector.from_elements(kind, found)
        return FragmentedArray(_registers=made, _layout=x.layout, _is_signed=None)

    return emit(x)


# Less the bits of a float32 they are those of its reciprocal, within 6 %; the first step's two is such a number that it
# leaves 0.15 %.
RECIPROCAL, FIRST_STEP = 0x7EF35200, 2.0015
LARGEST_POWER = 64.0  # of two, of which the quotient in `capped` is taken


def capped(x: Any, scale: float, times: float, layout: Any, by_newton: bool) -> Any:
    """times * tanh(scale x), with two instructions of the unit for special functions, or `by_newton` with one, and six
    of the adders'.

    That unit takes eight cycles for an instruction of a warp, an adder one. By Newton's the quotient is a guess by the
    bits of its divisor and two steps of Newton's, and right to 5e-6 of `times`.
    """
    if not by_newton:
        return times - 2.0 * times * reciprocal(1.0 + jnp.exp2(x * (2 * scale * LOG2E)), layout)
    divisor = 1.0 + jnp.exp2(jnp.minimum(x * (2 * scale * LOG2E), LARGEST_POWER))
    guess = RECIPROCAL - jax.lax.bitcast_convert_type(divisor, jnp.int32)
    quotient = jax.lax.bitcast_convert_type(guess, jnp.float32)
    quotient = quotient * (FIRST_STEP - divisor * quotient)
    quotient = quotient + quotient * (1.0 - divisor * quotient)
    return times - 2.0 * times * quotient


def refuses_chip(device_kind: str) -> str | None:
    chip = hardware.chip_for(device_kind)
    hopper = device_kind.startswith(UNLISTED) if chip is None else chip.architecture == "hopper"
    return None if hopper else f"it is written for Hopper (wgmma); this is {device_kind}"


def refuses_64_bits() -> str | None:
    """Of kernels that count their steps together with places in the grid, which are numbers of 32 bits."""
    return "jax_enable_x64 is on, and its steps are counted in 32 bits" if jax.config.read("jax_enable_x64") else None


def multiprocessors(device_kind: str) -> int:
    """How many programs run side by side, one on each; an unknown chip is taken for an H100 or H200."""
    chip = hardware.chip_for(device_kind)
    return 132 if chip is None else chip.cores_per_chip


def smem_bytes(scratch: Any, reduction_bytes: int = 0) -> int:
    """Shared memory that a kernel with this tree of plgpu.SMEM and plgpu.Barrier takes, as Mosaic counts it.

    Reductions over registers have `reduction_bytes` of their own (see plgpu.CompilerParams); a barrier has eight.

    >>> ring = {"tiles": plgpu.SMEM((3, 64, 10), jnp.bfloat16), "arrived": plgpu.Barrier(num_barriers=3)}
    >>> smem_bytes(ring) == 4 * 1024 + 3 * 8
    True
    """
    used = reduction_bytes
    for ref in jax.tree.leaves(scratch):
        if isinstance(ref, plgpu.Barrier):
            used += 8 * math.prod(ref.num_barriers)  # type: ignore[arg-type]
        elif isinstance(ref, plgpu.RefUnion):
            used += max(smem_bytes(one) for one in ref.refs)
        else:
            used += math.ceil(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize / SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    return used


def swizzled(dtype: Any, width: int = SWIZZLE) -> tuple[Any, ...]:
    """The shared-memory layout that wgmma and TMA agree on, in tiles `width` bytes wide."""
    return plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width)


def swizzle_columns(dtype: Any) -> int:
    """How many numbers of a row a swizzle atom is wide."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def row_tiled(dtype: Any, width: int = SWIZZLE) -> tuple[Any, ...]:
    """A layout of shared memory whose rows can be copied from and to any row of an array.

    A buffer one swizzle atom wide has the same bytes in it as in `swizzled`, in tiles of 8 rows, which only starts at
    multiples of 8.
    """
    return plgpu.TilingTransform((1, width // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width)


# JAX 0.10 wants an index beside the reference; later versions take the reference alone.
_LOAD_INDEX: tuple[Any, ...] = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def load(ref: Any, layout: Any, *, optimized: bool = True) -> Any:
    """The whole of `ref`, in global or shared memory, in registers, spread over the threads as `layout` says.

    `optimized` insists on a way without bank conflicts, which bytes and lines of single numbers do not have.
    """
    return plgpu.load(ref, *_LOAD_INDEX, layout=layout, optimized=optimized)


def store_to_memory(ref: Any, value: Any) -> None:
    """A value in registers to a part of global or shared memory, in whatever pieces its layout has.

    JAX 0.12 insists on whole cache lines, and on banks that do not meet, unless told otherwise; before, there was
    nothing to tell.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def write_rows(copy: Callable[[int], None], first: Any, rows: int, length: int, *, whole: bool) -> None:
    """`copy(n)` of the first n of a tile's `rows`, of which the first is row `first` of an axis that has `length`.

    The copy engine drops what lies past the end of an axis. Not of a tile that is one run of memory (`whole`: it has
    all that a row has, and is not swizzled): JAX takes a plain copy for it, and that ends with the array. Of an axis
    inside of another, the first rows of the next would be written over. There the last tile is copied as far as its
    own goes.
    """
    rest = length % rows
    if not whole or rest == 0:
        copy(rows)
    else:
        pl.when(first + rows <= length)(lambda: copy(rows))
        pl.when(first + rows > length)(lambda: copy(rest))


def sum_of(x: Any, layout: Any, scratch: Any) -> Any:
    """The sum of all of a warpgroup's numbers; see `reduced`."""
    return reduced("add", x, layout, scratch)


def reduced(how: str, x: Any, layout: Any, scratch: Any) -> Any:
    """All of a warpgroup's numbers added ("add"), or the largest of them ("max"), each thread's.

    `scratch` has a number a warp in shared memory: `jnp.sum` has one scratch for a whole program, and refuses where a
    program has several warpgroups.
    """
    splat = plgpu.ShapeDtypeStruct((), x.dtype, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=splat)
    def emit(_: Any, x: Any, scratch: Any) -> Any:
        return x.reduce(how, tuple(range(len(x.shape))), scratch)

    return emit(x, scratch)


HIDDEN_STEPS = 1 << 20


def hidden_zero(step: Any, stage: int = 0) -> Any:
    """0, for a step of a loop below HIDDEN_STEPS, that no compiler knows to be 0, and that depends on the step.

    Added to an index of shared memory that does not change in a loop, it keeps what wgmma is told of that operand, two
    registers for each instruction, from being made before the loop, all at once, and spilled. Stages of their own keep
    it from being made at the beginning of a step. Whether that pays has to be measured: where the registers suffice,
    what is made before the loop is free.
    """
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(splat,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat))
    def emit(_: Any, step: Any) -> Any:
        from jax.experimental.mosaic.gpu import FragmentedArray
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        i32 = ir.IntegerType.get_signless(32)
        how = f"shr.u32 $0, $1, {HIDDEN_STEPS.bit_length() - 1 + stage};"
        made: Any = llvm.inline_asm(i32, [step.registers.item()], how, "=r,r", has_side_effects=True)
        return FragmentedArray.splat(made, (), is_signed=True)

    return emit(step)


def kept_before_wait(values: Any, layout: Any, word: Any) -> None:
    """Keep what makes these registers ahead of the next wait for products, under which it goes on.

    ptxas takes a wait past any arithmetic, up to where its products were started, but past no store: in attention's
    kernels nearly all exponentials came after the product that they were written under. So a word of all the values'
    bits goes to `word`, one in shared memory, for nobody to read: an instruction for every two registers, and one more.
    """

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def emit(_: Any, values: Any, word: Any) -> None:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        words = []
        for register in values.registers.flat:
            kind = ir.VectorType(register.type)
            bits = math.prod(kind.shape) * utils.bitwidth(kind.element_type)
            whole = vector.bitcast(ir.VectorType.get((bits // 32,), i32), register)
            words += [vector.extract(whole, [], [n]) for n in range(bits // 32)]
        operands = [functools.reduce(arith.xori, words), llvm.ptrtoint(i32, utils.memref_ptr(word))]
        store, void = "st.shared.b32 [$1], $0;", ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, operands, store, "r,r,~{memory}", has_side_effects=True)

    emit(values, word)


# A program has sixteen barriers of its own beside those in shared memory. Mosaic takes 0 and one a warpgroup.
_FIRST_TURN = 8
_BOTH = 256  # threads of the two warpgroups that take turns


def give_turn() -> None:
    """By one of a program's first two warpgroups: the other goes on from its `await_turn`. This one does not wait.

    The chip's own barriers, which every thread arrives at by itself: with one in shared memory a warpgroup would have
    to gather its threads first, which cost up to 3 % of an attention kernel on an H200.
    """
    _turn("arrive", mine=False)


def await_turn() -> None:
    """Wait for the other warpgroup's `give_turn`. Each waits as often as the other gives."""
    _turn("sync", mine=True)


def _turn(what: str, mine: bool) -> None:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    @plgpu.inline_mgpu()
    def emit(_: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        me = utils.warpgroup_idx(sync=False)
        first = utils.c(_FIRST_TURN, i32)
        number = arith.addi(first, me if mine else arith.subi(utils.c(1, i32), me))
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [number], f"bar.{what} $0, {_BOTH};", "r", has_side_effects=True)

    emit()
