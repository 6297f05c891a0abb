"""The body of the Hopper attention kernel: three warpgroups on 128 rows of queries of one head.

One streams blocks of keys and values by TMA into a ring of stages. Two compute 64 rows each with the online softmax,
and barriers make them take turns on the tensor cores, so that one's softmax runs under the other's products. Only
blocks that some query sees in part are masked. A mask or bias of pairs comes by TMA too, each warpgroup's own tile
one block ahead. Causal programs with the most work start first. What a call does not ask for leaves no trace in its
program: every form is a branch taken while tracing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.attention.masking import FAR
from capibara.kernels.ops.attention.pallas_gpu_blocks import swizzle_of
from capibara.kernels.ops.attention.pallas_gpu_scores import Scores
from capibara.kernels.ops.attention.pallas_gpu_tile import LAYOUT, load
from capibara.kernels.ops.attention.pallas_gpu_walk import Plan, Walk
from capibara.kernels.pallas import hopper
from capibara.kernels.pallas.hopper import LOG2E, swizzled

FETCH_REGISTERS, COMPUTE_REGISTERS = 40, 232
# What a row's maximum starts from: low enough for any score, and finite, so that a row that has seen no key yet
# subtracts it without making a NaN.
LOWEST = -1e30
PAIR_TILES = ("bias_tile", "mask_tile")


def _pairs_swizzled(block_k: int, dtype: Any) -> tuple[Any, ...]:
    return swizzled(dtype, swizzle_of(block_k, jnp.dtype(dtype).itemsize))


def program(*given: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """Set up shared memory and barriers, then run the three warpgroups."""
    refs = dict(zip(names, given, strict=True))
    config = plan.config
    block_q, block_k, stages = config.block_q, config.block_k, config.stages
    head_dim, dtype = refs["q"].shape[-1], refs["q"].dtype
    pairs = {
        name: plgpu.SMEM((2, block_q, block_k), refs[name].dtype, transforms=_pairs_swizzled(block_k, refs[name].dtype))
        for name in PAIR_TILES
        if name in refs
    }
    scratch = {
        "q": plgpu.SMEM((2, block_q, head_dim), dtype, transforms=swizzled(dtype)),  # the output's too, if alone
        "k": plgpu.SMEM((stages, block_k, head_dim), dtype, transforms=swizzled(dtype)),
        "v": plgpu.SMEM((stages, block_k, head_dim), dtype, transforms=swizzled(dtype)),
        **pairs,
        "q_arrived": plgpu.Barrier(num_barriers=2),
        "k_arrived": plgpu.Barrier(num_barriers=stages),
        "v_arrived": plgpu.Barrier(num_barriers=stages),
        "k_drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    if config.programs:
        # The next tile's queries arrive while this one's output leaves.
        scratch["out"] = plgpu.SMEM((2, block_q, head_dim), dtype, transforms=swizzled(dtype))
    if "lse" in refs:
        scratch["lse"] = plgpu.SMEM((2, block_q), jnp.float32)
    if pairs:
        scratch["pairs_arrived"] = plgpu.Barrier(num_arrivals=len(pairs), num_barriers=2)

    def scoped(*made: Any) -> None:
        smem = dict(zip(scratch, made, strict=True))
        smem.setdefault("out", smem["q"])
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            _each_tile(plan, lambda tile, done: _fetch(plan, refs, smem, Walk(plan, refs, tile.place, done)))

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute = functools.partial(_compute, plan, refs, smem, warpgroup)
            _each_tile(plan, lambda tile, done: compute(tile, Walk(plan, refs, tile.place, done)))
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(scoped, *scratch.values(), collective_axes="warpgroup")


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A tile of the program's: whether it is the first, and what follows. All None: it is known to be the only one."""

    place: tuple[Any, Any, Any]
    first: Any = None
    is_last: Any = None
    following: tuple[Any, Any, Any] | None = None


