"""Numbers to fp8, as they are and transposed, in one pass on Hopper (Pallas, Mosaic GPU).

A unit, some rows of 64 columns, is read once and leaves twice. What is rounded is what was read, or what is made of it
on the way: an activation, or its gradients.

Bytes are hard to transpose: neither the copy engine nor the instructions that move matrices between registers and
shared memory turn anything smaller than 16 bits. The tensor cores do: one times the transposed unit, which they read
from shared memory as it lies, is that unit in float32, in the registers of whoever has its row to write, exactly. What
is made of the operands takes the first ones' place there.

A program is one warpgroup, and some share a multiprocessor: while one rounds, the others' copies are on their way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call
from capibara.kernels.core.varying import out_struct
from capibara.kernels.pallas.hopper import multiprocessors, named, refuses_chip, swizzled
from capibara.precision import FP8_LARGEST

WIDE = 64  # columns of a unit: a row of the tensor cores' layout, in bfloat16
LEAST = 256  # rows and columns: of a single piece Mosaic's descriptor loses the axis
MANY = 1 << 20  # numbers, from which on a pass takes longer than it takes to start one
SHARED_BYTES = 220 << 10  # of a multiprocessor's 227 KiB, for units and what leaves; barriers and the like need some
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)

Make = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class BothWaysConfig:
    """Programs of a multiprocessor, units that each has on their way to it or with it, and rows of a unit."""

    programs: int = 2
    stages: int = 2
    rows: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.programs <= 4 or not 1 <= self.stages <= 4 or self.rows not in (64, 128):
            raise rule_error(
                "programs and stages are 1 to 4, rows 64 or 128", self, "use programs=2, stages=2, rows=128"
            )

    def shared_bytes(self, operands: int, results: int) -> int:
        """Shared memory that the programs of a multiprocessor take."""
        unit = self.rows * WIDE
        return self.programs * (2 * unit * operands * self.stages + 2 * unit * results + 2 * WIDE * WIDE)


def fitting(configs: Sequence[BothWaysConfig], operands: int, results: int) -> list[BothWaysConfig]:
    return [config for config in configs if config.shared_bytes(operands, results) <= SHARED_BYTES]


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    x = call.need(call.op.operands[0])
    if np.dtype(x.dtype).name != "bfloat16":
        return f"it takes bfloat16, not {x.dtype}"
    for axis, length in zip(("rows", "columns"), x.shape, strict=True):
        # Mosaic cuts arrays into pieces of one swizzle atom, 128 bytes, and pads none.
        if length % 128 or length < LEAST:
            return f"there are {length} {axis}; it takes a multiple of 128, {LEAST} or more"
    return None


def both_ways(
    operands: Sequence[jax.Array], factors: jax.Array, make: Make | None, config: BothWaysConfig, dtype: str, name: str
) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """(for each of `factors` the values times it in fp8, and transposed; each value's largest magnitude).

    `make` gives, of float32 pieces of the operands, as many values as there are factors, which are then rounded to the
    operands' type; without it the only operand is the value.
    """
    rows, columns = operands[0].shape
    results = factors.shape[0]
    if config.shared_bytes(len(operands), results) > SHARED_BYTES:
        raise rule_error(
            f"Units take up to {SHARED_BYTES >> 10} KiB of shared memory",
            f"{config} of {len(operands)} operands and {results} results",
            "use fewer programs or stages, or rows=64",
        )
    programs = multiprocessors(current_target().device_kind) * config.programs
    narrow = jnp.dtype(dtype)
    like = operands[0]
    shapes = [out_struct(shape, narrow, like) for _ in range(results) for shape in ((rows, columns), (columns, rows))]
    *made, largest = plgpu.kernel(
        named(name, _program, make=make, operands=len(operands), dtype=narrow, config=config, programs=programs),
        out_type=[*shapes, out_struct((programs, results, WIDE), jnp.float32, like)],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(*operands, factors, jnp.eye(WIDE, dtype=like.dtype))
    return list(zip(made[::2], made[1::2], strict=True)), jnp.max(largest, axis=(0, 2))


def _program(
    *refs: Any, make: Make | None, operands: int, dtype: Any, config: BothWaysConfig, programs: int
) -> None:  # fmt: skip
    read, (factors_hbm, one_hbm), (*written, largest_hbm) = (
        refs[:operands],
        refs[operands : operands + 2],
        refs[operands + 2 :],
    )
    results, stages, tall = factors_hbm.shape[0], config.stages, config.rows
    rows, columns = read[0].shape
    across = columns // WIDE
    units = rows // tall * across
    top = FP8_LARGEST[dtype.name]

    def rounded(value: Any, factor: Any) -> Any:
        return jnp.minimum(jnp.maximum(value * factor, -top), top).astype(dtype)

    def scoped(ring: Any, one: Any, values: Any, turned: Any, largest: Any, arrived: Any, one_arrived: Any) -> None:
        program = lax.axis_index("program")
        mine = lax.div(units - program + (programs - 1), programs)

        def place(number: Any) -> tuple[Any, Any]:
            index = number * programs + program
            row = lax.div(index, across)
            return pl.ds(row * tall, tall), pl.ds((index - row * across) * WIDE, WIDE)

        def fetch(number: Any) -> None:
            slot = lax.rem(number, stages)
            for operand, source in enumerate(read):
                plgpu.copy_gmem_to_smem(source.at[place(number)], ring.at[operand, slot], arrived.at[slot])

        plgpu.copy_gmem_to_smem(one_hbm, one, one_arrived)
        for number in range(stages):
            pl.when(number < mine)(functools.partial(fetch, jnp.int32(number)))
        plgpu.barrier_wait(one_arrived)
        factors = [factors_hbm[result] for result in range(results)]

        def unit(number: Any, seen: tuple[Any, ...]) -> tuple[Any, ...]:
            slot = lax.rem(number, stages)
            plgpu.barrier_wait(arrived.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for first in range(0, tall, 64):
                piece = pl.ds(first, 64)
                found = [ring[operand, slot, piece].astype(jnp.float32) for operand in range(operands)]
                for result, value in enumerate(found if make is None else make(*found)):
                    if make is not None:
                        # Where an operand was: both ways are of one rounding to its type.
                        held = value.astype(ring.dtype)
                        ring[result, slot, piece] = held
                        value = held.astype(jnp.float32)
                    values[result, piece] = rounded(value, factors[result])
            if make is not None:
                plgpu.commit_smem()

            def turn(sums: Any, result: int) -> Any:
                plgpu.wgmma(sums, one, ring.at[result, slot].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                turned[result] = rounded(sums[...], factors[result])
                return jnp.max(jnp.abs(sums[...]), axis=1)

            highest = [
                pl.run_scoped(
                    functools.partial(turn, result=result), plgpu.WGMMAAccumulatorRef((WIDE, tall), jnp.float32)
                )
                for result in range(results)
            ]
            plgpu.commit_smem()
            here, columns_here = place(number)
            for result in range(results):
                plgpu.copy_smem_to_gmem(values.at[result], written[2 * result].at[here, columns_here])
                plgpu.copy_smem_to_gmem(turned.at[result], written[2 * result + 1].at[columns_here, here])
            pl.when(number + stages < mine)(lambda: fetch(number + stages))
            return tuple(jnp.maximum(a, b) for a, b in zip(seen, highest, strict=True))

        nothing = tuple(jnp.zeros(WIDE, jnp.float32) for _ in range(results))
        for result, found in enumerate(lax.fori_loop(0, mine, unit, nothing)):
            largest[result] = found
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(largest, largest_hbm.at[program])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    wide = read[0].dtype
    pl.run_scoped(
        scoped,
        ring=plgpu.SMEM((operands, stages, tall, WIDE), wide, transforms=swizzled(wide)),
        one=plgpu.SMEM((WIDE, WIDE), wide, transforms=swizzled(wide)),
        values=plgpu.SMEM((results, tall, WIDE), dtype, transforms=swizzled(dtype, WIDE)),
        turned=plgpu.SMEM((results, WIDE, tall), dtype, transforms=swizzled(dtype, tall)),
        largest=plgpu.SMEM((results, WIDE), jnp.float32),
        arrived=plgpu.Barrier(num_arrivals=operands, num_barriers=stages),
        one_arrived=plgpu.Barrier(),
    )
