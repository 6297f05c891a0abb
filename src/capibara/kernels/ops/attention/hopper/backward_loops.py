"""Two of the kernels of Hopper's attention backward: for head_dim up to 128, and for more.

The gradients of a program's keys and values stay in registers until the end; a step's dq is added to the sums in
memory by the copy engine.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention.hopper.backward_steps import (
    COMPUTE_REGISTERS,
    FETCH_REGISTERS,
    WGMMA_ROWS,
    HopperGradConfig,
    Lines,
    Loop,
    Pairs,
    Plan,
    Visit,
    Walk,
    add_to_sums,
    fetch_steps,
    ring_scratch,
    sums_dtype,
    swizzled_for,
)
from capibara.kernels.ops.attention.hopper.masking import LAYOUT
from capibara.kernels.ops.attention.hopper.panels import Columns, WholeColumns, contract, multiply
from capibara.kernels.pallas.hopper import load

NARROW_TILE = 2 * WGMMA_ROWS


def narrow_scratch(config: HopperGradConfig, head: Columns, dtype: Any, lines: Lines) -> dict[str, Any]:
    return ring_scratch(config, head, dtype, lines, NARROW_TILE, key_tiles=2) | {
        "k": head.scratch((2,), WGMMA_ROWS, dtype),
        "v": head.scratch((2,), WGMMA_ROWS, dtype),
        # Two of them: a warpgroup writes the next step's while the other still reads this one's.
        "ds": swizzled_for(head, (2, 2, WGMMA_ROWS, config.block_q), dtype),
        "dq": head.narrowed(head.part_width).scratch((2,), 64, sums_dtype(config, dtype)),
    }


def narrow_parts(config: HopperGradConfig) -> int:
    """How the warpgroups share a step's dq: 64 rows each, or half of the columns each."""
    return 1 if config.block_q == 128 else 2


