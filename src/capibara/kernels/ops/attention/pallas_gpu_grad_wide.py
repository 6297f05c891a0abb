"""The Hopper backward body for head_dim 256: two warpgroups share 64 keys.

The gradients of 64 keys and values would fill one warpgroup's registers at this width, so each warpgroup makes one
half of the columns of every gradient. Both compute all of the scores: two products more than five, and in exchange
the warpgroups never wait for each other, and probabilities stay in registers.
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

TILE = 64
PIECE = 16  # columns of dq that leave at a time


def smem_bytes(config: HopperGradConfig, head_dim: int, lines: int = 0) -> int:
    """Shared memory of a program; `lines` is what a call adds to the plain form's."""
    keys_and_values = 2 * TILE * head_dim * 2
    ring = 2 * config.stages * config.block_q * (head_dim * 2 + 4)
    scores = 2 * TILE * config.block_q * 2
    pieces = 2 * _pieces(lines > 0) * config.block_q * PIECE * 4
    return keys_and_values + ring + scores + pieces + lines + 1024


def _pieces(lines: bool) -> int:
    """How many pieces of dq a warpgroup has on their way: lines beyond the plain form's leave room for one."""
    return 1 if lines else 2


def program(*given: Any, steps: Steps, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, given, strict=True))
    q_hbm, dq_hbm = refs["q"], refs["dq"]
    once, each_step = pairs.arrivals(steps, refs)
    block_q, stages = steps.block_q, steps.config.stages
    head_dim, dtype = q_hbm.shape[-1], q_hbm.dtype
    columns_each = head_dim // 2
    more = pairs.scratch(steps, refs)
    pieces = _pieces(bool(more))

    @functools.partial(
        pl.run_scoped,
        # One of each; the first index is where a product's own zero goes.
        all_keys=plgpu.SMEM((1, TILE, head_dim), dtype, transforms=swizzled(dtype)),
        all_values=plgpu.SMEM((1, TILE, head_dim), dtype, transforms=swizzled(dtype)),
        q_smem=plgpu.SMEM((stages, block_q, head_dim), dtype, transforms=swizzled(dtype)),
        do_smem=plgpu.SMEM((stages, block_q, head_dim), dtype, transforms=swizzled(dtype)),
        lse_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        ds_smem=plgpu.SMEM((2, TILE, block_q), dtype, transforms=swizzled(dtype)),
        dq_smem=plgpu.SMEM((2, pieces, block_q, PIECE), jnp.float32, transforms=swizzled(jnp.float32, 64)),
        kv_arrived=plgpu.Barrier(num_arrivals=2 + once),
        q_arrived=plgpu.Barrier(num_arrivals=2 + each_step, num_barriers=stages),  # the rows and their lines
        do_arrived=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        q_drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both computing warpgroups
        do_drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        both_here=plgpu.Barrier(num_arrivals=2),
        more_smem=more,
        collective_axes="warpgroup",
    )
    def _scoped(
        all_keys: Any, all_values: Any, q_smem: Any, do_smem: Any, lse_smem: Any, delta_smem: Any, ds_smem: Any,
        dq_smem: Any, kv_arrived: Any, q_arrived: Any, do_arrived: Any, q_drained: Any, do_drained: Any,
        both_here: Any, more_smem: dict[str, Any],
    ) -> None:  # fmt: skip
        k_smem, v_smem = all_keys.at[0], all_values.at[0]
        walk = Walk(steps, refs)
        batch, warpgroup, first_key = walk.batch, walk.warpgroup, walk.first_key
        tile = pairs.Pairs(walk, refs, more_smem)
        at_keys = steps.at(batch, walk.kv_head, pl.ds(first_key, TILE))

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            plgpu.copy_gmem_to_smem(refs["k"].at[at_keys], k_smem, kv_arrived)
            plgpu.copy_gmem_to_smem(refs["v"].at[at_keys], v_smem, kv_arrived)
            tile.fetch_keys(kv_arrived)
            sources = (
                (q_hbm, refs["lse"], q_smem, lse_smem, q_arrived, q_drained),
                (refs["d_out"], refs["delta"], do_smem, delta_smem, do_arrived, do_drained),
            )
            walk.fetch(sources, tile.lines)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            my_columns = pl.ds(warpgroup * columns_each, columns_each)

            def step_body(visit: Visit, masked: bool, dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
                done = visit.done
                slot = lax.rem(done, stages)
                first_row = visit.first_row
                queries, d_out = q_smem.at[slot], do_smem.at[slot]
                zeros = steps.zeros(head_dim, done, 3)
                my_ds = ds_smem.at[warpgroup + zeros[2]]

                def scores(dp_ref: Any) -> Any:
                    plgpu.barrier_wait(q_arrived.at[slot])
                    plgpu.wgmma(s_ref, all_keys.at[zeros[0]], plgpu.transpose_ref(queries, (1, 0)))
                    plgpu.barrier_wait(do_arrived.at[slot])
                    plgpu.wgmma(dp_ref, all_values.at[zeros[1]], plgpu.transpose_ref(d_out, (1, 0)))
                    # The exponentials run under the second product, what follows under the third.
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    p, slope = steps.probabilities(s, load(lse_smem.at[slot], LAYOUT.reduce(0)))
                    if masked:
                        p = jnp.where(tile.allowed(first_key, first_row, slot), p, 0.0)
                    p = tile.dropped(p, first_key, slot)
                    p16 = tile.weights(p).astype(dtype)
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                    plgpu.wgmma(dv_ref, p16, d_out.at[:, my_columns])
                    delta = load(delta_smem.at[slot], LAYOUT.reduce(0))
                    ds = tile.d_scores(p, dp, delta)
                    return (ds if slope is None else ds * slope).astype(dtype)

                ds = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((TILE, block_q), jnp.float32))
                my_ds[...] = ds
                plgpu.commit_smem()

                def d_queries(dq_ref: Any) -> Any:
                    plgpu.wgmma(dq_ref, plgpu.transpose_ref(my_ds, (1, 0)), all_keys.at[zeros[2], :, my_columns])
                    plgpu.wgmma(dk_ref, ds, queries.at[:, my_columns])
                    # The next step's scores start from zero; cleared here, under the products in flight.
                    s_ref[...] = plgpu.layout_cast(jnp.full((TILE, block_q), 0, jnp.float32), LAYOUT)
                    return plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)  # dq leaves under the product for dk

                dq = pl.run_scoped(d_queries, plgpu.WGMMAAccumulatorRef((block_q, columns_each), jnp.float32))
                plgpu.barrier_arrive(do_drained.at[slot])
                rows = walk.dq_at(visit.member, pl.ds(first_row, block_q))
                for number, column in enumerate(range(0, columns_each, PIECE)):
                    piece = dq_smem.at[warpgroup, number % pieces]
                    plgpu.wait_smem_to_gmem(pieces - 1, wait_read_only=True)
                    piece[...] = dq[:, column : column + PIECE]
                    plgpu.commit_smem()
                    place = dq_hbm.at[(*rows, pl.ds(warpgroup * columns_each + column, PIECE))]
                    plgpu.copy_smem_to_gmem(piece, place, reduction_op="add")
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(q_drained.at[slot])

            plgpu.barrier_wait(kv_arrived)
            tile.hide_unseen(first_key, k_smem, v_smem)

            def accumulate(dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
                def body(visit: Visit, masked: bool) -> None:
                    step_body(visit, masked, dk_ref, dv_ref, s_ref)

                walk.compute(first_key, TILE, body, tile.masks)
                dk, dv = dk_ref[...] * steps.scale, tile.d_values(dv_ref[...])

                def meet() -> None:
                    plgpu.barrier_arrive(both_here)
                    plgpu.barrier_wait(both_here)

                meet()  # the other warpgroup's last products read all of the keys and values
                k_smem.at[:, my_columns][...] = dk.astype(dtype)
                v_smem.at[:, my_columns][...] = dv.astype(dtype)
                plgpu.commit_smem()
                meet()
                # A copy takes whole tiles of rows, so one warpgroup sends the keys and the other the values.
                for sender, smem, hbm in ((0, k_smem, refs["dk"]), (1, v_smem, refs["dv"])):

                    @pl.when(warpgroup == sender)
                    def _(smem: Any = smem, hbm: Any = hbm) -> None:
                        plgpu.copy_smem_to_gmem(smem, hbm.at[steps.at(batch, walk.kv_head, pl.ds(first_key, TILE))])

                plgpu.wait_smem_to_gmem(0)

            mine = plgpu.WGMMAAccumulatorRef((TILE, columns_each), jnp.float32)
            # Nothing is in flight where the loop closes: the compiler would make every product of the loop wait.
            pl.run_scoped(accumulate, mine, mine, plgpu.WGMMAAccumulatorRef((TILE, block_q), jnp.float32))
