"""A Hopper kernel that passes a state from chunk to chunk and keeps it at the border of each: one sweep over time.

state = decay · state + leftᵀ · (weights ∘ right). With B and x it is the state that each chunk starts from; with C and
d_out, the last chunk first, it is the gradient of the state that each chunk leaves. As in the forward kernel two
warpgroups have a slice of 64 columns each, the state in their accumulators, and the third fetches.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.scan.ssd.hopper.forward import (
    CHUNK,
    LAYOUT,
    SAID_LAYOUTS,
    SLICE,
    fetch_and_compute,
    launch_over,
)
from capibara.kernels.pallas.hopper import load, store_to_memory, swizzled

WEIGHTS, DECAYS, VECTORS = 0, 1, 2  # one number a row of `right`, and what is left of a state after the chunk


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """What a program is told while it is traced."""

    batch: int
    chunks: int
    slices: int  # of all heads
    slices_of_head: int
    slices_of_group: int
    states: int
    stages: int
    backward: bool

    def chunk(self, turn: Any) -> Any:
        return self.chunks - 1 - turn if self.backward else turn


def _program(*args: Any, plan: SweepPlan, names: tuple[str, ...]) -> None:
    """Set up shared memory and barriers, then run the three warpgroups."""
    refs = dict(zip(names, args, strict=True))
    dtype, stages = refs["right"].dtype, plan.stages
    scratch = {
        "left": plgpu.SMEM((stages, CHUNK, plan.states), dtype, transforms=swizzled(dtype)),
        "right": plgpu.SMEM((stages, 2, CHUNK, SLICE), dtype, transforms=swizzled(dtype)),
        "vectors": plgpu.SMEM((stages, 2, VECTORS, CHUNK), jnp.float32),
        "weighted": plgpu.SMEM((2, CHUNK, SLICE), dtype, transforms=swizzled(dtype)),
        # Two of them: one is on its way to memory while the next is written.
        "border": plgpu.SMEM((2, 2, plan.states, SLICE), dtype, transforms=swizzled(dtype)),
        "arrived": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }

    def compute(smem: dict[str, Any], warpgroup: Any) -> None:
        state = plgpu.WGMMAAccumulatorRef((plan.states, SLICE), jnp.float32)
        pl.run_scoped(functools.partial(_compute, plan, refs, smem, warpgroup), state)

    fetch_and_compute(scratch, functools.partial(_fetch, plan, refs), compute)


def _fetch(plan: SweepPlan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    batch, pair = lax.axis_index("batch"), lax.axis_index("pair")
    group = lax.div(2 * pair, jnp.int32(plan.slices_of_group))

    @pl.loop(0, plan.chunks)
    def _(turn: Any) -> None:
        slot, number = lax.rem(turn, jnp.int32(plan.stages)), plan.chunk(turn)

        @pl.when(turn >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(smem["drained"].at[slot])

        arrived, times = smem["arrived"].at[slot], pl.ds(number * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(refs["left"].at[batch, times, group], smem["left"].at[slot], arrived)
        for mine in range(2):
            part = 2 * pair + mine
            head = lax.div(part, jnp.int32(plan.slices_of_head))
            plgpu.copy_gmem_to_smem(refs["right"].at[batch, times, part], smem["right"].at[slot, mine], arrived)
            plgpu.copy_gmem_to_smem(refs["vectors"].at[batch, head, number], smem["vectors"].at[slot, mine], arrived)


def _compute(plan: SweepPlan, refs: dict[str, Any], smem: dict[str, Any], mine: Any, state: Any) -> None:
    """One slice through every chunk."""
    batch, part = lax.axis_index("batch"), 2 * lax.axis_index("pair") + mine
    head = lax.div(part, jnp.int32(plan.slices_of_head))
    columns = pl.ds(lax.rem(part, jnp.int32(plan.slices_of_head)) * SLICE, SLICE)
    dtype = refs["right"].dtype
    if "first" in refs:
        state[...] = load(refs["first"].at[batch, head, :, columns], LAYOUT, optimized=False)

    def chunk(turn: Any, carry: None) -> None:
        slot, half = lax.rem(turn, jnp.int32(plan.stages)), lax.rem(turn, jnp.int32(2))
        vectors, border = smem["vectors"].at[slot, mine], smem["border"].at[mine, half]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the border before the last has left
        border[...] = state[...].astype(dtype)
        plgpu.barrier_wait(smem["arrived"].at[slot])
        weights = load(vectors.at[WEIGHTS], LAYOUT.reduce(1), optimized=False)
        right = load(smem["right"].at[slot, mine], LAYOUT).astype(jnp.float32)
        weighted = right * lax.broadcast_in_dim(weights, (CHUNK, SLICE), [0])
        smem["weighted"][mine] = weighted.astype(dtype)
        state[...] = state[...] * vectors[DECAYS, 0]
        plgpu.commit_smem()
        plgpu.wgmma(state, smem["left"].at[slot].transpose((1, 0)), smem["weighted"].at[mine])
        plgpu.copy_smem_to_gmem(border, refs["borders"].at[batch, part, plan.chunk(turn)])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem["drained"].at[slot])
        return carry

    lax.fori_loop(0, plan.chunks, chunk, None)
    if "last" in refs:
        store_to_memory(refs["last"].at[batch, head, :, columns], state[...])


def sweep(operands: dict[str, Any], outs: dict[str, Any], plan: SweepPlan) -> list[Any]:
    """The kernel over (batch, pairs of slices)."""
    return launch_over(
        "ssd_states", {"batch": plan.batch, "pair": plan.slices // 2}, _program, operands, outs, plan, SAID_LAYOUTS
    )