def _each_tile(plan: Plan, body: Callable[[_Turn, Any], Any]) -> None:
    """body(turn, done), which returns `done` for the next, for every tile of this program."""
    if not plan.config.programs:
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        body(_Turn((batch, head, tile)), 0)
        return
    program = lax.axis_index("program")
    (programs,), _ = plan.launch
    zero = program * 0
    count = lax.div(zero + (plan.tiles + programs - 1) - program, zero + programs)

    def one(number: Any, done: Any) -> Any:
        place = plan.place(program + number * programs)
        # Of the last tile nothing follows; its own place stands in.
        following = plan.place(program + lax.min(number + 1, count - 1) * programs)
        return body(_Turn(place, number == 0, number + 1 == count, following), done)

    lax.fori_loop(zero, count, one, zero)


def _fetch(plan: Plan, refs: dict[str, Any], smem: dict[str, Any], walk: Walk) -> Any:
    """Keys and values, block by block, as the stages drain."""
    block_k, stages = plan.config.block_k, plan.config.stages
    kv_head = lax.div(walk.head, jnp.asarray(plan.group, walk.head.dtype))

    @pl.loop(walk.begin, walk.end)
    def _block(step: Any) -> None:
        slot = walk.slot(step)
        at = walk.at(kv_head, pl.ds(walk.block(walk.entry(step)) * block_k, block_k))
        for name in ("k", "v"):

            @pl.when(walk.count(step) >= stages)
            def _(name: str = name) -> None:
                plgpu.barrier_wait(smem[f"{name}_drained"].at[slot])

            plgpu.copy_gmem_to_smem(refs[name].at[at], smem[name].at[slot], smem[f"{name}_arrived"].at[slot])

    return walk.count(walk.end)


