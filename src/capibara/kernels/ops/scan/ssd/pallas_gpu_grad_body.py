"""The body of the Hopper gradient of state space duality: one chunk of 64 steps, all slices of a part of a group.

The states around every chunk are in memory (`pallas_gpu_states`), so chunks do not wait for each other, and a program
has one of them. Of its three warpgroups one fetches slices of 64 columns. One has the pairs of steps, rows j of x by
columns i of y: the scores B·Cᵀ, their gradient, and the gradient of x. One has what goes through the states, which is
most of the gradients of B and C. What the slices share stays in registers from slice to slice, so sums over heads are
in one order and in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.scan.ssd.pallas_gpu_body import CHUNK, LAYOUT, SLICE, UNSEEN, launch_over
from capibara.kernels.pallas.hopper import load, store_to_memory, swizzled

FETCH_REGISTERS, COMPUTE_REGISTERS = 24, 240
SQUARE = (CHUNK, CHUNK)
# The vectors of a chunk and head: running sums (of log2) of whole numbers and of the rest, twice as one place is read
# in one layout, their powers, the decay to the chunk's end, dt, and D.
WHOLES, PARTS, COLUMN_WHOLES, COLUMN_PARTS, POWERS, AFTER, STEPS, SKIP, VECTORS = 0, 1, 2, 3, 4, 5, 6, 7, 8
# What is summed of a chunk and slice, one number a step: pairs around it, x·dy, (C·state)·dy, x·(B·flow), and of the
# pairs that it is the earlier one of, without dt.
PAIRS, SKIPS, ONWARD, OUTWARD, LEAVING, SUMS = 0, 1, 2, 3, 4, 5


@dataclasses.dataclass(frozen=True)
class GradPlan:
    """What a program is told while it is traced."""

    batch: int
    chunks: int
    parts: int  # of all heads
    slices: int  # of a part
    slices_of_head: int
    parts_of_group: int
    states: int
    stages: int
    has_steps: bool
    has_skip: bool


def smem_bytes(states: int, stages: int) -> int:
    ring = stages * CHUNK * (2 * 2 * SLICE + 4 * VECTORS) + stages * 2 * 2 * states * SLICE
    return 2 * 2 * CHUNK * states + ring + 4 * 2 * CHUNK * SLICE + 4096


def program(*given: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Set up shared memory and barriers, then run the three warpgroups."""
    refs = dict(zip(names, given, strict=True))
    dtype, stages, states = refs["x"].dtype, plan.stages, plan.states

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))

    scratch = {
        "B": tiles(CHUNK, states),
        "C": tiles(CHUNK, states),
        "x": tiles(stages, CHUNK, SLICE),
        "d_out": tiles(stages, CHUNK, SLICE),
        "starts": tiles(stages, states, SLICE),
        "flows": tiles(stages, states, SLICE),
        "vectors": plgpu.SMEM((stages, VECTORS, CHUNK), jnp.float32),
        "later": tiles(*SQUARE),
        # Two of them: one is written while the other is read.
        "pairs": tiles(2, *SQUARE),
        "dx": tiles(CHUNK, SLICE),
        "shared": plgpu.Barrier(num_arrivals=2),
        "arrived": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "made": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "used": plgpu.Barrier(num_arrivals=1, num_barriers=2),
    }

    def scoped(*made: Any) -> None:
        smem = dict(zip(scratch, made, strict=True))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            _fetch(plan, refs, smem)

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _pairs(plan, refs, smem)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            tall = plgpu.WGMMAAccumulatorRef((CHUNK, states), jnp.float32)
            pl.run_scoped(functools.partial(_states, plan, refs, smem), tall, tall)

    pl.run_scoped(scoped, *scratch.values(), collective_axes="warpgroup")


def _place() -> tuple[Any, Any, Any]:
    return lax.axis_index("batch"), lax.axis_index("part"), lax.axis_index("chunk")