def narrow_kernel(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """head_dim up to 128: two warpgroups of 64 keys each.

    Only the gradient of the queries needs both warpgroups' scores, which they share through shared memory.
    """
    refs = dict(zip(names, args, strict=True))
    head = NARROW.columns(plan.config, refs["q"].shape[-1], refs["q"].dtype, (plan.length, plan.keys))

    def run_warpgroups(allocated: dict[str, Any]) -> None:
        smem = allocated | {name: head.tiles(allocated[name]) for name in ("q", "do", "k", "v")}
        smem["dq"] = head.narrowed(head.part_width).tiles(allocated["dq"])
        walk = Walk(plan, refs)
        warpgroup, first_key = walk.warpgroup, walk.first_key
        pairs = Pairs(walk, refs, smem)

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            for half in range(2):
                at = walk.keys_at(pl.ds(first_key + half * WGMMA_ROWS, WGMMA_ROWS))
                smem["k"].at(half).fetch(refs["k"], at, smem["kv_arrived"])
                smem["v"].at(half).fetch(refs["v"], at, smem["kv_arrived"])
            pairs.fetch_keys(smem["kv_arrived"])
            fetch_steps(walk, pairs, refs, smem)

        @pl.when(warpgroup < 2)
        def _() -> None:
            _narrow_compute(plan, head, refs, smem, walk, pairs)

    specs = narrow_scratch(plan.config, head, refs["q"].dtype, Lines.of(refs, plan.config))
    pl.run_scoped(run_warpgroups, specs, collective_axes="warpgroup")


def _narrow_compute(
    plan: Plan, head: Columns, refs: dict[str, Any], smem: dict[str, Any], walk: Walk, pairs: Pairs
) -> None:
    block_q, num_stages, dtype = plan.block_q, plan.config.stages, refs["q"].dtype
    warpgroup, by_rows = walk.warpgroup, head.parts == 1
    # Where columns come whole the next step's scores are made while a step's dq leaves. In panels a sum that several
    # products add to has its zeros written under those in flight, and the compiler then makes every product wait.
    ahead = isinstance(head, WholeColumns)
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    my_first_key = walk.first_key + warpgroup * WGMMA_ROWS

    def start_scores(s_ref: Any, done: Any, zero: Any) -> None:
        """Of the visit before which there are `done`: of none, they are of what lies there, and nobody reads them."""
        slot = lax.rem(done, num_stages)
        pl.when(done < walk.visits)(lambda: plgpu.barrier_wait(smem["q_arrived"].at[slot]))
        contract(s_ref, smem["k"].at(warpgroup + zero).whole(), smem["q"].at(slot).whole())

    def step(visit: Visit, masked: bool, dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
        done = visit.done
        slot, half = lax.rem(done, num_stages), lax.rem(done, 2)
        first_row = visit.first_row
        q, do = smem["q"].at(slot).whole(), smem["do"].at(slot).whole()
        zeros = plan.hidden_zeros(head.width, done, 3)
        my_keys, my_values = (smem[x].at(warpgroup + zero).whole() for x, zero in zip("kv", zeros, strict=False))

        def scores(dp_ref: Any) -> Any:
            if not ahead:
                plgpu.barrier_wait(smem["q_arrived"].at[slot])
                contract(s_ref, my_keys, q)
            plgpu.barrier_wait(smem["do_arrived"].at[slot])
            contract(dp_ref, my_values, do)
            # The exponentials run under the second product, what follows under the third.
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=None if ahead else len(do))
            p, slope = pairs.probabilities(s, load(smem["lse"].at[slot], LAYOUT.reduce(0)))
            if masked:
                p = jnp.where(pairs.allowed(my_first_key, first_row, slot), p, 0.0)
            p = pairs.dropped(p, my_first_key, slot)
            p16 = pairs.weights(p).astype(dtype)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            multiply(dv_ref, p16, do)
            ds = pairs.d_scores(p, dp, load(smem["delta"].at[slot], LAYOUT.reduce(0)))
            return (ds if slope is None else ds * slope).astype(dtype)

        ds = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, block_q), jnp.float32))
        for ref in smem["ds"].values():
            ref[half, warpgroup] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["both_here"])
        plgpu.wgmma_wait(0)  # dv: this step's d_out may go
        plgpu.barrier_arrive(smem["do_drained"].at[slot])
        multiply(dk_ref, ds, q)
        plgpu.barrier_wait(smem["both_here"])

        def d_queries(dq_ref: Any) -> Any:
            for tile in range(2):
                tile_ds = {width: ref.at[half, tile] for width, ref in smem["ds"].items()}
                if by_rows:
                    tile_ds = {width: ref.at[:, pl.ds(warpgroup * 64, 64)] for width, ref in tile_ds.items()}
                transposed = {width: ref.transpose((1, 0)) for width, ref in tile_ds.items()}
                tile_keys = smem["k"].at(tile + zeros[2])
                multiply(dq_ref, transposed, tile_keys.part(head.place(0 if by_rows else warpgroup)))
            # The next step's scores start from zero; cleared here, under the products in flight.
            s_ref[...] = plgpu.layout_cast(jnp.full((WGMMA_ROWS, block_q), 0, jnp.float32), LAYOUT)
            if not ahead:
                return dq_ref[...]
            start_scores(s_ref, done + 1, zeros[0])
            return plgpu.wgmma_accumulator_load(dq_ref, wait_n=len(q))  # dq leaves under the next scores

        dq = pl.run_scoped(d_queries, plgpu.WGMMAAccumulatorRef((64, head.part_width), jnp.float32))
        plgpu.barrier_arrive(smem["q_drained"].at[slot])
        first_column: Any = warpgroup * head.part_width
        rows = pl.ds(first_row, 64)
        if by_rows:
            rows, first_column = pl.ds(first_row + warpgroup * 64, 64), 0
        at = walk.dq_at(visit.member, rows)
        add_to_sums(smem["dq"].at(warpgroup), plan.summed(dq), refs["dq"], at, first_column)
        if ahead:
            plgpu.wgmma_wait(0)

    def accumulate(dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
        if ahead:
            start_scores(s_ref, walk.first_key * 0, 0)
            plgpu.wgmma_wait(0)
        walk.compute(
            my_first_key, WGMMA_ROWS, lambda visit, masked: step(visit, masked, dk_ref, dv_ref, s_ref), pairs.masks
        )
        dk, dv = dk_ref[...] * plan.scale, pairs.d_values(dv_ref[...])
        at = walk.keys_at(pl.ds(my_first_key, WGMMA_ROWS))
        if plan.adds_keys:
            for value, target in ((dk, "dk"), (dv, "dv")):
                add_to_sums(smem["dq"].at(warpgroup), value, refs[target], at)
            plgpu.wait_smem_to_gmem(0)
            return
        # The other warpgroup's last dq reads this one's keys.
        plgpu.barrier_arrive(smem["both_here"])
        plgpu.barrier_wait(smem["both_here"])
        k_smem.store_whole(dk.astype(dtype))
        v_smem.store_whole(dv.astype(dtype))
        plgpu.commit_smem()
        k_smem.send(refs["dk"], at)
        v_smem.send(refs["dv"], at)
        plgpu.wait_smem_to_gmem(0)

    plgpu.barrier_wait(smem["kv_arrived"])
    k_smem, v_smem = smem["k"].at(warpgroup), smem["v"].at(warpgroup)
    pairs.hide_unseen(my_first_key, k_smem, v_smem)
    d_keys = plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, head.width), jnp.float32)
    # Nothing is in flight where the loop closes: the compiler would make every product of the loop wait.
    pl.run_scoped(accumulate, d_keys, d_keys, plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, block_q), jnp.float32))


