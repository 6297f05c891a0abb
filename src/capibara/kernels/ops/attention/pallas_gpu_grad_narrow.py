"""The Hopper backward body for head_dim 64 and 128: two warpgroups of 64 keys each.

Scores are computed transposed, keys by queries, so that the probabilities and their gradients are already where the
products with d_out and q want them: in the registers of the warpgroup that owns the keys. Only the gradient of the
queries needs both warpgroups' scores, which they share through shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention import pallas_gpu_grad_pairs as pairs
from capibara.kernels.ops.attention.pallas_gpu_grad_steps import (
    COMPUTE_REGISTERS,
    FETCH_REGISTERS,
    LAYOUT,
    HopperGradConfig,
    Steps,
)
from capibara.kernels.ops.attention.pallas_gpu_grad_walk import Visit, Walk
from capibara.kernels.pallas.hopper import load, swizzled

KEYS = 64  # a warpgroup: the rows of one wgmma
TILE = 2 * KEYS


def smem_bytes(config: HopperGradConfig, head_dim: int, lines: int = 0) -> int:
    """Shared memory of a program; `lines` is what a call adds to the plain form's."""
    keys_and_values = 2 * TILE * head_dim * 2
    ring = 2 * config.stages * config.block_q * (head_dim * 2 + 4)
    shared_scores = 2 * TILE * config.block_q * 2
    return keys_and_values + ring + shared_scores + config.block_q * head_dim * 4 + lines + 1024