def _fetch(plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    batch, part, number = _place()
    times, group = pl.ds(number * CHUNK, CHUNK), lax.div(part, jnp.int32(plan.parts_of_group))
    for name in ("B", "C"):
        plgpu.copy_gmem_to_smem(refs[name].at[batch, times, group], smem[name], smem["shared"])

    @pl.loop(0, plan.slices)
    def _(turn: Any) -> None:
        slot = lax.rem(turn, jnp.int32(plan.stages))

        @pl.when(turn >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(smem["drained"].at[slot])

        arrived, mine = smem["arrived"].at[slot], part * plan.slices + turn
        head = lax.div(mine, jnp.int32(plan.slices_of_head))
        for name in ("x", "d_out"):
            plgpu.copy_gmem_to_smem(refs[name].at[batch, times, mine], smem[name].at[slot], arrived)
        plgpu.copy_gmem_to_smem(refs["vectors"].at[batch, head, number], smem["vectors"].at[slot], arrived)
        for name in ("starts", "flows"):
            plgpu.copy_gmem_to_smem(refs[name].at[batch, mine, number], smem[name].at[slot], arrived)


class _Slice:
    """What has arrived of one slice, and where its sums go."""

    def __init__(self, plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any], turn: Any) -> None:
        batch, part, number = _place()
        mine, slot = part * plan.slices + turn, lax.rem(turn, jnp.int32(plan.stages))
        plgpu.barrier_wait(smem["arrived"].at[slot])
        self.number, self.mine = number, mine
        self._drained = smem["drained"].at[slot]
        self._sums, self.through = refs["sums"].at[batch, mine, number], refs["through"].at[batch, mine, number]
        self._vectors = smem["vectors"].at[slot]
        self.x, self.d_out, self.start, self.flow = (smem[n].at[slot] for n in ("x", "d_out", "starts", "flows"))

    def wide(self, tile: Any) -> Any:
        """A tile in float32. It is read again at each use: held over a product, it would take too many registers."""
        return load(tile, LAYOUT).astype(jnp.float32)

    def vector(self, which: int, axis: int) -> Any:
        """One number a row (axis 0) or a column (axis 1), over a tile."""
        read = load(self._vectors.at[which], LAYOUT.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(read, SQUARE, [axis])

    def decays(self) -> Any:
        """From the steps of rows to those of columns; 0 against time."""
        row, column = _numbers()
        wholes = self.vector(COLUMN_WHOLES, 1) - self.vector(WHOLES, 0)
        parts = self.vector(COLUMN_PARTS, 1) - self.vector(PARTS, 0)
        return jnp.exp2(jnp.where(column >= row, wholes + parts, UNSEEN))

    def store(self, which: int, tile: Any) -> None:
        store_to_memory(self._sums.at[which], tile.sum(axis=1))

    def done(self) -> None:
        plgpu.barrier_arrive(self._drained)


def _numbers() -> tuple[Any, Any]:
    row, column = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=LAYOUT) for axis in (0, 1))
    return row, column


def _square() -> Any:
    return plgpu.WGMMAAccumulatorRef(SQUARE, jnp.float32)


def _zeros() -> Any:
    return plgpu.layout_cast(jnp.full(SQUARE, 0, jnp.float32), LAYOUT)


def _pairs(plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    """Rows are steps j of x, columns steps i of y: the gradients of x and of the scores, and each pair's product."""
    dtype = refs["x"].dtype
    batch, _, number = _place()
    plgpu.barrier_wait(smem["shared"])

    def multiply(sums: Any) -> Any:
        plgpu.wgmma(sums, smem["B"], plgpu.transpose_ref(smem["C"], (1, 0)))
        return sums[...]

    scores = pl.run_scoped(multiply, _square())

    def one(turn: Any, d_scores: Any) -> Any:
        now, half = _Slice(plan, refs, smem, turn), lax.rem(turn, jnp.int32(2))

        def multiply(meet: Any, reached: Any) -> Any:
            plgpu.wgmma(meet, now.x, plgpu.transpose_ref(now.d_out, (1, 0)))
            plgpu.wgmma(reached, smem["B"], now.flow)
            decays = now.decays()
            weights = decays * scores
            if plan.has_steps:
                decays = decays * now.vector(STEPS, 0)
            found = plgpu.wgmma_accumulator_load(meet, wait_n=1)
            now.store(LEAVING, weights * found)
            d_pairs = decays * found

            @pl.when(turn >= 2)
            def _() -> None:
                plgpu.barrier_wait(smem["used"].at[half])

            smem["pairs"][half] = (d_pairs * scores).astype(dtype)
            leaving = plgpu.wgmma_accumulator_load(reached, wait_n=0)
            reached[...] = leaving * now.vector(AFTER, 0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem["made"].at[half])
            plgpu.wgmma(reached, weights.astype(dtype), now.d_out)
            now.store(OUTWARD, now.wide(now.x) * leaving)
            return d_pairs, plgpu.wgmma_accumulator_load(reached, wait_n=0)

        d_pairs, dx = pl.run_scoped(multiply, _square(), _square())
        if plan.has_steps:
            dx = dx * now.vector(STEPS, 0)
        if plan.has_skip:
            dx = dx + now.wide(now.d_out) * now.vector(SKIP, 0)
        now.done()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the slice before has left
        smem["dx"][...] = dx.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["dx"], refs["dx"].at[batch, pl.ds(number * CHUNK, CHUNK), now.mine])
        return d_scores + d_pairs

    d_scores = lax.fori_loop(0, plan.slices, one, _zeros())
    half = plan.slices % 2
    if plan.slices >= 2:
        plgpu.barrier_wait(smem["used"].at[half])
    smem["pairs"][half] = d_scores.astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem["made"].at[half])