def _compute(plan: Plan, refs: dict[str, Any], smem: dict[str, Any], warpgroup: Any, tile: _Turn, walk: Walk) -> Any:
    """64 rows of queries through every block of the walk, and their output."""
    config, grid = plan.config, plan.grid
    block_q, block_k = config.block_q, config.block_k
    head_dim, dtype = refs["q"].shape[-1], refs["q"].dtype
    start = walk.first_row + warpgroup * block_q
    rows = pl.ds(start, block_q)

    def fetch_queries(walk: Walk) -> None:
        at = walk.at(walk.head, pl.ds(walk.first_row + warpgroup * block_q, block_q))
        plgpu.copy_gmem_to_smem(refs["q"].at[at], smem["q"].at[warpgroup], smem["q_arrived"].at[warpgroup])

    if tile.first is None:
        fetch_queries(walk)
    else:
        pl.when(tile.first)(lambda: fetch_queries(walk))
    pairs = [name for name in PAIR_TILES if name in refs]

    def fetch_pairs(block: Any) -> None:
        for name in pairs:
            at = (*walk.shared(refs[name]), rows, pl.ds(block * block_k, block_k))
            plgpu.copy_gmem_to_smem(refs[name].at[at], smem[name].at[warpgroup], smem["pairs_arrived"].at[warpgroup])

    if pairs:
        pl.when(walk.begin < walk.end)(lambda: fetch_pairs(walk.block(walk.entry(walk.begin))))
    scores = Scores(plan, refs, walk, start)
    plgpu.barrier_wait(smem["q_arrived"].at[warpgroup])

    # A warpgroup has the tensor cores for one block's values and the next block's keys, and then the other has them.
    def hand_over() -> None:
        if config.take_turns:
            hopper.give_turn()

    def await_turn() -> None:
        if config.take_turns:
            hopper.await_turn()

    def block_step(step: Any, carry: Any, masked: bool) -> Any:
        acc, highest, total, *ahead = carry
        slot = walk.slot(step)
        # A table's entry was read a step ahead: its latency is hidden.
        entry = ahead[0] if ahead else step
        next_entry = walk.entry(step + 1)
        block = walk.block(entry)

        def products(ref: Any) -> Any:
            plgpu.wgmma(ref, smem["q"].at[warpgroup], plgpu.transpose_ref(smem["k"].at[slot], (1, 0)))
            hand_over()
            return ref[...]

        s = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((block_q, block_k), jnp.float32))
        plgpu.barrier_arrive(smem["k_drained"].at[slot])
        found = {}
        if pairs:
            plgpu.barrier_wait(smem["pairs_arrived"].at[warpgroup])
            for name in pairs:
                if masked or name != "mask_tile":
                    found[name] = load(smem[name].at[warpgroup], LAYOUT)
            # Every thread has read its part: the next tile may land on it.
            plgpu.commit_smem()
            pl.when(step + 1 < walk.end)(lambda: fetch_pairs(walk.block(next_entry)))
        s, unit = scores.exponents(s, block, found, masked)
        new_highest = jnp.maximum(highest, s.max(axis=1) * unit)
        shrink = jnp.exp2(highest - new_highest)
        p = jnp.exp2(s * unit - lax.broadcast_in_dim(new_highest, s.shape, [0]))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        total = total * shrink + p.sum(axis=1)
        p16 = scores.dropped(p, block).astype(dtype)
        acc, total, new_highest, p16 = lax.optimization_barrier((acc, total, new_highest, p16))
        plgpu.barrier_wait(smem["v_arrived"].at[slot])
        if masked:
            scores.zero_unseen(smem["v"].at[slot], entry, block)
        await_turn()

        def add_values(ref: Any) -> None:
            plgpu.wgmma(ref, p16, smem["v"].at[slot])

            @pl.when(step + 1 < walk.end)
            def _() -> None:
                plgpu.barrier_wait(smem["k_arrived"].at[walk.slot(step + 1)])

        acc = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc))
        plgpu.barrier_arrive(smem["v_drained"].at[slot])
        return (acc, new_highest, total, next_entry) if ahead else (acc, new_highest, total)

    carry: Any = (
        plgpu.layout_cast(jnp.full((block_q, head_dim), 0, jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full((block_q,), LOWEST, jnp.float32), LAYOUT.reduce(1)),
        plgpu.layout_cast(jnp.full((block_q,), 0, jnp.float32), LAYOUT.reduce(1)),
    )
    if walk.table is not None:
        carry = (*carry, walk.entry(walk.begin))

    @pl.when(walk.begin < walk.end)
    def _() -> None:
        plgpu.barrier_wait(smem["k_arrived"].at[walk.slot(walk.begin)])

    # The first of all turns is the first warpgroup's.
    pl.when((warpgroup == 1) if tile.first is None else (warpgroup == 1) | ~tile.first)(await_turn)
    whole_begin, whole_end = walk.whole(start)
    partial_step = functools.partial(block_step, masked=True)
    if walk.table is None and grid.band.below != -FAR:
        carry = lax.fori_loop(walk.begin, whole_begin, partial_step, carry)
    carry = lax.fori_loop(whole_begin, whole_end, functools.partial(block_step, masked=False), carry)
    if scores.masks_last:
        # Counted from zero: a count that starts from what was read from an operand varies over the mesh in shard_map.
        zero = walk.end * 0 if walk.table is None else warpgroup * 0
        left = walk.end - whole_end
        carry = lax.fori_loop(zero, left, lambda n, c: partial_step(whole_end + n, c), carry)
    # Of the very last turn nobody waits for the end.
    pl.when((warpgroup == 0) if tile.is_last is None else (warpgroup == 0) | ~tile.is_last)(hand_over)
    if tile.following is not None:
        plgpu.commit_smem()  # all threads are done with these queries
        following = Walk(plan, refs, tile.following)
        pl.when(~tile.is_last)(lambda: fetch_queries(following))

    acc, highest, total = carry[:3]
    seen = total != 0  # a NaN that a query sees stays one
    kept = 1.0 - plan.dropout_rate
    inverse = jnp.where(seen, 1.0 / jnp.where(seen, total * kept, 1.0), 0.0)
    acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
    if tile.following is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
    smem["out"][warpgroup] = acc.astype(dtype)
    if "lse" in refs:
        logs = (highest + jnp.log2(jnp.where(seen, total, 1.0))) / LOG2E
        smem["lse"][warpgroup] = jnp.where(seen, logs, -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["out"].at[warpgroup], refs["out"].at[walk.at(walk.head, rows)])
    if "lse" in refs:
        plgpu.copy_smem_to_gmem(smem["lse"].at[warpgroup], refs["lse"].at[walk.batch, walk.head, rows])
    return walk.count(walk.end)