WIDE_TILE = WGMMA_ROWS
DQ_COLUMNS = 16  # of dq that leave at a time


def wide_scratch(config: HopperGradConfig, head: Columns, dtype: Any, lines: Lines) -> dict[str, Any]:
    block_q = config.block_q
    # How many pieces of dq a warpgroup has on their way: lines beyond the plain form's leave room for one.
    pieces = 2 if lines == Lines(False, False, 0) else 1
    return ring_scratch(config, head, dtype, lines, WIDE_TILE, key_tiles=1) | {
        # One of each; the first index is where a product's own zero goes.
        "all_keys": head.scratch((1,), WIDE_TILE, dtype),
        "all_values": head.scratch((1,), WIDE_TILE, dtype),
        "ds": swizzled_for(head, (2, WIDE_TILE, block_q), dtype),
        "dq": head.narrowed(DQ_COLUMNS).scratch((2, pieces), block_q, sums_dtype(config, dtype)),
    }


def wide_kernel(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """head_dim from 129 to 256: two warpgroups share 64 keys.

    The gradients of 64 keys and values would fill one warpgroup's registers at this width, so each warpgroup makes one
    half of the columns of every gradient. Both compute all of the scores: two products more than five, and in exchange
    the warpgroups never wait for each other, and probabilities stay in registers.
    """
    refs = dict(zip(names, args, strict=True))
    head = WIDE.columns(plan.config, refs["q"].shape[-1], refs["q"].dtype, (plan.length, plan.keys))

    def run_warpgroups(allocated: dict[str, Any]) -> None:
        smem = allocated | {name: head.tiles(allocated[name]) for name in ("q", "do", "all_keys", "all_values")}
        smem["dq"] = head.narrowed(DQ_COLUMNS).tiles(allocated["dq"])
        walk = Walk(plan, refs)
        warpgroup, first_key = walk.warpgroup, walk.first_key
        pairs = Pairs(walk, refs, smem)
        at_keys = walk.keys_at(pl.ds(first_key, WIDE_TILE))

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            smem["all_keys"].at(0).fetch(refs["k"], at_keys, smem["kv_arrived"])
            smem["all_values"].at(0).fetch(refs["v"], at_keys, smem["kv_arrived"])
            pairs.fetch_keys(smem["kv_arrived"])
            fetch_steps(walk, pairs, refs, smem)

        @pl.when(warpgroup < 2)
        def _() -> None:
            _wide_compute(plan, head, refs, smem, walk, pairs)

    specs = wide_scratch(plan.config, head, refs["q"].dtype, Lines.of(refs, plan.config))
    pl.run_scoped(run_warpgroups, specs, collective_axes="warpgroup")


def _wide_compute(
    plan: Plan, head: Columns, refs: dict[str, Any], smem: dict[str, Any], walk: Walk, pairs: Pairs
) -> None:
    block_q, num_stages, dtype = plan.block_q, plan.config.stages, refs["q"].dtype
    warpgroup, first_key, half_dim = walk.warpgroup, walk.first_key, head.part_width
    all_keys, all_values = smem["all_keys"], smem["all_values"]
    k_smem, v_smem = all_keys.at(0), all_values.at(0)
    plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
    my_part = head.place(warpgroup)

    def step(visit: Visit, masked: bool, dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
        done = visit.done
        slot = lax.rem(done, num_stages)
        first_row = visit.first_row
        q, do = smem["q"].at(slot), smem["do"].at(slot)
        zeros = plan.hidden_zeros(head.width, done, 3)
        my_ds = {width: ref.at[warpgroup + zeros[2]] for width, ref in smem["ds"].items()}

        def scores(dp_ref: Any) -> Any:
            plgpu.barrier_wait(smem["q_arrived"].at[slot])
            contract(s_ref, all_keys.at(zeros[0]).whole(), q.whole())
            plgpu.barrier_wait(smem["do_arrived"].at[slot])
            contract(dp_ref, all_values.at(zeros[1]).whole(), do.whole())
            # The exponentials run under the second product, what follows under the third.
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=head.copies(dtype))
            p, slope = pairs.probabilities(s, load(smem["lse"].at[slot], LAYOUT.reduce(0)))
            if masked:
                p = jnp.where(pairs.allowed(first_key, first_row, slot), p, 0.0)
            p = pairs.dropped(p, first_key, slot)
            p16 = pairs.weights(p).astype(dtype)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            multiply(dv_ref, p16, do.part(my_part))
            ds = pairs.d_scores(p, dp, load(smem["delta"].at[slot], LAYOUT.reduce(0)))
            return (ds if slope is None else ds * slope).astype(dtype)

        ds = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((WIDE_TILE, block_q), jnp.float32))
        for ref in my_ds.values():
            ref[...] = ds
        plgpu.commit_smem()

        def d_queries(dq_ref: Any) -> Any:
            transposed = {width: ref.transpose((1, 0)) for width, ref in my_ds.items()}
            multiply(dq_ref, transposed, all_keys.at(zeros[2]).part(my_part))
            my_queries = q.part(my_part)
            # From memory, where dq wants them too: kept in registers until here, they are more than there are, and the
            # compiler makes every product wait for the one before.
            multiply(dk_ref, my_ds, my_queries)
            # The next step's scores start from zero; cleared here, under the products in flight.
            s_ref[...] = plgpu.layout_cast(jnp.full((WIDE_TILE, block_q), 0, jnp.float32), LAYOUT)
            return plgpu.wgmma_accumulator_load(dq_ref, wait_n=len(my_queries))  # dq leaves under the product for dk

        dq = pl.run_scoped(d_queries, plgpu.WGMMAAccumulatorRef((block_q, half_dim), jnp.float32))
        plgpu.barrier_arrive(smem["do_drained"].at[slot])
        rows = walk.dq_at(visit.member, pl.ds(first_row, block_q))
        pieces = smem["dq"].lead[1]
        columns = range(0, half_dim, DQ_COLUMNS)
        # In turn, over the end of a step too.
        before = lax.rem(done, pieces) * (len(columns) % pieces) if len(columns) % pieces else 0
        for number, column in enumerate(columns):
            turn = number % pieces if len(columns) % pieces == 0 else lax.rem(before + number, pieces)
            piece = smem["dq"].at(warpgroup, turn)
            plgpu.wait_smem_to_gmem(pieces - 1, wait_read_only=True)
            piece.store(plan.summed(dq[:, column : column + DQ_COLUMNS]).astype(refs["dq"].dtype))
            plgpu.commit_smem()
            piece.send(refs["dq"], rows, first_column=warpgroup * half_dim + column, reduction_op="add")
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem["q_drained"].at[slot])

    def meet() -> None:
        plgpu.barrier_arrive(smem["both_here"])
        plgpu.barrier_wait(smem["both_here"])

    def accumulate(dk_ref: Any, dv_ref: Any, s_ref: Any) -> None:
        walk.compute(
            first_key, WIDE_TILE, lambda visit, masked: step(visit, masked, dk_ref, dv_ref, s_ref), pairs.masks
        )
        dk, dv = dk_ref[...] * plan.scale, pairs.d_values(dv_ref[...])
        if plan.adds_keys:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            piece, at = smem["dq"].at(warpgroup, 0), walk.keys_at(pl.ds(first_key, WIDE_TILE))
            for value, target in ((dk, "dk"), (dv, "dv")):
                add_to_sums(piece, value, refs[target], at, warpgroup * half_dim)
            plgpu.wait_smem_to_gmem(0)
            return
        meet()  # the other warpgroup's last products read all of the keys and values
        k_smem.store(dk.astype(dtype), my_part)
        v_smem.store(dv.astype(dtype), my_part)
        plgpu.commit_smem()
        meet()
        # A copy takes whole tiles of rows, so one warpgroup sends the keys and the other the values.
        for sender, source, target in ((0, k_smem, refs["dk"]), (1, v_smem, refs["dv"])):

            @pl.when(warpgroup == sender)
            def _(source: Any = source, target: Any = target) -> None:
                source.send(target, walk.keys_at(pl.ds(first_key, WIDE_TILE)))

        plgpu.wait_smem_to_gmem(0)

    plgpu.barrier_wait(smem["kv_arrived"])
    pairs.hide_unseen(first_key, k_smem, v_smem)
    d_keys = plgpu.WGMMAAccumulatorRef((WIDE_TILE, half_dim), jnp.float32)
    # Nothing is in flight where the loop closes: the compiler would make every product of the loop wait.
    pl.run_scoped(accumulate, d_keys, d_keys, plgpu.WGMMAAccumulatorRef((WIDE_TILE, block_q), jnp.float32))


NARROW = Loop(NARROW_TILE, narrow_parts, narrow_scratch, narrow_kernel)
WIDE = Loop(WIDE_TILE, lambda _: 2, wide_scratch, wide_kernel)  # a half of the columns for each warpgroup