def program(*given: Any, steps: Steps, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, given, strict=True))
    q_hbm, dq_hbm = refs["q"], refs["dq"]
    once, each_step = pairs.arrivals(steps, refs)
    block_q, stages = steps.block_q, steps.config.stages
    head_dim, dtype = q_hbm.shape[-1], q_hbm.dtype
    # How the warpgroups share a step's dq: 64 rows each, or half of the columns each.
    by_rows = block_q == 128
    dq_columns = head_dim if by_rows else head_dim // 2

    @functools.partial(
        pl.run_scoped,
        k_smem=plgpu.SMEM((2, KEYS, head_dim), dtype, transforms=swizzled(dtype)),
        v_smem=plgpu.SMEM((2, KEYS, head_dim), dtype, transforms=swizzled(dtype)),
        q_smem=plgpu.SMEM((stages, block_q, head_dim), dtype, transforms=swizzled(dtype)),
        do_smem=plgpu.SMEM((stages, block_q, head_dim), dtype, transforms=swizzled(dtype)),
        lse_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        # Two of them: a warpgroup writes the next step's while the other still reads this one's.
        ds_smem=plgpu.SMEM((2, 2, KEYS, block_q), dtype, transforms=swizzled(dtype)),
        dq_smem=plgpu.SMEM((2, 64, dq_columns), jnp.float32, transforms=swizzled(jnp.float32)),
        kv_arrived=plgpu.Barrier(num_arrivals=4 + once),
        q_arrived=plgpu.Barrier(num_arrivals=2 + each_step, num_barriers=stages),  # the rows and their lines
        do_arrived=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        q_drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both computing warpgroups
        do_drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        both_here=plgpu.Barrier(num_arrivals=2),
        more_smem=pairs.scratch(steps, refs),
        collective_axes="warpgroup",
    )
    def _scoped(
        k_smem: Any, v_smem: Any, q_smem: Any, do_smem: Any, lse_smem: Any, delta_smem: Any, ds_smem: Any,
        dq_smem: Any, kv_arrived: Any, q_arrived: Any, do_arrived: Any, q_drained: Any, do_drained: Any,
        both_here: Any, more_smem: dict[str, Any],
    ) -> None:  # fmt: skip
        walk = Walk(steps, refs)
        batch, warpgroup, first_key = walk.batch, walk.warpgroup, walk.first_key
        tile = pairs.Pairs(walk, refs, more_smem)

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            for half in range(2):
                at = steps.at(batch, walk.kv_head, pl.ds(first_key + half * KEYS, KEYS))
                plgpu.copy_gmem_to_smem(refs["k"].at[at], k_smem.at[half], kv_arrived)
                plgpu.copy_gmem_to_smem(refs["v"].at[at], v_smem.at[half], kv_arrived)
            tile.fetch_keys(kv_arrived)
            sources = (
                (q_hbm, refs["lse"], q_smem, lse_smem, q_arrived, q_drained),
                (refs["d_out"], refs["delta"], do_smem, delta_smem, do_arrived, do_drained),
            )
            walk.fetch(sources, tile.lines)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            my_first_key = first_key + warpgroup * KEYS

            def step_body(visit: Visit, masked: bool, dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
                done = visit.done
                slot, half = lax.rem(done, stages), lax.rem(done, 2)
                first_row = visit.first_row
                queries, d_out = q_smem.at[slot], do_smem.at[slot]
                zeros = steps.zeros(head_dim, done, 3)
                my_keys, my_values = k_smem.at[warpgroup + zeros[0]], v_smem.at[warpgroup + zeros[1]]

                def scores(dp_ref: Any) -> Any:
                    plgpu.barrier_wait(q_arrived.at[slot])
                    plgpu.wgmma(s_ref, my_keys, plgpu.transpose_ref(queries, (1, 0)))
                    plgpu.barrier_wait(do_arrived.at[slot])
                    plgpu.wgmma(dp_ref, my_values, plgpu.transpose_ref(d_out, (1, 0)))
                    # The exponentials run under the second product, what follows under the third.
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    p, slope = steps.probabilities(s, load(lse_smem.at[slot], LAYOUT.reduce(0)))
                    if masked:
                        p = jnp.where(tile.allowed(my_first_key, first_row, slot), p, 0.0)
                    p = tile.dropped(p, my_first_key, slot)
                    p16 = tile.weights(p).astype(dtype)
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                    plgpu.wgmma(dv_ref, p16, d_out)
                    delta = load(delta_smem.at[slot], LAYOUT.reduce(0))
                    ds = tile.d_scores(p, dp, delta)
                    return (ds if slope is None else ds * slope).astype(dtype)

                ds = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((KEYS, block_q), jnp.float32))
                ds_smem[half, warpgroup] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(both_here)
                plgpu.wgmma_wait(0)  # dv: this step's d_out may go
                plgpu.barrier_arrive(do_drained.at[slot])
                plgpu.wgmma(dk_ref, ds, queries)
                plgpu.barrier_wait(both_here)

                def d_queries(dq_ref: Any) -> Any:
                    for part in range(2):
                        part_ds, part_keys = ds_smem.at[half, part], k_smem.at[part + zeros[2]]
                        if by_rows:
                            part_ds = part_ds.at[:, pl.ds(warpgroup * 64, 64)]
                        else:
                            part_keys = part_keys.at[:, pl.ds(warpgroup * dq_columns, dq_columns)]
                        plgpu.wgmma(dq_ref, plgpu.transpose_ref(part_ds, (1, 0)), part_keys)
                    # The next step's scores start from zero; cleared here, under the products in flight.
                    s_ref[...] = plgpu.layout_cast(jnp.full((KEYS, block_q), 0, jnp.float32), LAYOUT)
                    return dq_ref[...]

                dq = pl.run_scoped(d_queries, plgpu.WGMMAAccumulatorRef((64, dq_columns), jnp.float32))
                plgpu.barrier_arrive(q_drained.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_smem[warpgroup] = dq
                plgpu.commit_smem()
                rows, columns = pl.ds(first_row, 64), pl.ds(warpgroup * dq_columns, dq_columns)
                if by_rows:
                    rows, columns = pl.ds(first_row + warpgroup * 64, 64), pl.ds(0, dq_columns)
                place = dq_hbm.at[(*walk.dq_at(visit.member, rows), columns)]
                plgpu.copy_smem_to_gmem(dq_smem.at[warpgroup], place, reduction_op="add")

            plgpu.barrier_wait(kv_arrived)
            tile.hide_unseen(my_first_key, k_smem.at[warpgroup], v_smem.at[warpgroup])

            def accumulate(dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
                def body(visit: Visit, masked: bool) -> None:
                    step_body(visit, masked, dk_ref, dv_ref, s_ref)

                walk.compute(my_first_key, KEYS, body, tile.masks)
                dk, dv = dk_ref[...] * steps.scale, tile.d_values(dv_ref[...])
                # The other warpgroup's last dq reads this one's keys.
                plgpu.barrier_arrive(both_here)
                plgpu.barrier_wait(both_here)
                k_smem[warpgroup] = dk.astype(dtype)
                v_smem[warpgroup] = dv.astype(dtype)
                plgpu.commit_smem()
                at = steps.at(batch, walk.kv_head, pl.ds(my_first_key, KEYS))
                plgpu.copy_smem_to_gmem(k_smem.at[warpgroup], refs["dk"].at[at])
                plgpu.copy_smem_to_gmem(v_smem.at[warpgroup], refs["dv"].at[at])
                plgpu.wait_smem_to_gmem(0)

            mine = plgpu.WGMMAAccumulatorRef((KEYS, head_dim), jnp.float32)
            # Nothing is in flight where the loop closes: the compiler would make every product of the loop wait.
            pl.run_scoped(accumulate, mine, mine, plgpu.WGMMAAccumulatorRef((KEYS, block_q), jnp.float32))
