"""A third kernel of Hopper's attention backward, for head_dim from 129 to 256: five products, of divided roles.

Two warpgroups share a tile of 64 keys. The first makes the scores of a step and their probabilities, the second the
gradients of the probabilities and of the scores; each hands its half to the other through shared memory. Of the
gradients of keys, values and queries, each makes one half of the columns. No product is made twice, and none reads
shared memory faster than the chip does; in exchange the warpgroups wait for one another twice a step.

Whoever makes the gradients of the scores knows of the scores only the probabilities, rounded to the operands' type: a
soft cap and dropout, which need more, stay with the other kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
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
from capibara.kernels.pallas import hopper
from capibara.kernels.pallas.hopper import HIDDEN_STEPS, load, swizzled

TILE = WGMMA_ROWS
SCORES, GRADIENTS, FETCH = range(3)  # the warpgroups


def divided_scratch(config: HopperGradConfig, head: Columns, dtype: Any, lines: Lines) -> dict[str, Any]:
    block_q = config.block_q
    if head.part_width % config.dq_columns:
        rule = "dq_columns divides a half of the head's columns"
        raise rule_error(rule, f"{config.dq_columns} of {head.part_width}", "use 16")
    return ring_scratch(config, head, dtype, lines, TILE, key_tiles=1) | {
        "dq": head.narrowed(config.dq_columns).scratch((2,), block_q, sums_dtype(config, dtype)),
        # One of each; the first index is where a product's own zero goes.
        "all_keys": head.scratch((1,), TILE, dtype),
        "all_values": head.scratch((1,), TILE, dtype),
        "p": plgpu.SMEM((TILE, block_q), dtype, transforms=swizzled(dtype)),
        "ds": swizzled_for(head, (1, TILE, block_q), dtype),
        # Each also says that what the other wrote before is free to be written over: who has handed over a step's
        # probabilities is done with the gradients of the scores before, and the other way round.
        "p_ready": plgpu.Barrier(num_arrivals=1),
        "ds_ready": plgpu.Barrier(num_arrivals=1),
    }  # fmt: skip


def divided_kernel(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, args, strict=True))
    config, dtype = plan.config, refs["q"].dtype
    head = DIVIDED.columns(config, refs["q"].shape[-1], dtype, (plan.length, plan.keys))

    def run_warpgroups(allocated: dict[str, Any]) -> None:
        smem = allocated | {name: head.tiles(allocated[name]) for name in ("q", "do", "all_keys", "all_values")}
        smem["dq"] = head.narrowed(config.dq_columns).tiles(allocated["dq"])
        walk = Walk(plan, refs)
        pairs = Pairs(walk, refs, smem)
        at_keys = walk.keys_at(pl.ds(walk.first_key, TILE))

        @pl.when(walk.warpgroup == FETCH)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            smem["all_keys"].at(0).fetch(refs["k"], at_keys, smem["kv_arrived"])
            smem["all_values"].at(0).fetch(refs["v"], at_keys, smem["kv_arrived"])
            pairs.fetch_keys(smem["kv_arrived"])
            fetch_steps(walk, pairs, refs, smem)

        for role, compute in ((SCORES, _scores), (GRADIENTS, _gradients)):

            @pl.when(walk.warpgroup == role)
            def _(role: int = role, compute: Any = compute) -> None:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
                half = Half(plan, head, refs, smem, walk, pairs, role)
                plgpu.barrier_wait(smem["kv_arrived"])
                pairs.hide_unseen(walk.first_key, half.k_smem, half.v_smem)
                d_keys = half.accumulator(TILE)
                # Nothing is in flight where the loop closes: the compiler would make every product of the loop wait.
                pl.run_scoped(lambda *accumulators: compute(half, *accumulators), d_keys, d_keys)

    specs = divided_scratch(config, head, dtype, Lines.of(refs, config))
    pl.run_scoped(run_warpgroups, specs, collective_axes="warpgroup")


class Half:
    """What a warpgroup does with its half of the columns of every gradient, whichever its role is."""

    def __init__(
        self, plan: Plan, head: Columns, refs: dict[str, Any], smem: dict[str, Any], walk: Walk, pairs: Pairs, role: int
    ) -> None:
        self.plan, self.head, self.refs, self.smem = plan, head, refs, smem
        self.walk, self.pairs, self.role = walk, pairs, role
        self.dtype, self.width = refs["q"].dtype, head.part_width
        # The role is known while tracing, so that addresses of the part are constants.
        self.part = slice(role * self.width, (role + 1) * self.width) if isinstance(head, WholeColumns) else role
        self.k_smem, self.v_smem = smem["all_keys"].at(0), smem["all_values"].at(0)

    def slot(self, name: str, number: Any) -> Any:
        return lax.rem(number, self.plan.config.stages_of[name])

    def hidden_zeros(self, done: Any) -> list[Any]:
        """What is added to the places of operands that stay: see `hidden_zero`. Registers are short with every mask."""
        if self.plan.sharers * self.plan.steps > HIDDEN_STEPS:
            return [0, 0]
        return [hopper.hidden_zero(done, stage) for stage in range(2)]

    def accumulator(self, rows: int) -> Any:
        """Of this half of the columns."""
        return plgpu.WGMMAAccumulatorRef((rows, self.width), jnp.float32)

    @property
    def products(self) -> Any:
        """A step's scores, or what they are for the gradients. Its zeros are made where it is, which lives no longer
        than it has to: registers that are short make the compiler wait for every single product."""
        return plgpu.WGMMAAccumulatorRef((TILE, self.plan.block_q), jnp.float32)

    def d_queries_and_keys(self, visit: Visit, dk_ref: Any, zero: Any, drained: Callable[[int], None]) -> None:
        """A step's last products: this half of dq, added to the sums in memory, and of dk. dq leaves under the product
        for dk; `drained(n)` is called when all but n groups of what is on its way are of these products."""
        smem = self.smem
        ds = {width: ref.at[zero] for width, ref in smem["ds"].items()}
        transposed = {width: ref.transpose((1, 0)) for width, ref in ds.items()}
        keys = smem["all_keys"].at(zero).part(self.part)
        queries = smem["q"].at(self.slot("q", visit.done)).part(self.part)

        def multiplied(dq_ref: Any) -> Any:
            multiply(dq_ref, transposed, keys)
            multiply(dk_ref, ds, queries)
            drained(len(keys) + len(queries))
            return plgpu.wgmma_accumulator_load(dq_ref, wait_n=len(queries))

        rows = self.walk.dq_at(visit.member, pl.ds(visit.first_row, self.plan.block_q))
        dq = pl.run_scoped(multiplied, self.accumulator(self.plan.block_q))
        self._add_to_sums(self.plan.summed(dq), "dq", rows)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem["q_drained"].at[self.slot("q", visit.done)])

    def _add_to_sums(self, value: Any, target: str, at: tuple[Any, ...]) -> None:
        add_to_sums(self.smem["dq"].at(self.role), value, self.refs[target], at, self.role * self.width)

    def finish(self, dk_ref: Any, dv_ref: Any) -> None:
        """The gradients of the keys and values to memory, by way of where these were."""
        dk, dv = dk_ref[...] * self.plan.scale, dv_ref[...]
        at = self.walk.keys_at(pl.ds(self.walk.first_key, TILE))
        if self.plan.adds_keys:
            self._add_to_sums(dk, "dk", at)
            self._add_to_sums(dv, "dv", at)
            plgpu.wait_smem_to_gmem(0)
            return
        self._meet()  # the other warpgroup reads all of the keys or values until its last hand-over
        self.k_smem.store(dk.astype(self.dtype), self.part)
        self.v_smem.store(dv.astype(self.dtype), self.part)
        plgpu.commit_smem()
        self._meet()
        # A copy takes whole tiles of rows, so one warpgroup sends the keys and the other the values.
        source, target = ((self.k_smem, self.refs["dk"]), (self.v_smem, self.refs["dv"]))[self.role]
        source.send(target, at)
        plgpu.wait_smem_to_gmem(0)

    def _meet(self) -> None:
        plgpu.barrier_arrive(self.smem["both_here"])
        plgpu.barrier_wait(self.smem["both_here"])


def _scores(half: Half, dk_ref: Any, dv_ref: Any) -> None:
    smem, walk, pairs = half.smem, half.walk, half.pairs

    def step(visit: Visit, masked: bool) -> None:
        zeros, q_slot, do_slot = half.hidden_zeros(visit.done), half.slot("q", visit.done), half.slot("do", visit.done)

        def scores(s_ref: Any) -> Any:
            plgpu.barrier_wait(smem["q_arrived"].at[q_slot])
            contract(s_ref, smem["all_keys"].at(zeros[0]).whole(), smem["q"].at(q_slot).whole())
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

        s = pl.run_scoped(scores, half.products)
        p, _ = pairs.probabilities(s, load(smem["lse"].at[q_slot], LAYOUT.reduce(0)))
        if masked:
            p = jnp.where(pairs.allowed(walk.first_key, visit.first_row, q_slot), p, 0.0)
        p16 = p.astype(half.dtype)
        smem["p"][...] = p16
        plgpu.barrier_arrive(smem["p_ready"])
        plgpu.barrier_wait(smem["do_arrived"].at[do_slot])
        multiply(dv_ref, p16, smem["do"].at(do_slot).part(half.part))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem["do_drained"].at[do_slot])
        plgpu.barrier_wait(smem["ds_ready"])
        half.d_queries_and_keys(visit, dk_ref, zeros[1], lambda in_flight: None)

    walk.compute(walk.first_key, TILE, step, pairs.masks)
    half.finish(dk_ref, dv_ref)


def _gradients(half: Half, dk_ref: Any, dv_ref: Any) -> None:
    smem, walk, pairs = half.smem, half.walk, half.pairs

    def step(visit: Visit) -> None:
        done = visit.done
        slot = half.slot("do", done)
        do = smem["do"].at(slot)
        my_do = do.part(half.part)
        zeros = half.hidden_zeros(done)

        def d_scores(dp_ref: Any) -> Any:
            plgpu.barrier_wait(smem["do_arrived"].at[slot])
            contract(dp_ref, smem["all_values"].at(zeros[0]).whole(), do.whole())
            plgpu.barrier_wait(smem["p_ready"])
            p16 = load(smem["p"], LAYOUT)
            multiply(dv_ref, p16, my_do)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=len(my_do))
            ds = pairs.d_scores(p16.astype(jnp.float32), dp, load(smem["delta"].at[slot], LAYOUT.reduce(0)))
            return ds.astype(half.dtype)

        ds = pl.run_scoped(d_scores, half.products)
        for ref in smem["ds"].values():
            ref[0] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["ds_ready"])
        plgpu.barrier_wait(smem["q_arrived"].at[half.slot("q", done)])

        def drained(in_flight: int) -> None:
            plgpu.wgmma_wait(in_flight)
            plgpu.barrier_arrive(smem["do_drained"].at[slot])

        half.d_queries_and_keys(visit, dk_ref, zeros[1], drained)

    walk.each(step)
    half.finish(dk_ref, dv_ref)


DIVIDED = Loop(TILE, lambda _: 2, divided_scratch, divided_kernel)  # a half of the columns for each warpgroup