def _states(plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any], d_b: Any, d_c: Any) -> None:
    """The gradients of B and C, what passes each step, and what reaches each from the state before the chunk."""
    dtype = refs["x"].dtype
    row, column = _numbers()
    smem["later"][...] = jnp.where(column >= row, 1.0, 0.0).astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(smem["shared"])

    def one(turn: Any, carry: None) -> None:
        now, half = _Slice(plan, refs, smem, turn), lax.rem(turn, jnp.int32(2))
        to_end = now.vector(AFTER, 0)
        if plan.has_steps:
            to_end = to_end * now.vector(STEPS, 0)

        def through(carried: Any) -> None:
            plgpu.wgmma(carried, smem["C"], now.start)
            faded = (now.wide(now.d_out) * now.vector(POWERS, 0)).astype(dtype)
            plgpu.wgmma(d_c, faded, plgpu.transpose_ref(now.start, (1, 0)))
            weighted = (now.wide(now.x) * to_end).astype(dtype)
            plgpu.wgmma(d_b, weighted, plgpu.transpose_ref(now.flow, (1, 0)))
            if plan.has_skip:
                now.store(SKIPS, now.wide(now.x) * now.wide(now.d_out))
            now.store(ONWARD, now.wide(now.d_out) * plgpu.wgmma_accumulator_load(carried, wait_n=2))

        pl.run_scoped(through, _square())
        for first in range(0, plan.states, CHUNK):
            rows = pl.ds(first, CHUNK)
            both = now.wide(now.start.at[rows]) * now.wide(now.flow.at[rows])
            store_to_memory(now.through.at[rows], both.sum(axis=1))

        def passing(sums: Any) -> None:
            # Of each pair to every step after j up to i: over i by the product, over j by the sum.
            plgpu.barrier_wait(smem["made"].at[half])
            plgpu.wgmma(sums, smem["later"], plgpu.transpose_ref(smem["pairs"].at[half], (1, 0)))
            row, column = _numbers()
            now.store(PAIRS, jnp.where(column < row, plgpu.wgmma_accumulator_load(sums, wait_n=0), 0.0))

        pl.run_scoped(passing, _square())
        plgpu.barrier_arrive(smem["used"].at[half])
        now.done()
        return carry

    lax.fori_loop(0, plan.slices, one, None)
    half = plan.slices % 2
    plgpu.barrier_wait(smem["made"].at[half])
    d_scores = smem["pairs"].at[half]
    plgpu.wgmma(d_b, d_scores, smem["C"])
    plgpu.wgmma(d_c, plgpu.transpose_ref(d_scores, (1, 0)), smem["B"])
    _store_shared(refs["dB"], d_b)
    _store_shared(refs["dC"], d_c)


def _store_shared(ref: Any, sums: Any) -> None:
    batch, part, number = _place()
    store_to_memory(ref.at[batch, pl.ds(number * CHUNK, CHUNK), part], sums[...].astype(ref.dtype))


def launch(operands: dict[str, Any], outs: dict[str, Any], plan: GradPlan) -> list[Any]:
    """The kernel over (batch, parts of groups, chunks)."""
    return launch_over({"batch": plan.batch, "part": plan.parts, "chunk": plan.chunks}, program, operands, outs, plan)
